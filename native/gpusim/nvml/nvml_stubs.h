/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Defines a weak stub for each NVML_EXPORT(name), so that the library exports every name that the real NVML exports. If
 * another file defines the function, that definition replaces the stub at link time. The other stubs return
 * NOT_SUPPORTED, which clients treat as a missing feature. A file that includes this header must not include the real
 * prototypes, because all stubs have the same type.
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
