/* SPDX-License-Identifier: Apache-2.0 */
/* Weak bodies for the names of 535 and 550. */
#include "nvml_stubs.h"

#include "nvml_exports.def"
