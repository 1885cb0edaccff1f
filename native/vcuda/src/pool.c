/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stream-ordered memory. What counts is what a pool holds of the card, not what the program has asked of the pool: a
 * freed block stays in the pool until its stream has been waited for, or longer. So a pool is charged what the driver
 * says it has reserved, looked up around every allocation and after everything that lets a pool shrink.
 */
#include "vgpu.h"

#include <stdlib.h>

#define POOL_UNIT (2 * MIB) /* a pool takes from the card in multiples of this */

struct pool {
    struct pool *next;
    struct lock lock;
    uint64_t key;
    const struct device *device; /* NULL: its memory is not on a device */
    uint64_t charged;
    uint64_t shared;      /* the object that its shareable handles stand for; 0: there are none */
    bool lent;            /* its slot says that others may have what it holds */
    uint64_t outstanding; /* bytes of blocks that the program holds */
    bool destroyed;       /* lives on until its last block is freed */
};

static struct pool *_Atomic pools; /* pushed at the head, never removed: a process has few */
static struct lock pools_lock;
_Atomic uint32_t vgpu_pools_dirty;

static struct pool *pool_known(uint64_t key)
{
    for (struct pool *pool = atomic_load_explicit(&pools, memory_order_acquire); pool; pool = pool->next)
        if (pool->key == key && !pool->destroyed)
            return pool;
    return NULL;
}

static struct pool *pool_add(uint64_t key, const struct device *device)
{
    lock_take(&pools_lock);
    struct pool *pool = pool_known(key);
    if (!pool && (pool = calloc(1, sizeof *pool))) {
        pool->key = key;
        pool->device = device;
        pool->next = atomic_load_explicit(&pools, memory_order_relaxed);
        atomic_store_explicit(&pools, pool, memory_order_release);
    }
    lock_drop(&pools_lock);
    return pool;
}

static uint64_t attribute(const struct pool *pool, int which, uint64_t otherwise)
{
    cuuint64_t value;
    if (!REAL_HAS(cuMemPoolGetAttribute) ||
        REAL(cuMemPoolGetAttribute)((CUmemoryPool)(uintptr_t)pool->key, which, &value) != CUDA_SUCCESS)
        return otherwise;
    return value;
}

/* Pool locked. What an exported pool holds is lent: its importers keep it when this process dies. */
static void hold(struct pool *pool, uint64_t bytes)
{
    bool more = bytes > pool->charged;
    if (pool->lent && bytes != pool->charged)
        ledger_lend(pool->device->ledger, more ? bytes - pool->charged : pool->charged - bytes, more);
    pool->charged = bytes;
}

/* Pool locked. Gives back what the pool no longer holds; what it holds beyond its charge waits for pool_settle_up. */
static void settle_down(struct pool *pool)
{
    if (pool->destroyed || !pool->device)
        return;
    uint64_t reserved = attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, pool->outstanding);
    if (reserved < pool->charged) {
        ledger_uncharge(pool->device->ledger, ACCOUNT_USED, pool->charged - reserved);
        hold(pool, reserved);
    }
}

/* Pool locked and settled. May the next wait for a stream make it smaller? */
static bool may_shrink(const struct pool *pool)
{
    if (pool->destroyed || !pool->device || pool->charged < POOL_UNIT + pool->outstanding)
        return false;
    return attribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, 0) < pool->charged;
}

void pools_settle(bool trim)
{
    atomic_store_explicit(&vgpu_pools_dirty, 0, memory_order_relaxed);
    for (struct pool *pool = atomic_load_explicit(&pools, memory_order_acquire); pool; pool = pool->next) {
        /* Whoever holds it settles it: waiting could wait for ourselves. */
        if (!lock_try(&pool->lock))
            continue;
        if (trim && !pool->destroyed && pool->device && REAL_HAS(cuMemPoolTrimTo))
            REAL(cuMemPoolTrimTo)((CUmemoryPool)(uintptr_t)pool->key, 0);
        settle_down(pool);
        if (may_shrink(pool))
            atomic_store_explicit(&vgpu_pools_dirty, 1, memory_order_relaxed);
        lock_drop(&pool->lock);
    }
    graph_memory_settle(trim);
    ipc_settle();
    vmm_settle();
}

void pool_freed(uint64_t key, uint64_t bytes)
{
    struct pool *pool = (struct pool *)(uintptr_t)key;
    lock_take(&pool->lock);
    pool->outstanding -= bytes < pool->outstanding ? bytes : pool->outstanding;
    if (pool->destroyed) {
        uint64_t back = pool->charged > pool->outstanding ? pool->charged - pool->outstanding : 0;
        hold(pool, pool->charged - back);
        ledger_uncharge(pool->device->ledger, ACCOUNT_USED, back);
    } else {
        settle_down(pool);
        atomic_store_explicit(&vgpu_pools_dirty, 1, memory_order_relaxed);
    }
    lock_drop(&pool->lock);
}

/* --- which pool, on which device ---------------------------------------------------------------------- */

static CUresult stream_ordinal(CUstream stream, CUdevice *ordinal)
{
    CUcontext context, popped;
    if (stream == NULL || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD || !REAL_HAS(cuStreamGetCtx))
        return REAL(cuCtxGetDevice)(ordinal);
    if (green_ordinal(stream, ordinal))
        return CUDA_SUCCESS;
    CUresult status = REAL(cuStreamGetCtx)(stream, &context);
    if (status != CUDA_SUCCESS)
        return status;
    status = REAL(cuCtxPushCurrent_v2)(context);
    if (status != CUDA_SUCCESS)
        return status;
    status = REAL(cuCtxGetDevice)(ordinal);
    REAL(cuCtxPopCurrent_v2)(&popped);
    return status;
}

static struct pool *pool_of_stream(CUstream stream, CUresult *status)
{
    CUdevice ordinal;
    CUmemoryPool handle;
    *status = stream_ordinal(stream, &ordinal);
    if (*status != CUDA_SUCCESS || (*status = REAL(cuDeviceGetMemPool)(&handle, ordinal)) != CUDA_SUCCESS)
        return NULL;
    struct pool *pool = pool_known((uintptr_t)handle);
    if (pool)
        return pool;
    const struct device *device = device_of(ordinal, status);
    pool = device ? pool_add((uintptr_t)handle, device) : NULL;
    if (device && !pool)
        *status = CUDA_ERROR_OUT_OF_MEMORY;
    return pool;
}

/* A pool that this process did not create through us is the default pool of a device. */
static struct pool *pool_of_handle(CUmemoryPool handle, CUresult *status)
{
    struct pool *pool = pool_known((uintptr_t)handle);
    int count = 0;
    *status = CUDA_SUCCESS;
    if (pool || !REAL_HAS(cuDeviceGetDefaultMemPool) || REAL(cuDeviceGetCount)(&count) != CUDA_SUCCESS)
        return pool;
    for (CUdevice ordinal = 0; ordinal < count; ordinal++) {
        CUmemoryPool candidate;
        if (REAL(cuDeviceGetDefaultMemPool)(&candidate, ordinal) != CUDA_SUCCESS || candidate != handle)
            continue;
        const struct device *device = device_of(ordinal, status);
        return device ? pool_add((uintptr_t)handle, device) : NULL;
    }
    /* Nobody knows whose memory it would be; what is no pool at all is the driver's to refuse. */
    cuuint64_t value;
    if (REAL_HAS(cuMemPoolGetAttribute) &&
        REAL(cuMemPoolGetAttribute)(handle, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &value) == CUDA_SUCCESS)
        *status = memory_refuse("an allocation from a pool that came another way than by this library");
    return NULL;
}

/* --- allocation --------------------------------------------------------------------------------------- */

struct request {
    CUdeviceptr *pointer;
    size_t bytes;
    CUmemoryPool handle;
    CUstream stream;
};
typedef CUresult (*allocate)(const struct request *request);

static bool capturing(CUstream stream, bool per_thread)
{
    int capture = CU_STREAM_CAPTURE_STATUS_NONE;
    if (per_thread && REAL_HAS(cuStreamIsCapturing_ptsz))
        REAL(cuStreamIsCapturing_ptsz)(stream, &capture);
    else if (REAL_HAS(cuStreamIsCapturing))
        REAL(cuStreamIsCapturing)(stream, &capture);
    return capture != CU_STREAM_CAPTURE_STATUS_NONE;
}

static uint64_t round_up(uint64_t bytes)
{
    return bytes > UINT64_MAX - POOL_UNIT ? UINT64_MAX : (bytes + POOL_UNIT - 1) / POOL_UNIT * POOL_UNIT;
}

static void take_back(const struct request *request, struct pool *pool)
{
    if (REAL(cuMemFreeAsync)(*request->pointer, request->stream) == CUDA_SUCCESS)
        REAL(cuStreamSynchronize)(request->stream);
    if (REAL_HAS(cuMemPoolTrimTo))
        REAL(cuMemPoolTrimTo)((CUmemoryPool)(uintptr_t)pool->key, 0);
}

static CUresult pool_alloc(struct pool *pool, const struct request *request, allocate call)
{
    const struct device *device = pool->device;
    FLIGHT(device->ledger);
    lock_take(&pool->lock);
    settle_down(pool);
    /* A whole number of units, so that the pool cannot grow by more than was charged before. */
    uint64_t charged = round_up(request->bytes);
    CUresult status = memory_charge(device, ACCOUNT_USED, charged);
    for (int trim = 0; status == CUDA_ERROR_OUT_OF_MEMORY && trim < 2; trim++) {
        if (trim && REAL_HAS(cuMemPoolTrimTo)) {
            REAL(cuMemPoolTrimTo)((CUmemoryPool)(uintptr_t)pool->key, 0);
            settle_down(pool);
        }
        /* It may fit into what the pool holds already and nobody uses. If the pool grows all the same, because its free
         * space is in pieces, the check after the call sees it. */
        uint64_t used = attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, pool->charged);
        uint64_t needed = request->bytes > UINT64_MAX - used ? UINT64_MAX : round_up(used + request->bytes);
        charged = needed > pool->charged ? needed - pool->charged : 0;
        status = memory_charge(device, ACCOUNT_USED, charged);
    }
    if (status != CUDA_SUCCESS) {
        lock_drop(&pool->lock);
        return status;
    }
    hold(pool, pool->charged + charged); /* before it is there: who is killed in between has lent it */
    status = call(request);
    if (status == CUDA_SUCCESS) {
        uint64_t held = attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, pool->outstanding + request->bytes);
        if (held > pool->charged) {
            status = memory_charge(device, ACCOUNT_USED, held - pool->charged);
            if (status == CUDA_SUCCESS)
                hold(pool, held);
            else
                take_back(request, pool);
        }
    }
    if (status == CUDA_SUCCESS) {
        pool->outstanding += request->bytes;
        memory_keep(&vgpu_memory, *request->pointer, request->bytes, device, BLOCK_POOL, (uintptr_t)pool);
    }
    settle_down(pool);
    lock_drop(&pool->lock);
    return status;
}

/* Memory in host memory has no order of its own: it is there at once, which every order allows. */
static CUresult host_alloc(const struct device *device, const struct request *request)
{
    CUcontext context;
    CUresult status;
    if (!device_current(&context, &status))
        return status;
    FLIGHT(device->ledger);
    status = memory_charge(device, ACCOUNT_USED, request->bytes);
    if (status != CUDA_SUCCESS)
        return status;
    status = host_memory_take(device, request->pointer, request->bytes);
    if (status != CUDA_SUCCESS)
        ledger_uncharge(device->ledger, ACCOUNT_USED, request->bytes);
    else
        memory_keep(&vgpu_memory, *request->pointer, request->bytes, device, BLOCK_HOST, (uintptr_t)context);
    return status;
}

static CUresult pool_or_host(struct pool *pool, const struct request *request, allocate call)
{
    const struct device *device = pool->device;
    bool full = request->bytes && host_memory_wanted(device, round_up(request->bytes));
    CUresult status = full ? CUDA_ERROR_OUT_OF_MEMORY : pool_alloc(pool, request, call);
    return status == CUDA_ERROR_OUT_OF_MEMORY && limits_oversubscribe() ? host_alloc(device, request) : status;
}

static CUresult admit(enum control control, const struct request *request, bool per_thread, struct pool **pool)
{
    CUresult status;
    *pool = NULL;
    if (control == CONTROL_BROKEN)
        return memory_broken();
    if (capturing(request->stream, per_thread)) /* no pool: it becomes a node of the graph */
        return graph_memory_captured(control);
    *pool = request->handle ? pool_of_handle(request->handle, &status) : pool_of_stream(request->stream, &status);
    return status;
}

#define ALLOCATE(symbol, per_thread, parameters, arguments, from, call_arguments) \
    static CUresult call_##symbol(const struct request *request) \
    { \
        return REAL(symbol) call_arguments; \
    } \
    EXPORT CUresult symbol parameters \
    { \
        ENTER(symbol, arguments); \
        struct request request = {pointer, bytes, from, stream}; \
        struct pool *which; \
        CUresult status = admit(control, &request, per_thread, &which); \
        if (status != CUDA_SUCCESS) \
            return status; \
        return which && which->device ? pool_or_host(which, &request, call_##symbol) : REAL(symbol) arguments; \
    }

ALLOCATE(cuMemAllocAsync, false, (CUdeviceptr *pointer, size_t bytes, CUstream stream), (pointer, bytes, stream), NULL,
         (request->pointer, request->bytes, request->stream))
ALLOCATE(cuMemAllocAsync_ptsz, true, (CUdeviceptr *pointer, size_t bytes, CUstream stream), (pointer, bytes, stream), NULL,
         (request->pointer, request->bytes, request->stream))
ALLOCATE(cuMemAllocFromPoolAsync, false, (CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream),
         (pointer, bytes, pool, stream), pool, (request->pointer, request->bytes, request->handle, request->stream))
ALLOCATE(cuMemAllocFromPoolAsync_ptsz, true, (CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream),
         (pointer, bytes, pool, stream), pool, (request->pointer, request->bytes, request->handle, request->stream))

/* --- freeing -------------------------------------------------------------------------------------------- */

struct ordered {
    CUstream stream;
    bool per_thread, plain;
};

static CUresult release(CUdeviceptr pointer, void *data)
{
    const struct ordered *ordered = data;
    if (!ordered->plain)
        return ordered->per_thread ? REAL(cuMemFreeAsync_ptsz)(pointer, ordered->stream)
                                   : REAL(cuMemFreeAsync)(pointer, ordered->stream);
    /* When plain memory would be gone nobody can be asked: wait for the stream and free it now. */
    CUresult status = ordered->per_thread && REAL_HAS(cuStreamSynchronize_ptsz)
                          ? REAL(cuStreamSynchronize_ptsz)(ordered->stream)
                          : REAL(cuStreamSynchronize)(ordered->stream);
    return status == CUDA_SUCCESS ? REAL(cuMemFree_v2)(pointer) : status;
}

static CUresult free_ordered(CUdeviceptr pointer, CUstream stream, bool per_thread)
{
    struct block block;
    bool plain = block_get(&vgpu_memory, pointer, &block) && block.kind != BLOCK_POOL && !capturing(stream, per_thread);
    struct ordered ordered = {stream, per_thread, plain};
    return memory_free(pointer, release, &ordered);
}

EXPORT CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream)
{
    ENTER(cuMemFreeAsync, (pointer, stream));
    return free_ordered(pointer, stream, false);
}

EXPORT CUresult cuMemFreeAsync_ptsz(CUdeviceptr pointer, CUstream stream)
{
    ENTER(cuMemFreeAsync_ptsz, (pointer, stream));
    return free_ordered(pointer, stream, true);
}

/* --- pools themselves, and what lets them shrink ---------------------------------------------------------- */

/*
 * The device that a pool's memory is on, NULL for memory of the host. Managed memory without a device of its own may come to
 * any card, and is refused.
 */
static CUresult place_of(const CUmemLocation *location, int type, const struct device **device)
{
    CUresult status = CUDA_SUCCESS;
    *device = NULL;
    if (location->type == CU_MEM_LOCATION_TYPE_DEVICE)
        *device = device_of(location->id, &status);
    else if (type == CU_MEM_ALLOCATION_TYPE_MANAGED)
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
    if (status == CUDA_SUCCESS && !pool_add((uintptr_t)*pool, device)) {
        REAL(cuMemPoolDestroy)(*pool);
        status = CUDA_ERROR_OUT_OF_MEMORY;
    }
    return status;
}

/* Pools that the driver has, found by place and kind of memory (CUDA 13). */
#define FIND(symbol) \
    EXPORT CUresult symbol(CUmemoryPool *pool, CUmemLocation *location, int type) \
    { \
        ENTER(symbol, (pool, location, type)); \
        const struct device *device; \
        CUresult status = REAL(symbol)(pool, location, type); \
        if (status != CUDA_SUCCESS || control == CONTROL_BROKEN) \
            return status; \
        status = place_of(location, type, &device); \
        if (status == CUDA_SUCCESS && !pool_known((uintptr_t)*pool) && !pool_add((uintptr_t)*pool, device)) \
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
    bool first = !pool->lent;
    if (first)
        ledger_lend(pool->device->ledger, pool->charged, true);
    pool->lent = true;
    CUresult status = REAL(cuMemPoolExportToShareableHandle)(shareable, handle, type, flags);
    if (status == CUDA_SUCCESS && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
        shareable_mark(*(const int *)shareable, &pool->shared);
    } else if (status == CUDA_SUCCESS) {
        shareable_unmarked();
    } else if (first) {
        ledger_lend(pool->device->ledger, pool->charged, false);
        pool->lent = false;
    }
    lock_drop(&pool->lock);
    return status;
}

/*
 * Another process's pool: the driver allocates from it for its owner only, who is charged. Pointers of it may outlive the
 * pool here, so its owner's charge is kept for as long as this process lives.
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
    void *loan = foreign ? NULL : ledger_borrow(shareable_lent_byte(object));
    if (!foreign && !loan)
        return CUDA_ERROR_NOT_PERMITTED;
    /* The driver is asked in any case: what is no handle at all is its own to refuse. */
    CUresult status = REAL(cuMemPoolImportFromShareableHandle)(pool, shareable, type, flags);
    if (status != CUDA_SUCCESS) {
        ledger_return(loan);
    } else if (foreign) {
        REAL(cuMemPoolDestroy)(*pool);
        status = memory_refuse("an import of a pool that another container made");
    } else {
        pool_add((uintptr_t)*pool, NULL);
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
    CUresult status = REAL(cuMemPoolDestroy)(handle);
    if (status == CUDA_SUCCESS) {
        pool->destroyed = true;
        if (pool->device && pool->charged > pool->outstanding) {
            ledger_uncharge(pool->device->ledger, ACCOUNT_USED, pool->charged - pool->outstanding);
            hold(pool, pool->outstanding);
        }
    }
    lock_drop(&pool->lock);
    return status;
}

#define SHRINK(symbol, parameters, arguments) \
    EXPORT CUresult symbol parameters \
    { \
        ENTER(symbol, arguments); \
        CUresult status = REAL(symbol) arguments; \
        if (status == CUDA_SUCCESS && atomic_load_explicit(&vgpu_pools_dirty, memory_order_relaxed)) \
            pools_settle(false); \
        fence_settle(); \
        return status; \
    }

SHRINK(cuCtxSynchronize, (void), ())
SHRINK(cuCtxSynchronize_v2, (CUcontext context), (context))
SHRINK(cuStreamSynchronize, (CUstream stream), (stream))
SHRINK(cuStreamSynchronize_ptsz, (CUstream stream), (stream))
SHRINK(cuEventSynchronize, (CUevent event), (event))

EXPORT CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep)
{
    ENTER(cuMemPoolTrimTo, (pool, keep));
    const struct pool *known = pool_known((uintptr_t)pool);
    FLIGHT(known && known->device ? known->device->ledger : -1);
    CUresult status = REAL(cuMemPoolTrimTo)(pool, keep);
    pools_settle(false);
    return status;
}

void pools_reset(void)
{
    atomic_store(&pools, NULL);
    atomic_store_explicit(&pools_lock.word, 0, memory_order_relaxed);
    atomic_store(&vgpu_pools_dirty, 0);
}
