/* SPDX-License-Identifier: Apache-2.0 */
/* Loads the image of a module into a context, charges its memory, and finds its functions and global variables. */
#include "module.h"

#include "capture.h"
#include "hostile.h"

#include <stdlib.h>
#include <string.h>

#define MODULE_MAGIC 0x4d4f4431u

struct global {
    char *name;
    CUdeviceptr pointer;
    uint64_t bytes;
    bool managed;
    struct global *next;
};

struct CUmod_st {
    uint32_t magic;
    CUcontext context;
    struct image image;
    CUfunction functions;
    struct global *globals;
    /* charged: bytes charged for the loaded module. due: bytes of code that are charged later, when the first function
     * of the module is looked up (lazy loading). */
    uint64_t charged, due;
    /* Time that the lazy load takes. */
    uint64_t due_ns;
    CUmodule next;
};

static CUresult function_new(CUmodule module, const char *name, const struct image_entry *entry, CUfunction *out)
{
    CUfunction function = calloc(1, sizeof *function);
    char *copy = strdup(name);
    if (!function || !copy) {
        free(function);
        free(copy);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    const struct sim_gpu *gpu = &sim_state()->gpus[module->context->gpu];
    int capability = (int)(gpu->cc_major * 10 + gpu->cc_minor);
    *function = (struct CUfunc_st){.magic = FUNCTION_MAGIC, .module = module, .name = copy, .next = module->functions,
                                   .cost = entry ? entry->cost : (struct kernel_cost){.ns = 10000},
                                   .declared = entry && entry->declared, .block = {1, 1, 1},
                                   /* The values of CUfunction_attribute 0 to 9. */
                                   .attributes = {1024, 0, 0, 0, 32, capability, capability, 0, 49152, -1}};
    module->functions = function;
    *out = function;
    return CUDA_SUCCESS;
}

static CUresult make_globals(CUmodule module)
{
    struct block block;
    for (const struct image_entry *entry = module->image.entries; entry; entry = entry->next) {
        if (!entry->bytes)
            continue;
        struct global *global = calloc(1, sizeof *global);
        REQUIRE(global, CUDA_ERROR_OUT_OF_MEMORY);
        if (!arena_alloc(device_of(module->context)->arena, entry->bytes, BLOCK_BACKING, module, &block)) {
            free(global);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        *global = (struct global){.name = entry->name, .pointer = block.base, .bytes = entry->bytes,
                                  .managed = entry->managed, .next = module->globals};
        module->globals = global;
        arena_touch(device_of(module->context)->arena, block.base);
        memset((void *)(uintptr_t)block.base, 0, entry->bytes);
    }
    return CUDA_SUCCESS;
}

static void module_free(CUmodule module)
{
    struct block block;
    while (module->functions) {
        CUfunction gone = module->functions;
        module->functions = gone->next;
        gone->magic = 0;
        free(gone->name);
        free(gone);
    }
    while (module->globals) {
        struct global *gone = module->globals;
        module->globals = gone->next;
        arena_free(device_of(module->context)->arena, gone->pointer, 1u << BLOCK_BACKING, &block);
        free(gone);
    }
    if (module->charged)
        sim_uncharge(module->context->gpu, SIM_MODULE, module->charged);
    image_free(&module->image);
    module->magic = 0;
    free(module);
}

static bool lazy(void)
{
    const char *mode = getenv("CUDA_MODULE_LOADING");
    return mode && strcmp(mode, "LAZY") == 0;
}

/* Loads code at its first use (lazy loading). With the hostile behaviour `context-lock` (hostile.h) the driver first
 * waits for the context's work, and all other calls on the context wait for the end of this load. */
static CUresult load_late(CUmodule module)
{
    CUcontext context = module->context;
    CUresult result = CUDA_SUCCESS;
    bool held = context_lock(context);
    if (held && module->due)
        result = context_drain(context);
    sim_sleep_until(sim_now() + module->due_ns);
    module->due_ns = 0;
    context_unlock(context, held);
    return result;
}

/* Loads the module's code. The caller must hold the lock of the module's context. */
static CUresult load_code(CUmodule module)
{
    if (!module->due)
        return CUDA_SUCCESS;
    CUresult result = status_to_result(sim_charge(module->context->gpu, SIM_MODULE, module->due));
    if (result == CUDA_SUCCESS) {
        module->charged += module->due;
        module->due = 0;
    }
    return result;
}

static CUresult load_into(CUcontext context, CUmodule *out, const void *data)
{
    CUmodule module = calloc(1, sizeof *module);
    REQUIRE(module, CUDA_ERROR_OUT_OF_MEMORY);
    module->magic = MODULE_MAGIC;
    module->context = context;
    CUresult result = image_parse(data, &module->image);
    uint64_t bytes = lazy() ? 0 : module->image.code_bytes;
    module->due_ns = lazy() ? module->image.load_ns : 0;
    module->due = module->image.code_bytes - bytes;
    for (const struct image_entry *entry = module->image.entries; entry; entry = entry->next)
        bytes += entry->bytes;
    if (result == CUDA_SUCCESS)
        result = context_heaps(context);
    if (result == CUDA_SUCCESS && bytes) {
        result = status_to_result(sim_charge(context->gpu, SIM_MODULE, bytes));
        module->charged = result == CUDA_SUCCESS ? bytes : 0;
    }
    if (result == CUDA_SUCCESS)
        result = make_globals(module);
    if (result == CUDA_SUCCESS)
        sim_sleep_until(sim_now() + module->image.load_ns - module->due_ns);
    for (const struct image_entry *e = module->image.entries; e && result == CUDA_SUCCESS; e = e->next) {
        CUfunction function;
        if (!e->bytes)
            result = function_new(module, e->name, e, &function);
    }
    if (result != CUDA_SUCCESS) {
        module_free(module);
        return result;
    }
    pthread_mutex_lock(&context->mutex);
    module->next = context->modules;
    context->modules = module;
    pthread_mutex_unlock(&context->mutex);
    *out = module;
    tool_call(GPUSIM_MODULE_LOADED, module);
    return CUDA_SUCCESS;
}

static CUresult load(CUmodule *out, const void *data)
{
    ENTER_CONTEXT(context);
    REQUIRE(out && data, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(capture_forbids_also() == CUDA_SUCCESS, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    bool held = context_lock(context);
    CUresult result = load_into(context, out, data);
    context_unlock(context, held);
    return result;
}

void modules_unload(CUcontext context)
{
    while (context->modules) {
        CUmodule gone = context->modules;
        context->modules = gone->next;
        module_free(gone);
    }
}

EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
    return load(module, image);
}

/* Ignores the JIT options, because no code is compiled. */
EXPORT CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, int *options, void **values)
{
    (void)options;
    (void)values;
    (void)count;
    return load(module, image);
}

EXPORT CUresult cuModuleLoadFatBinary(CUmodule *module, const void *image)
{
    return load(module, image);
}

EXPORT CUresult cuModuleLoad(CUmodule *module, const char *path)
{
    ENTER();
    char *data;
    CUresult result = image_read_file(path, &data);
    if (result != CUDA_SUCCESS)
        return result;
    result = load(module, data);
    free(data);
    return result;
}

static bool valid(CUmodule module)
{
    return module && module->magic == MODULE_MAGIC;
}

EXPORT CUresult cuModuleUnload(CUmodule module)
{
    ENTER();
    REQUIRE(valid(module), CUDA_ERROR_INVALID_HANDLE);
    CUcontext context = module->context;
    CUresult result = context_wait(context); /* Wait, because kernels of the module may still be queued. */
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&context->mutex);
    CUmodule *link = &context->modules;
    while (*link && *link != module)
        link = &(*link)->next;
    if (*link)
        *link = module->next;
    pthread_mutex_unlock(&context->mutex);
    module_free(module);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleGetFunction(CUfunction *out, CUmodule module, const char *name)
{
    ENTER();
    REQUIRE(out && name && *name, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(valid(module), CUDA_ERROR_INVALID_HANDLE);
    context_pass(module->context);
    CUresult result = module->due || module->due_ns ? load_late(module) : CUDA_SUCCESS;
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&module->context->mutex);
    CUfunction function = module->functions;
    while (function && strcmp(function->name, name) != 0)
        function = function->next;
    if (!function)
        result = module->image.any_name ? function_new(module, name, NULL, &function) : CUDA_ERROR_NOT_FOUND;
    if (result == CUDA_SUCCESS)
        result = load_code(module);
    pthread_mutex_unlock(&module->context->mutex);
    if (result == CUDA_SUCCESS)
        *out = function;
    return result;
}

CUresult module_global(CUdeviceptr *pointer, size_t *bytes, CUmodule module, const char *name, bool managed)
{
    ENTER();
    REQUIRE((pointer || bytes) && name, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(valid(module), CUDA_ERROR_INVALID_HANDLE);
    for (const struct global *global = module->globals; global; global = global->next)
        if (strcmp(global->name, name) == 0 && global->managed >= managed) {
            if (pointer)
                *pointer = global->pointer;
            if (bytes)
                *bytes = global->bytes;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuModuleGetGlobal_v2(CUdeviceptr *pointer, size_t *bytes, CUmodule module, const char *name)
{
    return module_global(pointer, bytes, module, name, false);
}

EXPORT CUresult cuModuleGetLoadingMode(int *mode)
{
    ENTER();
    REQUIRE(mode, CUDA_ERROR_INVALID_VALUE);
    *mode = lazy() ? 2 : 1;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncGetModule(CUmodule *module, CUfunction function)
{
    ENTER();
    REQUIRE(module, CUDA_ERROR_INVALID_VALUE);
    CUresult result = function_of(function, &function);
    if (result == CUDA_SUCCESS)
        *module = function->module;
    return result;
}
