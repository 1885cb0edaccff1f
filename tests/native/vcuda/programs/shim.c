/* SPDX-License-Identifier: Apache-2.0 */
/* A library that exports the driver's function names, opens the driver at the first call, and passes the calls on.
 * Programs that must run without a driver too are linked to such libraries. */
#include "routes.h"

#include <dlfcn.h>
#include <stdlib.h>

static void *next(const char *name)
{
    static void *driver;
    if (!driver)
        driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    void *found = driver ? dlsym(driver, name) : NULL;
    if (!found)
        abort();
    return found;
}

#define SHIM(symbol, parameters, arguments) \
    CUresult symbol parameters \
    { \
        static CUresult(*real) parameters; \
        if (!real) \
            *(void **)&real = next(#symbol); \
        return real arguments; \
    }

SHIM(cuInit, (unsigned flags), (flags))
SHIM(cuDeviceGetCount, (int *count), (count))
SHIM(cuCtxCreate_v2, (CUcontext *context, unsigned flags, CUdevice device), (context, flags, device))
SHIM(cuCtxSetCurrent, (CUcontext context), (context))
SHIM(cuMemAlloc_v2, (CUdeviceptr *pointer, size_t bytes), (pointer, bytes))
SHIM(cuMemFree_v2, (CUdeviceptr pointer), (pointer))
SHIM(cuMemGetInfo_v2, (size_t *free_bytes, size_t *total_bytes), (free_bytes, total_bytes))
SHIM(cuDeviceTotalMem_v2, (size_t *bytes, CUdevice device), (bytes, device))
SHIM(cuDeviceGetUuid, (CUuuid *uuid, CUdevice device), (uuid, device))
