/* SPDX-License-Identifier: Apache-2.0 */
/* Weak stubs for the new names of 615 that no file defines; ../nvml/stubs.c has those of older drivers. */
#include "nvml_stubs.h"

#include "exports.def"
