/* SPDX-License-Identifier: Apache-2.0 */
/* Implements attributes and occupancy of functions, and the context-independent libraries and kernels of CUDA 12. */
#include "module.h"

#include "hostile.h"

#include <stdlib.h>
#include <string.h>

#define LIBRARY_MAGIC 0x4c494231u

struct CUkern_st {
    uint32_t magic;
    CUlibrary library;
    char *name;
    CUkernel next;
};

struct loaded { /* The module of a library in one context. */
    uint64_t context_id;
    CUmodule module;
    struct loaded *next;
};

struct CUlib_st {
    uint32_t magic;
    char *file_data; /* Content of the file if the library was loaded from a file. It is freed with the library. */
    const void *data;
    pthread_mutex_t mutex;
    struct loaded *loaded;
    CUkernel kernels;
};

CUresult cuModuleLoadData(CUmodule *module, const void *image);
CUresult cuModuleGetFunction(CUfunction *out, CUmodule module, const char *name);
CUresult cuModuleGetGlobal_v2(CUdeviceptr *pointer, size_t *bytes, CUmodule module, const char *name);
CUresult cuModuleUnload(CUmodule module);

/* ---- libraries ------------------------------------------------------------------------------------------------------- */

static CUresult library_new(CUlibrary *out, const void *data, char *owned)
{
    struct image image;
    CUresult result = image_parse(data, &image);
    if (result != CUDA_SUCCESS) {
        free(owned);
        return result;
    }
    image_free(&image);
    CUlibrary library = calloc(1, sizeof *library);
    if (!library) {
        free(owned);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    library->magic = LIBRARY_MAGIC;
    library->data = data;
    library->file_data = owned;
    pthread_mutex_init(&library->mutex, NULL);
    *out = library;
    tool_call(GPUSIM_LIBRARY_LOADED, library);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLibraryLoadData(CUlibrary *library, const void *code, int *jit, void **jit_values, unsigned jit_count,
                                  int *options, void **values, unsigned count)
{
    ENTER();
    (void)jit, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count;
    REQUIRE(library && code, CUDA_ERROR_INVALID_VALUE);
    return library_new(library, code, NULL);
}

EXPORT CUresult cuLibraryLoadFromFile(CUlibrary *library, const char *path, int *jit, void **jit_values,
                                      unsigned jit_count, int *options, void **values, unsigned count)
{
    ENTER();
    (void)jit, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count;
    char *data;
    REQUIRE(library, CUDA_ERROR_INVALID_VALUE);
    CUresult result = image_read_file(path, &data);
    return result == CUDA_SUCCESS ? library_new(library, data, data) : result;
}

static bool library_valid(CUlibrary library)
{
    return library && library->magic == LIBRARY_MAGIC;
}

EXPORT CUresult cuLibraryUnload(CUlibrary library)
{
    ENTER();
    REQUIRE(library_valid(library), CUDA_ERROR_INVALID_HANDLE);
    library->magic = 0;
    for (struct loaded *at = library->loaded, *next; at; at = next) {
        next = at->next;
        for (CUcontext context = driver.contexts; context; context = context->next)
            if (context->id == at->context_id && atomic_load(&context->alive))
                cuModuleUnload(at->module);
        free(at);
    }
    for (CUkernel kernel = library->kernels, next; kernel; kernel = next) {
        next = kernel->next;
        free(kernel->name);
        free(kernel);
    }
    free(library->file_data);
    free(library);
    return CUDA_SUCCESS;
}

static struct loaded *loaded_in(CUlibrary library, CUcontext context)
{
    pthread_mutex_lock(&library->mutex);
    struct loaded *at = library->loaded;
    while (at && at->context_id != context->id)
        at = at->next;
    pthread_mutex_unlock(&library->mutex);
    return at;
}

static CUresult module_here(CUlibrary library, CUmodule *out)
{
    ENTER_CONTEXT(context);
    CUresult result = CUDA_SUCCESS;
    bool held = context_lock(context);
    /* Each context has its own lock for loading, so that no other context waits for this load. */
    pthread_mutex_lock(&context->loading);
    struct loaded *at = loaded_in(library, context);
    if (!at) {
        at = calloc(1, sizeof *at);
        result = at ? cuModuleLoadData(&at->module, library->data) : CUDA_ERROR_OUT_OF_MEMORY;
        if (result == CUDA_SUCCESS) {
            at->context_id = context->id;
            pthread_mutex_lock(&library->mutex);
            at->next = library->loaded;
            library->loaded = at;
            pthread_mutex_unlock(&library->mutex);
        } else {
            free(at);
        }
    }
    if (result == CUDA_SUCCESS)
        *out = at->module;
    pthread_mutex_unlock(&context->loading);
    context_unlock(context, held);
    return result;
}

EXPORT CUresult cuLibraryGetModule(CUmodule *module, CUlibrary library)
{
    REQUIRE(module, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(library_valid(library), CUDA_ERROR_INVALID_HANDLE);
    return module_here(library, module);
}

EXPORT CUresult cuLibraryGetKernel(CUkernel *out, CUlibrary library, const char *name)
{
    ENTER();
    REQUIRE(out && name, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(library_valid(library), CUDA_ERROR_INVALID_HANDLE);
    struct image image;
    CUresult result = image_parse(library->data, &image);
    if (result != CUDA_SUCCESS)
        return result;
    bool known = image.any_name;
    for (const struct image_entry *entry = image.entries; entry; entry = entry->next)
        known = known || (!entry->bytes && strcmp(entry->name, name) == 0);
    image_free(&image);
    REQUIRE(known, CUDA_ERROR_NOT_FOUND);
    CUkernel kernel = calloc(1, sizeof *kernel);
    REQUIRE(kernel, CUDA_ERROR_OUT_OF_MEMORY);
    *kernel = (struct CUkern_st){.magic = KERNEL_MAGIC, .library = library, .name = strdup(name)};
    pthread_mutex_lock(&library->mutex);
    kernel->next = library->kernels;
    library->kernels = kernel;
    pthread_mutex_unlock(&library->mutex);
    *out = kernel;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLibraryGetGlobal(CUdeviceptr *pointer, size_t *bytes, CUlibrary library, const char *name)
{
    CUmodule module;
    REQUIRE(library_valid(library), CUDA_ERROR_INVALID_HANDLE);
    CUresult result = module_here(library, &module);
    return result == CUDA_SUCCESS ? cuModuleGetGlobal_v2(pointer, bytes, module, name) : result;
}

EXPORT CUresult cuLibraryGetManaged(CUdeviceptr *pointer, size_t *bytes, CUlibrary library, const char *name)
{
    CUmodule module;
    REQUIRE(library_valid(library), CUDA_ERROR_INVALID_HANDLE);
    CUresult result = module_here(library, &module);
    return result == CUDA_SUCCESS ? module_global(pointer, bytes, module, name, true) : result;
}

/* A launch takes a CUfunction, or a CUkernel that is cast to CUfunction. */
CUresult function_of(const void *handle, CUfunction *out)
{
    uint32_t magic;
    REQUIRE(handle, CUDA_ERROR_INVALID_HANDLE);
    memcpy(&magic, handle, sizeof magic);
    if (magic == FUNCTION_MAGIC) {
        *out = (CUfunction)(uintptr_t)handle;
        return CUDA_SUCCESS;
    }
    REQUIRE(magic == KERNEL_MAGIC, CUDA_ERROR_INVALID_HANDLE);
    const struct CUkern_st *kernel = handle;
    CUmodule module;
    CUresult result = module_here(kernel->library, &module);
    return result == CUDA_SUCCESS ? cuModuleGetFunction(out, module, kernel->name) : result;
}

EXPORT CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel)
{
    ENTER();
    REQUIRE(function, CUDA_ERROR_INVALID_VALUE);
    return function_of(kernel, function);
}

/* ---- attributes ---------------------------------------------------------------------------------------------------------- */

static CUresult get_attribute(int *value, int attribute, const void *handle)
{
    ENTER();
    CUfunction function;
    REQUIRE(value && attribute >= 0 && attribute < FUNCTION_ATTRIBUTES, CUDA_ERROR_INVALID_VALUE);
    CUresult result = function_of(handle, &function);
    if (result == CUDA_SUCCESS)
        *value = function->attributes[attribute];
    return result;
}

/* Sets an attribute; needs a current context. */
static CUresult set_attribute(const void *handle, int attribute, int value)
{
    ENTER();
    CUfunction function;
    CUresult result = function_of(handle, &function);
    if (result != CUDA_SUCCESS)
        return result;
    /* All other attributes are read-only. */
    REQUIRE(attribute >= 8 && attribute < FUNCTION_ATTRIBUTES, CUDA_ERROR_INVALID_VALUE);
    const struct sim_model *model = sim_model_find(sim_state()->gpus[context_current()->gpu].model);
    REQUIRE(attribute != 8 || (value >= 0 && (unsigned)value <= model->shared_per_block_optin), CUDA_ERROR_INVALID_VALUE);
    function->attributes[attribute] = value;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncGetAttribute(int *value, int attribute, CUfunction function)
{
    return get_attribute(value, attribute, function);
}

EXPORT CUresult cuFuncSetAttribute(CUfunction function, int attribute, int value)
{
    ENTER_CONTEXT(context);
    (void)context;
    return set_attribute(function, attribute, value);
}

EXPORT CUresult cuKernelGetAttribute(int *value, int attribute, CUkernel kernel, CUdevice device)
{
    (void)device;
    return get_attribute(value, attribute, kernel);
}

EXPORT CUresult cuKernelSetAttribute(int attribute, int value, CUkernel kernel, CUdevice device)
{
    ENTER_CONTEXT(context);
    (void)context, (void)device;
    return set_attribute(kernel, attribute, value);
}

static CUresult check_function(const void *handle)
{
    ENTER();
    CUfunction function;
    return function_of(handle, &function);
}

EXPORT CUresult cuFuncSetCacheConfig(CUfunction function, int config)
{
    return config >= 0 && config <= 3 ? check_function(function) : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuKernelSetCacheConfig(CUkernel kernel, int config, CUdevice device)
{
    (void)device;
    return config >= 0 && config <= 3 ? check_function(kernel) : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuFuncSetSharedMemConfig(CUfunction function, int config)
{
    return config >= 0 && config <= 2 ? check_function(function) : CUDA_ERROR_INVALID_VALUE;
}

/* ---- occupancy: only the number of threads limits it, because registers and shared memory of a function are unknown
 * ---- */

static CUresult occupancy(int *blocks, const void *handle, int block_size, size_t shared)
{
    ENTER_CONTEXT(context);
    CUfunction function;
    REQUIRE(blocks && block_size > 0, CUDA_ERROR_INVALID_VALUE);
    CUresult result = function_of(handle, &function);
    if (result != CUDA_SUCCESS)
        return result;
    const struct sim_model *model = sim_model_find(sim_state()->gpus[context->gpu].model);
    int by_threads = block_size > 1024 ? 0 : (int)model->threads_per_sm / ((block_size + 31) / 32 * 32);
    int by_shared = shared ? (int)(model->shared_per_sm / shared) : 32;
    *blocks = by_threads < by_shared ? by_threads : by_shared;
    if (*blocks > 32)
        *blocks = 32;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int size, size_t shared)
{
    return occupancy(blocks, function, size, shared);
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction function, int size,
                                                                     size_t shared, unsigned flags)
{
    return flags <= 1 ? occupancy(blocks, function, size, shared) : CUDA_ERROR_INVALID_VALUE;
}

static CUresult best_block(int *grid, int *block, const void *function, size_t (*shared_of)(int), size_t shared, int limit)
{
    ENTER_CONTEXT(context);
    REQUIRE(grid && block, CUDA_ERROR_INVALID_VALUE);
    int size = limit > 0 && limit < 1024 ? limit : 1024, blocks = 0;
    CUresult result = occupancy(&blocks, function, size, shared_of ? shared_of(size) : shared);
    *block = size;
    *grid = blocks * (int)sim_state()->gpus[context->gpu].sm_count;
    return result;
}

EXPORT CUresult cuOccupancyMaxPotentialBlockSize(int *grid, int *block, CUfunction function, size_t (*shared_of)(int),
                                                 size_t shared, int limit)
{
    return best_block(grid, block, function, shared_of, shared, limit);
}

EXPORT CUresult cuOccupancyMaxPotentialBlockSizeWithFlags(int *grid, int *block, CUfunction function,
                                                          size_t (*shared_of)(int), size_t shared, int limit,
                                                          unsigned flags)
{
    return flags <= 1 ? best_block(grid, block, function, shared_of, shared, limit) : CUDA_ERROR_INVALID_VALUE;
}
