/* SPDX-License-Identifier: Apache-2.0 */
/* Weak stubs for the NVML functions of driver branches 535 and 550. */
#include "nvml_stubs.h"

#include "nvml_exports.def"
