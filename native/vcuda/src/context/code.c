/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Code that reaches the card outside of cuModuleLoad*: libraries, and kernels that the driver loads only when they are first
 * asked for. Each first asking is measured like a module and charged to its holder (the library or module that it is part
 * of) in the context at hand. The heaps and stacks of a context, which cuCtxSetLimit sizes, are charged the same way.
 *
 * A kernel of a library is loaded by its first launch. Nothing is measured there; so a program that asks a library for a
 * kernel gets it loaded at once, in the context at hand, and a launch finds it loaded.
 */
#include "context.h"

#include "process.h"

#include <stdlib.h>

/*
 * Two tables. vgpu_modules: bytes of a holder in a context; owner is the context, which takes them with it. vgpu_parts: what
 * was asked for already; owner is the holder, bytes the context. A part's key without a name stands for its holder.
 */
enum { PART_ASKED = 1, PART_OF = 2 };

static uint64_t key_of(uint64_t holder, uint64_t context, const char *name)
{
    uint64_t key = (holder * 0x9e3779b97f4a7c15ull ^ context) * 0xff51afd7ed558ccdull;
    for (; name && *name; name++)
        key = (key ^ (unsigned char)*name) * 0x100000001b3ull;
    return key ^ key >> 32;
}

/* The library that a module or kernel of it belongs to, or the thing itself. */
static uint64_t holder_of(const void *thing)
{
    struct block block;
    return block_get(&vgpu_parts, (uintptr_t)thing, &block) && block.kind == PART_OF ? block.owner : (uintptr_t)thing;
}

static void belongs(const void *thing, uint64_t holder)
{
    struct block block = {.key = (uintptr_t)thing, .owner = holder, .kind = PART_OF};
    block_put(&vgpu_parts, &block);
}

/* Context locked. Adds to what the holder is charged in the context. */
static void keep(uint64_t holder, CUcontext context, const struct device *device, uint64_t bytes)
{
    struct block block;
    if (!block_take(&vgpu_modules, key_of(holder, (uintptr_t)context, NULL), &block))
        block = (struct block){.key = key_of(holder, (uintptr_t)context, NULL),
                               .owner = (uintptr_t)context,
                               .device = device->ledger,
                               .kind = BLOCK_PLAIN};
    block.bytes += bytes;
    if (!block_put(&vgpu_modules, &block))
        vgpu_log_line(LOG_ERROR, "no host memory to remember %llu bytes of code: they stay charged until exit",
                      (unsigned long long)bytes);
}

/* --- growth ---------------------------------------------------------------------------------------------- */

struct growth {
    const struct device *device;
    CUcontext context;
    uint64_t key;
    struct measure measure;
};

/* Locks the context's device where there is something to measure: until growth_end. `name` NULL: always. */
static bool growth_begin(enum control control, struct growth *growth, uint64_t holder, const char *name)
{
    CUresult unused;
    struct block block;
    if (control != CONTROL_ON || !limits_count_context())
        return false;
    growth->device = device_current(&growth->context, &unused);
    if (!growth->device)
        return false;
    growth->key = name ? key_of(holder, (uintptr_t)growth->context, name) : 0;
    if (name && block_get(&vgpu_parts, growth->key, &block))
        return false;
    context_lock(growth->device->ledger);
    measure_begin(&growth->measure, growth->device);
    return true;
}

/* Charges what came. What does not fit is undone by the caller, who then gets OUT_OF_MEMORY, or stays, charged. */
static CUresult growth_charge(const struct growth *growth, uint64_t holder, bool stays)
{
    uint64_t bytes = 0;
    if (measure_end(&growth->measure, &bytes) != MEASURED_OWN)
        return CUDA_SUCCESS;
    CUresult status = memory_charge(growth->device, ACCOUNT_CONTEXT, bytes);
    if (status != CUDA_SUCCESS && !stays)
        return status;
    if (status != CUDA_SUCCESS)
        ledger_charge(growth->device->ledger, ACCOUNT_CONTEXT, bytes, UINT64_MAX);
    keep(holder, growth->context, growth->device, bytes);
    return status;
}

static CUresult growth_end(const struct growth *growth, CUresult status, uint64_t holder)
{
    CUresult charged = growth_charge(growth, holder, true);
    struct block asked = {.key = growth->key, .owner = holder, .bytes = (uintptr_t)growth->context, .kind = PART_ASKED};
    if (status == CUDA_SUCCESS)
        block_put(&vgpu_parts, &asked);
    context_unlock(growth->device->ledger);
    return status == CUDA_SUCCESS ? charged : status;
}

/* --- parts ------------------------------------------------------------------------------------------------ */

#define PART(symbol, parameters, arguments, owner, name, found) \
    EXPORT CUresult symbol parameters \
    { \
        ENTER(symbol, arguments); \
        struct growth growth; \
        uint64_t holder = owner; \
        bool measuring = growth_begin(control, &growth, holder, name); \
        CUresult status = REAL(symbol) arguments; \
        if (status == CUDA_SUCCESS) { \
            found; \
        } \
        return measuring ? growth_end(&growth, status, holder) : status; \
    }
#define NOTHING (void)0

/* The names tell one kind of part from another of the same name. */
PART(cuModuleGetFunction, (CUfunction * function, CUmodule module, const char *name), (function, module, name),
     holder_of(module), name ? name : "", NOTHING)
PART(cuModuleGetGlobal, (CUdeviceptr_v1 * pointer, unsigned int *bytes, CUmodule module, const char *name),
     (pointer, bytes, module, name), holder_of(module), name ? name : "", NOTHING)
PART(cuModuleGetGlobal_v2, (CUdeviceptr * pointer, size_t *bytes, CUmodule module, const char *name),
     (pointer, bytes, module, name), holder_of(module), name ? name : "", NOTHING)
PART(cuLibraryGetModule, (CUmodule * module, CUlibrary library), (module, library), (uintptr_t)library, "\1",
     if (module) belongs(*module, holder))
PART(cuLibraryGetGlobal, (CUdeviceptr * pointer, size_t *bytes, CUlibrary library, const char *name),
     (pointer, bytes, library, name), (uintptr_t)library, name ? name : "", NOTHING)
PART(cuLibraryGetManaged, (CUdeviceptr * pointer, size_t *bytes, CUlibrary library, const char *name),
     (pointer, bytes, library, name), (uintptr_t)library, name ? name : "", NOTHING)
PART(cuLibraryGetUnifiedFunction, (void **function, CUlibrary library, const char *name), (function, library, name),
     (uintptr_t)library, name ? name : "", NOTHING)
PART(cuKernelGetFunction, (CUfunction * function, CUkernel kernel), (function, kernel), holder_of(kernel), "\2", NOTHING)

/* Its module is asked for before the call: that of a function that is not loaded yet is known too. */
static uint64_t holder_of_function(CUfunction function)
{
    CUmodule module = NULL;
    if (!function || !REAL_HAS(cuFuncGetModule) || REAL(cuFuncGetModule)(&module, function) != CUDA_SUCCESS)
        return (uintptr_t)function;
    return holder_of(module);
}

EXPORT CUresult cuFuncLoad(CUfunction function)
{
    ENTER(cuFuncLoad, (function));
    struct growth growth;
    char name[32] = "\3"; /* of this function: its holder has others */
    uint64_t holder = control == CONTROL_ON ? holder_of_function(function) : 0;
    for (int i = 0; i < 16; i++)
        name[1 + i] = (char)('a' + ((uintptr_t)function >> 4 * i & 15));
    bool measuring = growth_begin(control, &growth, holder, name);
    CUresult status = REAL(cuFuncLoad)(function);
    return measuring ? growth_end(&growth, status, holder) : status;
}

/* Loads a kernel in the context at hand. What fails here fails again, and is reported, when it is launched. */
static void load_now(CUkernel kernel)
{
    CUfunction function;
    int mode = CU_STREAM_CAPTURE_MODE_RELAXED; /* another thread's capture does not mind */
    if (!REAL_HAS(cuKernelGetFunction) || !REAL_HAS(cuThreadExchangeStreamCaptureMode))
        return;
    REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    if (REAL(cuKernelGetFunction)(&function, kernel) == CUDA_SUCCESS && REAL_HAS(cuFuncLoad))
        REAL(cuFuncLoad)(function);
    REAL(cuThreadExchangeStreamCaptureMode)(&mode);
}

EXPORT CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name)
{
    ENTER(cuLibraryGetKernel, (kernel, library, name));
    struct growth growth;
    bool measuring = growth_begin(control, &growth, (uintptr_t)library, name ? name : "");
    CUresult status = REAL(cuLibraryGetKernel)(kernel, library, name);
    if (status == CUDA_SUCCESS && control == CONTROL_ON)
        belongs(*kernel, (uintptr_t)library);
    if (status == CUDA_SUCCESS && measuring)
        load_now(*kernel);
    return measuring ? growth_end(&growth, status, (uintptr_t)library) : status;
}

/* --- loading libraries ------------------------------------------------------------------------ */

#define LOAD(symbol, type, source) \
    EXPORT CUresult symbol(CUlibrary *library, type source, int *jit, void **jit_values, unsigned int jit_count, int *options, \
                           void **values, unsigned int count) \
    { \
        ENTER(symbol, (library, source, jit, jit_values, jit_count, options, values, count)); \
        struct growth growth; \
        bool measuring = growth_begin(control, &growth, 0, NULL); \
        CUresult status = REAL(symbol)(library, source, jit, jit_values, jit_count, options, values, count); \
        if (!measuring) \
            return status; \
        if (status == CUDA_SUCCESS && (status = growth_charge(&growth, (uintptr_t)*library, false)) != CUDA_SUCCESS) \
            REAL(cuLibraryUnload)(*library); \
        context_unlock(growth.device->ledger); \
        return status; \
    }

LOAD(cuLibraryLoadData, const void *, code)
LOAD(cuLibraryLoadFromFile, const char *, file)

/* --- unloading ------------------------------------------------------------------------------------------------ */

/* What a holder is charged, in all contexts; what is beyond the room stays charged with its context. */
struct held {
    uint64_t holder;
    bool take;
    uint64_t devices; /* a bit each */
    struct block blocks[64];
    int count;
};

static void hold(struct held *held, uint64_t key)
{
    struct block block;
    if (held->count == 64 || !(held->take ? block_take : block_get)(&vgpu_modules, key, &block))
        return;
    held->devices |= 1ull << block.device;
    held->blocks[held->count++] = block;
}

static bool of_holder(const struct block *part, void *data)
{
    struct held *held = data;
    if (part->owner != held->holder)
        return false;
    /* The table of parts is locked here and the other one inside; never in the other order. */
    if (part->kind == PART_ASKED)
        hold(held, key_of(held->holder, part->bytes, NULL));
    return held->take;
}

static void collect(struct held *held, const void *holder, bool take)
{
    *held = (struct held){.holder = (uintptr_t)holder, .take = take};
    hold(held, (uintptr_t)holder); /* a module by cuModuleLoad* */
    block_sweep(&vgpu_parts, of_holder, held);
}

/* Uncharges what really went: a heap that came with a module stays, and is the context's from then on. */
static void give_back(struct held *held, int device, const struct measure *measure)
{
    uint64_t total = 0, left = 0;
    CUcontext context = NULL;
    for (int i = 0; i < held->count; i++)
        if (held->blocks[i].device == device) {
            total += held->blocks[i].bytes;
            context = (CUcontext)(uintptr_t)held->blocks[i].owner;
        }
    if (measure->device)
        left = measure_fall(measure);
    uint64_t gone = measure->device && left < total ? left : total;
    ledger_uncharge(device, ACCOUNT_CONTEXT, gone);
    if (total > gone && context)
        keep((uintptr_t)context, context, measure->device, total - gone);
}

CUresult code_unload(enum control control, const void *holder, CUresult (*unload)(const void *holder))
{
    struct held held;
    struct measure measures[VGPU_MAX_DEVICES];
    if (control != CONTROL_ON)
        return unload(holder);
    collect(&held, holder, false);
    uint64_t devices = held.devices;
    /* In order, so that two of these do not wait for each other. */
    for (int device = 0; device < VGPU_MAX_DEVICES; device++)
        if (devices >> device & 1)
            context_lock(device);
    collect(&held, holder, true);
    for (int device = 0; device < VGPU_MAX_DEVICES; device++) {
        const struct device *one = devices >> device & 1 ? device_in_ledger(device) : NULL;
        measures[device].device = NULL;
        if (one)
            measure_begin(&measures[device], one);
    }
    CUresult status = unload(holder);
    for (int i = 0; status != CUDA_SUCCESS && i < held.count; i++)
        block_put(&vgpu_modules, &held.blocks[i]);
    for (int device = VGPU_MAX_DEVICES - 1; device >= 0; device--)
        if (devices >> device & 1) {
            if (status == CUDA_SUCCESS)
                give_back(&held, device, &measures[device]);
            context_unlock(device);
        }
    return status;
}

static CUresult unload_library(const void *library)
{
    return REAL(cuLibraryUnload)((CUlibrary)(uintptr_t)library);
}

EXPORT CUresult cuLibraryUnload(CUlibrary library)
{
    ENTER(cuLibraryUnload, (library));
    return code_unload(control, library, unload_library);
}

static bool of_context(const struct block *part, void *data)
{
    return part->kind == PART_ASKED && part->bytes == (uintptr_t)data;
}

void code_forget_context(CUcontext context)
{
    block_sweep(&vgpu_parts, of_context, context);
}

void code_context_left(struct leaving *leaving)
{
    if (leaving->ours && leaving->gone)
        code_forget_context(leaving->context);
}

/* --- heaps and stacks ------------------------------------------------------------------------------------------ */

/* First what was charged for them, then what the context was measured with. */
static void shrink(CUcontext context, uint64_t bytes)
{
    struct block_map *maps[] = {&vgpu_modules, &vgpu_contexts};
    uint64_t keys[] = {key_of((uintptr_t)context, (uintptr_t)context, NULL), (uintptr_t)context};
    for (int i = 0; i < 2 && bytes; i++) {
        struct block block;
        if (!block_take(maps[i], keys[i], &block))
            continue;
        uint64_t less = bytes < block.bytes ? bytes : block.bytes;
        ledger_uncharge(block.device, ACCOUNT_CONTEXT, less);
        block.bytes -= less;
        bytes -= less;
        block_put(maps[i], &block);
    }
}

EXPORT CUresult cuCtxSetLimit(int limit, size_t value)
{
    ENTER(cuCtxSetLimit, (limit, value));
    struct growth growth;
    size_t before = 0;
    bool measuring = REAL_HAS(cuCtxGetLimit) && growth_begin(control, &growth, 0, NULL);
    if (!measuring)
        return REAL(cuCtxSetLimit)(limit, value);
    bool known = REAL(cuCtxGetLimit)(&before, limit) == CUDA_SUCCESS;
    CUresult status = REAL(cuCtxSetLimit)(limit, value);
    if (status == CUDA_SUCCESS) {
        status = growth_charge(&growth, (uintptr_t)growth.context, !known);
        if (status != CUDA_SUCCESS && known)
            REAL(cuCtxSetLimit)(limit, before);
        else if (status == CUDA_SUCCESS)
            shrink(growth.context, measure_fall(&growth.measure));
    }
    context_unlock(growth.device->ledger);
    return status;
}
