/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Charges the pools of stream-ordered memory (cuMemAllocAsync). A process is charged the card memory that a pool has,
 * and not the memory that the program has requested from it. The reason is that a freed block stays in the pool until
 * its stream was synchronised, or longer. The driver reports the pool's size as reserved memory. The size is read
 * around every allocation and after every call that lets a pool shrink.
 */
#include "pool.h"

#include "context/context.h"
#include "events.h"
#include "process.h"

#include <stdlib.h>

/* List of the records of all pools. A record is added at the head and never removed, because threads read the list
 * without a lock. The record of a pool whose memory is gone serves the next new pool. */
static struct pool *_Atomic pools;
static struct lock pools_lock;
_Atomic uint32_t vgpu_pools_dirty;

static uint64_t key_of(const struct pool *pool)
{
    return atomic_load_explicit(&pool->key, memory_order_acquire);
}

struct pool *pool_known(uint64_t key)
{
    struct pool *pool = key ? atomic_load_explicit(&pools, memory_order_acquire) : NULL;
    while (pool && key_of(pool) != key)
        pool = pool->next;
    return pool;
}

/* Returns a record that belongs to no pool, with its lock. Needs the lock of the list. NULL: no host memory. */
static struct pool *unused_record(void)
{
    struct pool *pool = atomic_load_explicit(&pools, memory_order_relaxed);
    for (; pool; pool = pool->next) {
        if (key_of(pool) || !lock_try(&pool->lock))
            continue;
        if (!pool->outstanding && !pool->charged)
            return pool;
        lock_drop(&pool->lock);
    }
    if ((pool = calloc(1, sizeof *pool))) {
        lock_take(&pool->lock);
        pool->next = atomic_load_explicit(&pools, memory_order_relaxed);
        atomic_store_explicit(&pools, pool, memory_order_release);
    }
    return pool;
}

struct pool *pool_add(uint64_t key, const struct device *device, bool fresh)
{
    lock_take(&pools_lock);
    struct pool *pool = pool_known(key);
    if (pool && fresh) {
        /* The driver has destroyed the former pool of this handle, but the thread that called cuMemPoolDestroy has not
         * recorded that yet. */
        atomic_store_explicit(&pool->key, 0, memory_order_relaxed);
        pool = NULL;
    }
    if (!pool && (pool = unused_record())) {
        pool->device = device;
        pool->shared = 0;
        pool->exported = false;
        atomic_store_explicit(&pool->key, key, memory_order_release);
        lock_drop(&pool->lock);
    }
    lock_drop(&pools_lock);
    return pool;
}

uint64_t pool_attribute(const struct pool *pool, int which, uint64_t otherwise)
{
    cuuint64_t value;
    if (!REAL_HAS(cuMemPoolGetAttribute) ||
        REAL(cuMemPoolGetAttribute)((CUmemoryPool)(uintptr_t)key_of(pool), which, &value) != CUDA_SUCCESS)
        return otherwise;
    return value;
}

void pool_hold(struct pool *pool, uint64_t bytes)
{
    bool more = bytes > pool->charged;
    if (pool->exported && bytes != pool->charged)
        ledger_export(pool->device->ledger, more ? bytes - pool->charged : pool->charged - bytes, more);
    pool->charged = bytes;
}

void pool_settle_down(struct pool *pool)
{
    if (!key_of(pool) || !pool->device)
        return;
    uint64_t reserved = pool_attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, pool->outstanding);
    if (reserved < pool->charged) {
        ledger_uncharge(pool->device->ledger, ACCOUNT_USED, pool->charged - reserved);
        pool_hold(pool, reserved);
    }
}

/* Returns true if the pool was destroyed, all its blocks are freed, and its memory is still charged. Needs the pool's
 * lock. */
static bool ends(const struct pool *pool)
{
    return !key_of(pool) && !pool->outstanding && pool->charged;
}

/* Returns true if the next synchronisation may make the pool smaller. The caller has the pool's lock and has called
 * pool_settle_down. */
static bool may_shrink(const struct pool *pool)
{
    if (!key_of(pool))
        return ends(pool);
    if (!pool->device || pool->charged < POOL_UNIT + pool->outstanding)
        return false;
    return pool_attribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, 0) < pool->charged;
}

void pools_settle(bool trim)
{
    atomic_store_explicit(&vgpu_pools_dirty, 0, memory_order_relaxed);
    for (struct pool *pool = atomic_load_explicit(&pools, memory_order_acquire); pool; pool = pool->next) {
        /* The thread that has the lock corrects the pool's charge. Do not wait for the lock, because the holder may be
         * this thread. */
        if (!lock_try(&pool->lock))
            continue;
        if (trim && key_of(pool) && pool->device && REAL_HAS(cuMemPoolTrimTo))
            REAL(cuMemPoolTrimTo)((CUmemoryPool)(uintptr_t)key_of(pool), 0);
        pool_settle_down(pool);
        if (may_shrink(pool))
            atomic_store_explicit(&vgpu_pools_dirty, 1, memory_order_relaxed);
        lock_drop(&pool->lock);
    }
}

void pool_freed(uint64_t key, uint64_t bytes)
{
    struct pool *pool = (struct pool *)(uintptr_t)key;
    lock_take(&pool->lock);
    pool->outstanding -= bytes < pool->outstanding ? bytes : pool->outstanding;
    pool_settle_down(pool);
    atomic_store_explicit(&vgpu_pools_dirty, 1, memory_order_relaxed);
    lock_drop(&pool->lock);
}

/*
 * Uncharges the destroyed pools of which all blocks are freed. The driver does not report the size of such a pool. It
 * releases the memory when the streams have reached the frees. The program may have waited for another stream, and then
 * the driver still has the memory, so NVML's figure is compared at once.
 */
static void end_destroyed(void)
{
    bool ended = false;
    for (struct pool *pool = atomic_load_explicit(&pools, memory_order_acquire); pool; pool = pool->next) {
        if (key_of(pool) || !lock_try(&pool->lock))
            continue;
        if (ends(pool)) {
            ledger_uncharge(pool->device->ledger, ACCOUNT_USED, pool->charged);
            pool_hold(pool, 0);
            unaccounted_due(pool->device->ledger);
            ended = true;
        }
        lock_drop(&pool->lock);
    }
    for (int device = 0; ended && device < VGPU_MAX_DEVICES; device++)
        if (atomic_load_explicit(&vgpu_counters[device].due, memory_order_relaxed))
            flight_moved(device);
}

/* --- creation of pools, and calls that let them shrink ------------------------------------------------------ */

/*
 * Finds the device on which a pool allocates; sets *device to NULL for host memory. Managed memory without a device may
 * migrate to any card, so it is refused.
 */
static CUresult place_of(const CUmemLocation *location, int type, const struct device **device)
{
    CUresult status;
    *device = device_at(location, &status);
    if (!*device && status == CUDA_SUCCESS && type == CU_MEM_ALLOCATION_TYPE_MANAGED)
        status = memory_refuse("a pool of managed memory without a device");
    return status;
}

EXPORT CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *properties)
{
    ENTER(cuMemPoolCreate, (pool, properties));
    const struct device *device = NULL;
    CUresult status = CUDA_SUCCESS;
    if (control == CONTROL_BROKEN)
        return memory_broken();
    if (properties)
        status = place_of(&properties->location, properties->allocType, &device);
    if (status != CUDA_SUCCESS)
        return status;
    status = REAL(cuMemPoolCreate)(pool, properties);
    if (status == CUDA_SUCCESS && !pool_add((uintptr_t)*pool, device, true)) {
        REAL(cuMemPoolDestroy)(*pool);
        status = CUDA_ERROR_OUT_OF_MEMORY;
    }
    return status;
}

/* Defines the hook of a function that returns a pool of the driver, found by location and type of memory (CUDA 13). */
#define FIND(symbol) \
    EXPORT CUresult symbol(CUmemoryPool *pool, CUmemLocation *location, int type) \
    { \
        ENTER(symbol, (pool, location, type)); \
        const struct device *device; \
        CUresult status = REAL(symbol)(pool, location, type); \
        if (status != CUDA_SUCCESS || control == CONTROL_BROKEN) \
            return status; \
        status = place_of(location, type, &device); \
        if (status == CUDA_SUCCESS && !pool_known((uintptr_t)*pool) && !pool_add((uintptr_t)*pool, device, false)) \
            status = CUDA_ERROR_OUT_OF_MEMORY; \
        return status; \
    }

FIND(cuMemGetMemPool)
FIND(cuMemGetDefaultMemPool)

EXPORT CUresult cuMemPoolExportToShareableHandle(void *shareable, CUmemoryPool handle, int type, unsigned long long flags)
{
    ENTER(cuMemPoolExportToShareableHandle, (shareable, handle, type, flags));
    (void)control;
    struct pool *pool = pool_known((uintptr_t)handle);
    if (!pool || !pool->device)
        return REAL(cuMemPoolExportToShareableHandle)(shareable, handle, type, flags);
    lock_take(&pool->lock);
    bool first = !pool->exported;
    if (first)
        ledger_export(pool->device->ledger, pool->charged, true);
    pool->exported = true;
    CUresult status = REAL(cuMemPoolExportToShareableHandle)(shareable, handle, type, flags);
    if (status == CUDA_SUCCESS && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
        shareable_mark(*(const int *)shareable, &pool->shared);
    } else if (status == CUDA_SUCCESS) {
        shareable_unmarked();
    } else if (first) {
        ledger_export(pool->device->ledger, pool->charged, false);
        pool->exported = false;
    }
    lock_drop(&pool->lock);
    return status;
}

/*
 * Imports the pool of another process. Only the process that created the pool allocates from it, and that process is
 * charged. The memory stays charged while any process has a lock that shows an import. Pointers may outlive the
 * imported pool, so the importing process keeps this lock until it ends.
 */
EXPORT CUresult cuMemPoolImportFromShareableHandle(CUmemoryPool *pool, void *shareable, int type, unsigned long long flags)
{
    ENTER(cuMemPoolImportFromShareableHandle, (pool, shareable, type, flags));
    uint64_t object;
    if (control == CONTROL_BROKEN)
        return memory_broken();
    if (!ledger_join())
        return CUDA_ERROR_NOT_PERMITTED;
    bool descriptor = type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    bool foreign = shareable_origin(descriptor ? (int)(intptr_t)shareable : -1, &object) == SHAREABLE_FOREIGN;
    void *import = foreign ? NULL : ledger_import(shareable_import_byte(object));
    if (!foreign && !import)
        return CUDA_ERROR_NOT_PERMITTED;
    /* Call the driver in any case: if the handle is invalid, the driver reports the error. */
    CUresult status = REAL(cuMemPoolImportFromShareableHandle)(pool, shareable, type, flags);
    if (status != CUDA_SUCCESS) {
        ledger_import_end(import);
    } else if (foreign) {
        REAL(cuMemPoolDestroy)(*pool);
        status = memory_refuse("an import of a pool that another container made");
    } else {
        pool_add((uintptr_t)*pool, NULL, true);
    }
    return status;
}

EXPORT CUresult cuMemPoolDestroy(CUmemoryPool handle)
{
    ENTER(cuMemPoolDestroy, (handle));
    struct pool *pool = pool_known((uintptr_t)handle);
    if (!pool)
        return REAL(cuMemPoolDestroy)(handle);
    FLIGHT(pool->device ? pool->device->ledger : -1);
    lock_take(&pool->lock);
    /* The driver keeps what a trim leaves until the last block is freed, in units that may be much larger than the
     * blocks. Afterwards it does not report this size. */
    if (pool->charged && REAL_HAS(cuMemPoolTrimTo))
        REAL(cuMemPoolTrimTo)(handle, 0);
    pool_settle_down(pool);
    CUresult status = REAL(cuMemPoolDestroy)(handle);
    if (status == CUDA_SUCCESS) {
        atomic_store_explicit(&pool->key, 0, memory_order_relaxed);
        atomic_store_explicit(&vgpu_pools_dirty, 1, memory_order_relaxed);
    }
    lock_drop(&pool->lock);
    return status;
}

void pools_waited(bool done)
{
    if (!done || !atomic_load_explicit(&vgpu_pools_dirty, memory_order_relaxed))
        return;
    end_destroyed();
    EVENT(reclaim, false);
}

EXPORT CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep)
{
    ENTER(cuMemPoolTrimTo, (pool, keep));
    const struct pool *known = pool_known((uintptr_t)pool);
    FLIGHT(known && known->device ? known->device->ledger : -1);
    CUresult status = REAL(cuMemPoolTrimTo)(pool, keep);
    EVENT(reclaim, false);
    return status;
}

void pools_reset(void)
{
    atomic_store(&pools, NULL);
    atomic_store_explicit(&pools_lock.word, 0, memory_order_relaxed);
    atomic_store(&vgpu_pools_dirty, 0);
}
