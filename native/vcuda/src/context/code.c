/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Charges the GPU memory of code, that is, of modules, libraries and their parts that the driver loads late. Also
 * charges the stacks and heaps whose sizes cuCtxSetLimit sets. Only the driver knows how much memory they need. So
 * after a load one NVML query shows how much memory this process uses beyond its charge (unaccounted.c). If these
 * bytes do not fit the limit, the load is undone. A request for a part that the driver loads late only sets a flag, so
 * that the next allocation, free or load compares the figures.
 *
 * The library holds no lock during the driver's call, because the driver may wait for the GPU, or call a tool in the
 * process (such as a profiler) that loads its own code.
 */
#include "context.h"

#include "process.h"

/* Returns the device to which code, stacks and heaps are charged. Returns NULL if they are not charged; then nothing is
 * checked. */
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

struct coming {
    /* Device to which the load is charged; NULL if the load is not checked. */
    const struct device *device;
    /* Bytes by which this process exceeded the limit before the load. */
    uint64_t before;
    bool passes, locked;
};

static void coming_begin(struct coming *coming, const struct device *device)
{
    *coming = (struct coming){.device = device};
    if (!device)
        return;
    coming->before = unaccounted_over(device->ledger);
    coming->passes = context_pass(device->ledger);
}

/* Returns true if the loaded code exceeds the limit; the caller then undoes the load and calls coming_undone. If NVML's
 * figure cannot be compared now, returns false, and a later comparison charges the code. If several loads exceed the
 * limit together, they are undone one at a time until the rest fits: coming_undone drops the lock, and only then is the
 * next load checked. */
static bool coming_too_much(struct coming *coming, bool came)
{
    const struct device *device = coming->device;
    bool over = device && came && unaccounted_look(device) > coming->before;
    if (coming->passes)
        context_unlock(device->ledger, false);
    if (!over)
        return false;
    coming->locked = context_lock(device->ledger);
    if (coming->locked)
        unaccounted_look_locked(device);
    over = unaccounted_over(device->ledger) > coming->before;
    if (!over)
        context_unlock(device->ledger, coming->locked);
    return over;
}

static void coming_undone(const struct coming *coming)
{
    const struct device *device = coming->device;
    if (coming->locked)
        unaccounted_look_locked(device);
    context_unlock(device->ledger, coming->locked);
    if (!coming->locked)
        unaccounted_look(device);
}

/* The first step of a load. If it returns an error, nothing may be loaded. */
static CUresult load_begin(enum control control, struct coming *coming)
{
    if (control == CONTROL_BROKEN)
        return memory_broken();
    CUresult status = memory_meet();
    if (status == CUDA_SUCCESS)
        coming_begin(coming, charged_device(control));
    return status;
}

#define LOAD(symbol, result, unload, parameters, arguments) \
    EXPORT CUresult symbol parameters \
    { \
        ENTER(symbol, arguments); \
        struct coming coming; \
        CUresult status = load_begin(control, &coming); \
        if (status != CUDA_SUCCESS) \
            return status; \
        status = REAL(symbol) arguments; \
        unaccounted_late(); \
        if (coming_too_much(&coming, status == CUDA_SUCCESS)) { \
            REAL(unload)(*result); \
            coming_undone(&coming); \
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

/* --- unloading: removes a library from all contexts on all devices ----------------------------------------------- */

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

/* --- parts of code that the driver loads only when a program asks for them ------------------------------ */

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
    struct coming coming;
    size_t former;
    bool known = device && REAL_HAS(cuCtxGetLimit) && REAL(cuCtxGetLimit)(&former, limit) == CUDA_SUCCESS;
    coming_begin(&coming, device);
    CUresult status = REAL(cuCtxSetLimit)(limit, value);
    if (coming_too_much(&coming, status == CUDA_SUCCESS)) {
        if (known) {
            REAL(cuCtxSetLimit)(limit, former);
            status = CUDA_ERROR_OUT_OF_MEMORY;
        }
        coming_undone(&coming);
    }
    return status;
}
