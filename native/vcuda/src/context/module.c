/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Modules: code and globals count with the contexts. Their size is measured around the load; a module that does not fit
 * is unloaded again and the caller gets OUT_OF_MEMORY.
 */
#include "context.h"

#include "process.h"

struct loading {
    const struct device *device;
    CUcontext context;
    struct measure measure;
};

static CUresult load_begin(enum control control, struct loading *loading)
{
    CUresult status;
    loading->device = NULL;
    const struct device *device = memory_target(control, &loading->context, &status);
    if (!device)
        return status;
    if (limits_count_context()) {
        loading->device = device;
        context_lock(device->ledger);
        measure_begin(&loading->measure, device);
    }
    return CUDA_SUCCESS;
}

static CUresult load_charge(const struct loading *loading, CUmodule module)
{
    uint64_t bytes = 0;
    enum measured how = measure_end(&loading->measure, &bytes);
    CUresult status = CUDA_SUCCESS;
    if (how == MEASURED_BUSY) {
        vgpu_log_line(LOG_ERROR, "a module cannot be measured: another thread has been inside an allocation for seconds");
        status = CUDA_ERROR_OUT_OF_MEMORY;
    } else if (how == MEASURED_OWN) {
        status = memory_charge(loading->device, ACCOUNT_CONTEXT, bytes);
    }
    if (status != CUDA_SUCCESS && REAL_HAS(cuModuleUnload))
        REAL(cuModuleUnload)(module);
    else if (how == MEASURED_OWN)
        memory_keep(&vgpu_modules, (uintptr_t)module, bytes, loading->device, BLOCK_PLAIN, (uintptr_t)loading->context);
    return status;
}

static CUresult load_end(const struct loading *loading, CUresult status, CUmodule module)
{
    if (!loading->device)
        return status;
    if (status == CUDA_SUCCESS)
        status = load_charge(loading, module);
    context_unlock(loading->device->ledger);
    return status;
}

#define LOAD(symbol, parameters, arguments) \
    EXPORT CUresult symbol parameters \
    { \
        ENTER(symbol, arguments); \
        struct loading loading; \
        CUresult status = load_begin(control, &loading); \
        if (status != CUDA_SUCCESS) \
            return status; \
        status = REAL(symbol) arguments; \
        return load_end(&loading, status, status ? NULL : *module); \
    }

LOAD(cuModuleLoad, (CUmodule *module, const char *file), (module, file))
LOAD(cuModuleLoadData, (CUmodule *module, const void *image), (module, image))
LOAD(cuModuleLoadDataEx, (CUmodule *module, const void *image, unsigned int count, int *options, void **values),
     (module, image, count, options, values))
LOAD(cuModuleLoadFatBinary, (CUmodule *module, const void *image), (module, image))

static CUresult unload_module(const void *module)
{
    return REAL(cuModuleUnload)((CUmodule)(uintptr_t)module);
}

EXPORT CUresult cuModuleUnload(CUmodule module)
{
    ENTER(cuModuleUnload, (module));
    return code_unload(control, module, unload_module);
}
