/* SPDX-License-Identifier: Apache-2.0 */
/* Weak stubs for the names that NVML of driver branch 615 adds. They return NOT_SUPPORTED for each function that no
 * file of the simulated library implements; ../nvml/stubs.c has the stubs for names of older drivers. */
#include "nvml_stubs.h"

#include "exports.def"
