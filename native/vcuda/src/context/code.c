/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Code: modules, libraries, and what of them the driver brings to the card late; the stacks and heaps that cuCtxSetLimit sizes.
 * What they take is known to the driver alone. After a load one question to NVML says what this process holds beyond its
 * charge (unaccounted.c); a load after which that has no room in the limit is undone. A part that is asked for later is only
 * marked: the next allocation, free or load looks.
 *
 * No lock is held in the driver's call: it may wait for the GPU, or call a tool back that loads code of its own.
 */
#include "context.h"

#include "process.h"

/* The device whose code, stacks and heaps are charged; NULL: there is nothing to look at. */
static const struct device *charged_device(enum control control)
{
    CUcontext context;
    CUresult unused;
    return control == CONTROL_ON && limits_count_context() ? device_current(&context, &unused) : NULL;
}

static void mark(enum control control)
{
    const struct device *device = charged_device(control);
    if (device)
        unaccounted_due(device->ledger);
}

/* --- loading ------------------------------------------------------------------------------------------------ */

/* *before: what had no room then. An error: nothing is loaded. */
static CUresult load_begin(enum control control, const struct device **device, uint64_t *before)
{
    *device = NULL;
    if (control == CONTROL_BROKEN)
        return memory_broken();
    CUresult status = memory_meet();
    if (status == CUDA_SUCCESS)
        *device = charged_device(control);
    if (*device)
        *before = unaccounted_over((*device)->ledger);
    return status;
}

/* Has what came since no room? Where that cannot be seen now, a later step does. */
static bool too_much(const struct device *device, uint64_t before)
{
    unaccounted_late();
    return device && unaccounted_look(device) > before;
}

#define LOAD(symbol, result, unload, parameters, arguments) \
    EXPORT CUresult symbol parameters \
    { \
        ENTER(symbol, arguments); \
        const struct device *device; \
        uint64_t before; \
        CUresult status = load_begin(control, &device, &before); \
        if (status != CUDA_SUCCESS) \
            return status; \
        status = REAL(symbol) arguments; \
        if (status == CUDA_SUCCESS && too_much(device, before)) { \
            REAL(unload)(*result); \
            unaccounted_look(device); \
            return CUDA_ERROR_OUT_OF_MEMORY; \
        } \
        return status; \
    }

LOAD(cuModuleLoad, module, cuModuleUnload, (CUmodule *module, const char *file), (module, file))
LOAD(cuModuleLoadData, module, cuModuleUnload, (CUmodule *module, const void *image), (module, image))
LOAD(cuModuleLoadDataEx, module, cuModuleUnload,
     (CUmodule *module, const void *image, unsigned int count, int *options, void **values),
     (module, image, count, options, values))
LOAD(cuModuleLoadFatBinary, module, cuModuleUnload, (CUmodule *module, const void *image), (module, image))
LOAD(cuLibraryLoadData, library, cuLibraryUnload,
     (CUlibrary *library, const void *code, int *jit, void **jit_values, unsigned int jit_count, int *options, void **values,
      unsigned int count),
     (library, code, jit, jit_values, jit_count, options, values, count))
LOAD(cuLibraryLoadFromFile, library, cuLibraryUnload,
     (CUlibrary *library, const char *file, int *jit, void **jit_values, unsigned int jit_count, int *options, void **values,
      unsigned int count),
     (library, file, jit, jit_values, jit_count, options, values, count))

/* --- unloading: a library from all contexts, on whatever devices ------------------------------------------------- */

#define UNLOAD(symbol, parameters, arguments) \
    EXPORT CUresult symbol parameters \
    { \
        ENTER(symbol, arguments); \
        CUresult status = REAL(symbol) arguments; \
        for (int device = 0; device < VGPU_MAX_DEVICES; device++) \
            if (control == CONTROL_ON && status == CUDA_SUCCESS && unaccounted_any(device)) \
                unaccounted_settle(device); \
        return status; \
    }

UNLOAD(cuModuleUnload, (CUmodule module), (module))
UNLOAD(cuLibraryUnload, (CUlibrary library), (library))

/* --- parts that the driver may bring to the card when they are first asked for ------------------------------------ */

#define PART(symbol, parameters, arguments) \
    EXPORT CUresult symbol parameters \
    { \
        ENTER(symbol, arguments); \
        CUresult status = REAL(symbol) arguments; \
        mark(control); \
        return status; \
    }

PART(cuModuleGetFunction, (CUfunction * function, CUmodule module, const char *name), (function, module, name))
PART(cuModuleGetGlobal, (CUdeviceptr_v1 * pointer, unsigned int *bytes, CUmodule module, const char *name),
     (pointer, bytes, module, name))
PART(cuModuleGetGlobal_v2, (CUdeviceptr * pointer, size_t *bytes, CUmodule module, const char *name),
     (pointer, bytes, module, name))
PART(cuLibraryGetModule, (CUmodule * module, CUlibrary library), (module, library))
PART(cuLibraryGetGlobal, (CUdeviceptr * pointer, size_t *bytes, CUlibrary library, const char *name),
     (pointer, bytes, library, name))
PART(cuLibraryGetManaged, (CUdeviceptr * pointer, size_t *bytes, CUlibrary library, const char *name),
     (pointer, bytes, library, name))
PART(cuLibraryGetUnifiedFunction, (void **function, CUlibrary library, const char *name), (function, library, name))
PART(cuKernelGetFunction, (CUfunction * function, CUkernel kernel), (function, kernel))
PART(cuFuncLoad, (CUfunction function), (function))

/* --- heaps and stacks ------------------------------------------------------------------------------------------ */

EXPORT CUresult cuCtxSetLimit(int limit, size_t value)
{
    ENTER(cuCtxSetLimit, (limit, value));
    const struct device *device = charged_device(control);
    size_t former;
    uint64_t before = device ? unaccounted_over(device->ledger) : 0;
    bool known = device && REAL_HAS(cuCtxGetLimit) && REAL(cuCtxGetLimit)(&former, limit) == CUDA_SUCCESS;
    CUresult status = REAL(cuCtxSetLimit)(limit, value);
    if (status == CUDA_SUCCESS && device && unaccounted_look(device) > before && known) {
        REAL(cuCtxSetLimit)(limit, former);
        unaccounted_look(device);
        status = CUDA_ERROR_OUT_OF_MEMORY;
    }
    return status;
}
