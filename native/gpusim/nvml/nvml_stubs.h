/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A weak body for each NVML_EXPORT(name): what another file defines wins at link time, the rest answers NOT_SUPPORTED,
 * which every client takes as "this GPU does not have that". Who includes this must not see the real prototypes.
 */
#ifndef GPUSIM_NVML_STUBS_H
#define GPUSIM_NVML_STUBS_H

#include "nvml_internal.h"

static nvmlReturn_t not_supported(const char *name)
{
    nvml_trace("%s", name);
    nvmlReturn_t result = nvml_enter();
    return result == NVML_SUCCESS ? NVML_ERROR_NOT_SUPPORTED : result;
}

#define NVML_EXPORT(name)                                                                                              \
    NVML_API __attribute__((weak)) nvmlReturn_t name(void)                                                             \
    {                                                                                                                  \
        return not_supported(#name);                                                                                   \
    }

#endif
