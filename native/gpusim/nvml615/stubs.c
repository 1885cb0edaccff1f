/* SPDX-License-Identifier: Apache-2.0 */
/* Weak bodies for what 615 adds and nothing here defines, as ../nvml/stubs.c has them for older drivers. */
#include "nvml_stubs.h"

#include "exports.def"
