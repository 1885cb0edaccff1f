/* SPDX-License-Identifier: Apache-2.0 */
/* Weak stubs for all NVML functions of driver branches 535 and 550. They return NOT_SUPPORTED for each function that no
 * other file of the simulated library implements. */
#include "nvml_stubs.h"

#include "nvml_exports.def"
