/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Implements memory pools and stream-ordered allocation. A pool reserves physical memory in units of 2 MiB and
 * allocates from it. Freed memory stays reserved until a synchronization finds more of it than the release threshold.
 *
 * A block freed in a stream can be allocated again at once: simulated kernels do not access memory, so no kernel can
 * still use it.
 */
#include "graph.h"

#include <stdlib.h>
#include <unistd.h>

#define POOL_MAGIC 0x504f4c31u
#define UNIT ((uint64_t)2 << 20)

struct CUmemPool_st {
    uint32_t magic;
    int device;
    pthread_mutex_t mutex;
    uint64_t threshold, reserved, used, reserved_high, used_high;
    /* Maximum reserved bytes; 0 means the device's total memory. */
    uint64_t most;
    /* The three reuse policies, stored without effect. */
    int reuse[3];
    /* Bitmap of devices that may access the pool. */
    uint64_t access;
    int handle_types;
    /* Index + 1 of the pool's shareable handle, or 0. */
    int shared;
    /* For an imported pool: the reference that keeps the imported memory alive. The exporting process is charged for
     * such a pool. */
    void *hold;
    CUmemoryPool next;
};

static CUmemoryPool pool_new(int device)
{
    CUmemoryPool pool = calloc(1, sizeof *pool);
    if (!pool)
        return NULL;
    *pool = (struct CUmemPool_st){.magic = POOL_MAGIC, .device = device, .reuse = {1, 1, 1},
                                  .access = (uint64_t)1 << device};
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_mutex_lock(&driver.mutex);
    pool->next = driver.devices[device].pools;
    driver.devices[device].pools = pool;
    pthread_mutex_unlock(&driver.mutex);
    return pool;
}

static CUmemoryPool default_pool(int device)
{
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    struct device *d = &driver.devices[device];
    pthread_mutex_lock(&mutex);
    if (!d->default_pool)
        d->default_pool = d->current_pool = pool_new(device);
    pthread_mutex_unlock(&mutex);
    return d->default_pool;
}

CUmemoryPool pool_current(int device)
{
    default_pool(device);
    return driver.devices[device].current_pool;
}

static bool valid(CUmemoryPool pool)
{
    return pool && pool->magic == POOL_MAGIC;
}

/* Accounts a change of reserved bytes. The caller must hold the pool's mutex. */
static void reserved(CUmemoryPool pool, uint64_t bytes)
{
    pool->reserved = bytes;
    if (pool->shared)
        sim_shared_resize(pool->shared - 1, bytes);
}

/* Frees unused reserved memory above `keep`. The caller must hold the pool's mutex. */
static bool trim(CUmemoryPool pool, uint64_t keep)
{
    uint64_t needed = (pool->used + UNIT - 1) / UNIT * UNIT, target = keep > needed ? keep : needed;
    if (pool->reserved <= target)
        return false;
    sim_uncharge(driver.devices[pool->device].gpu, SIM_MEMORY, pool->reserved - target);
    reserved(pool, target);
    return true;
}

bool pools_trim(int device, bool all)
{
    bool freed = false;
    atomic_store(&driver.devices[device].pools_due, false);
    for (CUmemoryPool pool = driver.devices[device].pools; pool; pool = pool->next) {
        pthread_mutex_lock(&pool->mutex);
        freed = trim(pool, all ? 0 : pool->threshold) || freed;
        pthread_mutex_unlock(&pool->mutex);
    }
    return freed;
}

void pools_trim_if_due(int device)
{
    if (atomic_load_explicit(&driver.devices[device].pools_due, memory_order_relaxed))
        pools_trim(device, false);
}

static CUresult reserve(CUmemoryPool pool, uint64_t bytes)
{
    uint64_t needed = pool->used + bytes;
    REQUIRE(needed >= bytes && needed < UINT64_MAX - UNIT, CUDA_ERROR_OUT_OF_MEMORY);
    if (needed <= pool->reserved)
        return CUDA_SUCCESS;
    uint64_t target = (needed + UNIT - 1) / UNIT * UNIT;
    REQUIRE(!pool->most || target <= pool->most, CUDA_ERROR_OUT_OF_MEMORY);
    enum sim_status status = sim_charge(driver.devices[pool->device].gpu, SIM_MEMORY, target - pool->reserved);
    if (status != SIM_OK)
        return status_to_result(status);
    reserved(pool, target);
    if (target > pool->reserved_high)
        pool->reserved_high = target;
    return CUDA_SUCCESS;
}

CUresult pool_alloc(CUmemoryPool pool, uint64_t bytes, CUdeviceptr *out)
{
    struct block block;
    pthread_mutex_lock(&pool->mutex);
    CUresult result = reserve(pool, bytes);
    if (result == CUDA_ERROR_OUT_OF_MEMORY) {
        pthread_mutex_unlock(&pool->mutex);
        bool freed = pools_trim(pool->device, true);
        pthread_mutex_lock(&pool->mutex);
        if (freed)
            result = reserve(pool, bytes);
    }
    if (result == CUDA_SUCCESS &&
        !arena_alloc(driver.devices[pool->device].arena, bytes, BLOCK_POOL, pool, &block)) {
        trim(pool, pool->threshold);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (result == CUDA_SUCCESS) {
        pool->used += bytes;
        if (pool->used > pool->used_high)
            pool->used_high = pool->used;
        *out = block.base;
    }
    pthread_mutex_unlock(&pool->mutex);
    return result;
}

CUresult pool_free(CUdeviceptr pointer, const struct block *block)
{
    CUmemoryPool pool = block->owner;
    struct block freed;
    REQUIRE(arena_free(driver.devices[pool->device].arena, pointer, 1u << BLOCK_POOL, &freed),
            CUDA_ERROR_INVALID_VALUE);
    pthread_mutex_lock(&pool->mutex);
    pool->used -= freed.bytes;
    pthread_mutex_unlock(&pool->mutex);
    atomic_store(&driver.devices[pool->device].pools_due, true);
    return CUDA_SUCCESS;
}

static void end_block(const struct block *block)
{
    pool_free(block->base, block);
}

void pools_end(int device)
{
    for (CUmemoryPool pool = driver.devices[device].pools; pool; pool = pool->next)
        arena_each(driver.devices[device].arena, pool, end_block);
    pools_trim(device, true);
}

/* ---- allocation in a stream ------------------------------------------------------------------------------------------ */

static CUresult alloc_async(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream handle)
{
    ENTER_CONTEXT(context);
    CUstream stream;
    REQUIRE(out && bytes, CUDA_ERROR_INVALID_VALUE);
    CUresult result = stream_resolve(context, handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (!pool)
        pool = pool_current(stream->context->device);
    REQUIRE(valid(pool) && !pool->hold, CUDA_ERROR_INVALID_VALUE);
    if (!stream->capture)
        return pool_alloc(pool, bytes, out);
    struct op op = {.kind = OP_ALLOC, .as.memory = {.bytes = bytes}};
    result = graph_memory_new(pool->device, bytes, &op.as.memory.pointer);
    if (result == CUDA_SUCCESS)
        result = capture_op(stream, &op);
    if (result == CUDA_SUCCESS)
        *out = op.as.memory.pointer;
    return result;
}

static CUresult free_async(CUdeviceptr pointer, CUstream handle)
{
    ENTER_CONTEXT(context);
    CUstream stream;
    CUresult result = stream_resolve(context, handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (stream->capture) {
        struct op op = {.kind = OP_FREE, .as.memory = {.pointer = pointer}};
        return capture_op(stream, &op);
    }
    return memory_free(pointer); /* This call may also free memory of cuMemAlloc. */
}

EXPORT CUresult cuMemAllocAsync(CUdeviceptr *out, size_t bytes, CUstream stream)
{
    return alloc_async(out, bytes, NULL, LEGACY_STREAM(stream));
}

EXPORT CUresult cuMemAllocAsync_ptsz(CUdeviceptr *out, size_t bytes, CUstream stream)
{
    return alloc_async(out, bytes, NULL, PER_THREAD_STREAM(stream));
}

EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    return valid(pool) ? alloc_async(out, bytes, pool, LEGACY_STREAM(stream)) : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    return valid(pool) ? alloc_async(out, bytes, pool, PER_THREAD_STREAM(stream)) : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream)
{
    return free_async(pointer, LEGACY_STREAM(stream));
}

EXPORT CUresult cuMemFreeAsync_ptsz(CUdeviceptr pointer, CUstream stream)
{
    return free_async(pointer, PER_THREAD_STREAM(stream));
}

/* ---- pools --------------------------------------------------------------------------------------------------------- */

EXPORT CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device)
{
    ENTER();
    REQUIRE(pool, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_valid(device), CUDA_ERROR_INVALID_DEVICE);
    *pool = default_pool(device);
    return *pool ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice device)
{
    ENTER();
    REQUIRE(pool, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_valid(device), CUDA_ERROR_INVALID_DEVICE);
    *pool = pool_current(device);
    return *pool ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool)
{
    ENTER();
    REQUIRE(device_valid(device), CUDA_ERROR_INVALID_DEVICE);
    REQUIRE(valid(pool) && pool->device == device, CUDA_ERROR_INVALID_VALUE);
    default_pool(device);
    driver.devices[device].current_pool = pool;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *props)
{
    ENTER();
    REQUIRE(pool && props && props->alloc_type == 1 && props->location.type == 1, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_valid(props->location.id), CUDA_ERROR_INVALID_DEVICE);
    REQUIRE(props->max_size < UINT64_MAX - UNIT, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_arena(props->location.id), CUDA_ERROR_OUT_OF_MEMORY);
    *pool = pool_new(props->location.id);
    if (*pool) {
        (*pool)->handle_types = props->handle_types;
        (*pool)->most = (props->max_size + UNIT - 1) / UNIT * UNIT;
    }
    return *pool ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* The pool's memory outlives this process while any process has the handle or an import of it. */
EXPORT CUresult cuMemPoolExportToShareableHandle(void *handle, CUmemoryPool pool, int type, unsigned long long flags)
{
    ENTER();
    REQUIRE(handle && flags == 0 && valid(pool), CUDA_ERROR_INVALID_VALUE);
    REQUIRE(type == 1 && pool->handle_types & 1 && !pool->hold, CUDA_ERROR_NOT_SUPPORTED);
    pthread_mutex_lock(&pool->mutex);
    if (!pool->shared)
        pool->shared = 1 + sim_shared_new(&(struct sim_shared){
                               .gpu = driver.devices[pool->device].gpu, .bytes = pool->reserved, .pid = getpid(), .fd = -1});
    int fd = pool->shared ? sim_shared_handle(pool->shared - 1) : -1;
    pthread_mutex_unlock(&pool->mutex);
    REQUIRE(fd >= 0, CUDA_ERROR_OPERATING_SYSTEM);
    *(int *)handle = fd;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolImportFromShareableHandle(CUmemoryPool *out, void *handle, int type, unsigned long long flags)
{
    ENTER();
    struct sim_shared shared;
    REQUIRE(out && flags == 0, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(type == 1, CUDA_ERROR_NOT_SUPPORTED);
    int index = sim_shared_find((int)(intptr_t)handle, &shared), device = 0;
    REQUIRE(index >= 0 && shared.fd < 0, CUDA_ERROR_INVALID_VALUE);
    while (device < driver.count && driver.devices[device].gpu != shared.gpu)
        device++;
    REQUIRE(device < driver.count, CUDA_ERROR_INVALID_DEVICE);
    void *hold = sim_shared_import(index);
    CUmemoryPool pool = hold ? pool_new(device) : NULL;
    if (hold && !pool)
        sim_shared_drop(hold);
    REQUIRE(pool, CUDA_ERROR_OUT_OF_MEMORY);
    pool->hold = hold;
    *out = pool;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
    ENTER();
    REQUIRE(valid(pool) && pool != driver.devices[pool->device].default_pool, CUDA_ERROR_INVALID_VALUE);
    struct device *d = &driver.devices[pool->device];
    if (d->current_pool == pool)
        d->current_pool = d->default_pool;
    /* Blocks of a destroyed pool stay valid, so the pool's record stays too. Their memory is released when the program
     * frees them. */
    pthread_mutex_lock(&pool->mutex);
    pool->magic = 0;
    pool->threshold = 0;
    trim(pool, 0);
    if (pool->shared && !pool->reserved) {
        sim_shared_release(pool->shared - 1);
        pool->shared = 0;
    }
    if (pool->hold)
        sim_shared_drop(pool->hold);
    pool->hold = NULL;
    pthread_mutex_unlock(&pool->mutex);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep)
{
    ENTER();
    REQUIRE(valid(pool), CUDA_ERROR_INVALID_VALUE);
    pthread_mutex_lock(&pool->mutex);
    trim(pool, keep);
    pthread_mutex_unlock(&pool->mutex);
    return CUDA_SUCCESS;
}

/* CUmemPool_attribute: 1-3 reuse policies (int), 4 release threshold, 5-6 reserved now and highest, 7-8 used. */
EXPORT CUresult cuMemPoolGetAttribute(CUmemoryPool pool, int attribute, void *value)
{
    ENTER();
    REQUIRE(valid(pool) && value && attribute >= 1 && attribute <= 8, CUDA_ERROR_INVALID_VALUE);
    pthread_mutex_lock(&pool->mutex);
    const uint64_t wide[] = {pool->threshold, pool->reserved, pool->reserved_high, pool->used, pool->used_high};
    if (attribute <= 3)
        *(int *)value = pool->reuse[attribute - 1];
    else
        *(uint64_t *)value = wide[attribute - 4];
    pthread_mutex_unlock(&pool->mutex);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolSetAttribute(CUmemoryPool pool, int attribute, void *value)
{
    ENTER();
    REQUIRE(valid(pool) && value && attribute >= 1 && attribute <= 8, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(attribute != 5 && attribute != 7, CUDA_ERROR_INVALID_VALUE);
    /* The highest values can only be reset to 0. */
    REQUIRE(attribute < 5 || *(uint64_t *)value == 0, CUDA_ERROR_INVALID_VALUE);
    pthread_mutex_lock(&pool->mutex);
    if (attribute <= 3)
        pool->reuse[attribute - 1] = *(int *)value;
    else if (attribute == 4)
        pool->threshold = *(uint64_t *)value;
    else if (attribute == 6)
        pool->reserved_high = pool->reserved;
    else
        pool->used_high = pool->used;
    pthread_mutex_unlock(&pool->mutex);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *access, size_t count)
{
    ENTER();
    REQUIRE(valid(pool) && access, CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; i < count; i++) {
        int id = access[i].location.id;
        REQUIRE(access[i].location.type == 1 && device_valid(id), CUDA_ERROR_INVALID_DEVICE);
        REQUIRE(id != pool->device || access[i].flags == 3, CUDA_ERROR_INVALID_DEVICE);
        if (access[i].flags == 3)
            pool->access |= (uint64_t)1 << id;
        else
            pool->access &= ~((uint64_t)1 << id);
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolGetAccess(int *flags, CUmemoryPool pool, CUmemLocation *location)
{
    ENTER();
    REQUIRE(flags && valid(pool) && location && location->type == 1, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_valid(location->id), CUDA_ERROR_INVALID_DEVICE);
    *flags = pool->access & (uint64_t)1 << location->id ? 3 : 0;
    return CUDA_SUCCESS;
}
