/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Modules: code and globals count with the contexts. Their size is measured around the load; a module that does not fit
 * is unloaded again and the caller gets OUT_OF_MEMORY.
 */
#include "vgpu.h"

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
        measure_begin(&loading->measure, device);
    }
    return CUDA_SUCCESS;
}

static CUresult load_end(const struct loading *loading, CUresult status, CUmodule module)
{
    uint64_t bytes;
    if (status != CUDA_SUCCESS || !loading->device || measure_end(&loading->measure, &bytes) != MEASURED_OWN)
        return status;
    status = memory_charge(loading->device, ACCOUNT_CONTEXT, bytes);
    if (status == CUDA_SUCCESS)
        memory_keep(&vgpu_modules, (uintptr_t)module, bytes, loading->device, BLOCK_PLAIN, (uintptr_t)loading->context);
    else if (REAL_HAS(cuModuleUnload))
        REAL(cuModuleUnload)(module);
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

EXPORT CUresult cuModuleUnload(CUmodule module)
{
    ENTER(cuModuleUnload, (module));
    struct block block;
    bool ours = block_take(&vgpu_modules, (uintptr_t)module, &block);
    CUresult status = REAL(cuModuleUnload)(module);
    if (ours && status != CUDA_SUCCESS)
        block_put(&vgpu_modules, &block);
    else if (ours)
        ledger_uncharge(block.device, ACCOUNT_CONTEXT, block.bytes);
    return status;
}
