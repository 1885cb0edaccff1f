/* SPDX-License-Identifier: Apache-2.0 */
/* Defines the hooks (replacements) of the functions for stream-ordered allocation. They find the pool that serves a
 * request, charge the memory before the driver's call, and handle the free. */
#include "pool.h"

#include "context/context.h"
#include "process.h"

/* --- the pool and the device that serve a request ----------------------------------------------------- */

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
    pool = device ? pool_add((uintptr_t)handle, device, false) : NULL;
    if (device && !pool)
        *status = CUDA_ERROR_OUT_OF_MEMORY;
    return pool;
}

/* Returns the record of a pool. A pool without a record is searched among the devices' default pools, because a program
 * gets the handle of a default pool without creating it. */
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
        return device ? pool_add((uintptr_t)handle, device, false) : NULL;
    }
    /* The pool is no default pool, and no hook saw its creation. So it is unknown on which device it allocates, and the
     * request is refused. But if the handle is no pool at all, the driver reports the error. */
    cuuint64_t value;
    if (REAL_HAS(cuMemPoolGetAttribute) &&
        REAL(cuMemPoolGetAttribute)(handle, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &value) == CUDA_SUCCESS)
        *status = memory_refuse("an allocation from a pool whose creation this library did not see");
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
    pool_settle_down(pool);
    /* Charge a whole number of units, because a pool grows by whole units. */
    uint64_t charged = round_up(request->bytes);
    CUresult status = memory_charge(device, ACCOUNT_USED, charged);
    for (int trim = 0; status == CUDA_ERROR_OUT_OF_MEMORY && trim < 2; trim++) {
        if (trim && REAL_HAS(cuMemPoolTrimTo)) {
            REAL(cuMemPoolTrimTo)((CUmemoryPool)(uintptr_t)pool->key, 0);
            pool_settle_down(pool);
        }
        /* Part of the request may fit into unused memory of the pool, so charge only the rest. If the pool grows by
         * more, because its free memory is fragmented, the check after the call charges the difference. */
        uint64_t used = pool_attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, pool->charged);
        uint64_t needed = request->bytes > UINT64_MAX - used ? UINT64_MAX : round_up(used + request->bytes);
        charged = needed > pool->charged ? needed - pool->charged : 0;
        status = memory_charge(device, ACCOUNT_USED, charged);
    }
    if (status != CUDA_SUCCESS) {
        lock_drop(&pool->lock);
        return status;
    }
    /* Record the new size before the call. If the process is killed during the call while other processes have the
     * exported pool open, the ledger (the file with the container's charges) must have the new size already. */
    pool_hold(pool, pool->charged + charged);
    status = call(request);
    if (status == CUDA_SUCCESS) {
        uint64_t held = pool_attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, pool->outstanding + request->bytes);
        if (held > pool->charged) {
            status = memory_charge(device, ACCOUNT_USED, held - pool->charged);
            if (status == CUDA_SUCCESS)
                pool_hold(pool, held);
            else
                take_back(request, pool);
        }
    }
    if (status == CUDA_SUCCESS) {
        pool->outstanding += request->bytes;
        memory_keep(&vgpu_memory, *request->pointer, request->bytes, device, BLOCK_POOL, (uintptr_t)pool);
    }
    pool_settle_down(pool);
    lock_drop(&pool->lock);
    memory_refused(device, status);
    return status;
}

/* Serves the request from host memory, for a container with oversubscription (host memory in place of device memory)
 * whose card is full. The stream is not involved: the memory can be used at once, which is earlier than the order of
 * the stream requires. */
static CUresult host_alloc(const struct device *device, const struct request *request)
{
    CUcontext context;
    CUresult status;
    if (!device_to_allocate(&context, &status))
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
    if ((status = memory_meet()) != CUDA_SUCCESS)
        return status;
    /* During a capture no pool is used, because the allocation becomes a node of the captured graph. */
    if (capturing(request->stream, per_thread))
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
    /* This memory came from no pool (but from cuMemAlloc, for example). The driver does not report when a
     * stream-ordered free of such memory is finished. So wait for the stream and free the memory now. A capture of
     * another stream may forbid these calls, but not cuMemFreeAsync. */
    int mode;
    capture_relax(&mode);
    CUresult status = ordered->per_thread && REAL_HAS(cuStreamSynchronize_ptsz)
                          ? REAL(cuStreamSynchronize_ptsz)(ordered->stream)
                          : REAL(cuStreamSynchronize)(ordered->stream);
    if (status == CUDA_SUCCESS)
        status = REAL(cuMemFree_v2)(pointer);
    capture_restore(mode);
    return status;
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
