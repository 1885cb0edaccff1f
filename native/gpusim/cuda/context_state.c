/* SPDX-License-Identifier: Apache-2.0 */
/* Reads and changes the state of the current context: device, limits, configuration, peers, synchronization. */
#include "capture.h"

EXPORT CUresult cuCtxGetDevice(CUdevice *device)
{
    ENTER_CONTEXT(context);
    REQUIRE(device, CUDA_ERROR_INVALID_VALUE);
    *device = context->device;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetFlags(unsigned *flags)
{
    ENTER_CONTEXT(context);
    REQUIRE(flags, CUDA_ERROR_INVALID_VALUE);
    *flags = context->flags;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetFlags(unsigned flags)
{
    ENTER_CONTEXT(context);
    REQUIRE((flags & ~0xffu) == 0, CUDA_ERROR_INVALID_VALUE);
    context->flags = flags;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetId(CUcontext context, unsigned long long *id)
{
    ENTER();
    REQUIRE(id, CUDA_ERROR_INVALID_VALUE);
    if (!context)
        context = context_current();
    CUresult result = context_check(context);
    if (result == CUDA_SUCCESS)
        *id = context->id;
    return result;
}

EXPORT CUresult cuCtxGetApiVersion(CUcontext context, unsigned *version)
{
    ENTER();
    REQUIRE(version, CUDA_ERROR_INVALID_VALUE);
    if (!context)
        context = context_current();
    CUresult result = context_check(context);
    if (result == CUDA_SUCCESS)
        *version = context->version;
    return result;
}

EXPORT CUresult cuCtxSynchronize(void)
{
    ENTER_CONTEXT(context);
    REQUIRE(capture_forbids() == CUDA_SUCCESS, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    return context_wait(context);
}

/*
 * Stacks for every thread that the GPU can hold are allocated as soon as their size is set. Heaps are allocated when
 * the next module is loaded, and never shrink.
 */
#define MAX_STACK_BYTES 524288u

static uint64_t threads_of(CUcontext context)
{
    const struct sim_gpu *gpu = &sim_state()->gpus[context->gpu];
    return (uint64_t)gpu->sm_count * sim_model_find(gpu->model)->threads_per_sm;
}

static CUresult resize(CUcontext context, uint64_t *held, uint64_t bytes)
{
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&context->mutex);
    if (bytes > *held)
        result = status_to_result(sim_charge(context->gpu, SIM_CONTEXT, bytes - *held));
    else
        sim_uncharge(context->gpu, SIM_CONTEXT, *held - bytes);
    if (result == CUDA_SUCCESS)
        *held = bytes;
    pthread_mutex_unlock(&context->mutex);
    return result;
}

CUresult context_heaps(CUcontext context)
{
    uint64_t bytes = 0;
    if (context->limits[1] > DEFAULT_FIFO)
        bytes += context->limits[1] - DEFAULT_FIFO;
    if (context->limits[2] > DEFAULT_HEAP)
        bytes += context->limits[2] - DEFAULT_HEAP;
    return bytes > context->heap_bytes ? resize(context, &context->heap_bytes, bytes) : CUDA_SUCCESS;
}

void context_heaps_end(CUcontext context)
{
    resize(context, &context->stack_bytes, 0);
    resize(context, &context->heap_bytes, 0);
}

/* limit is a CUlimit: 0 stack size, 1 printf buffer, 2 malloc heap, 3 synchronization depth, 4 pending launches, 5 L2
 * fetch granularity, 6 persisting L2 cache. */
EXPORT CUresult cuCtxSetLimit(int limit, size_t value)
{
    ENTER_CONTEXT(context);
    REQUIRE(limit >= 0 && limit <= 6, CUDA_ERROR_UNSUPPORTED_LIMIT);
    CUresult result = CUDA_SUCCESS;
    if (limit == 0) {
        REQUIRE(value <= MAX_STACK_BYTES, CUDA_ERROR_INVALID_VALUE);
        result = resize(context, &context->stack_bytes, value > DEFAULT_STACK ? (value - DEFAULT_STACK) * threads_of(context) : 0);
    }
    if (result == CUDA_SUCCESS)
        context->limits[limit] = value;
    return result;
}

EXPORT CUresult cuCtxGetLimit(size_t *value, int limit)
{
    ENTER_CONTEXT(context);
    REQUIRE(value, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(limit >= 0 && limit <= 6, CUDA_ERROR_UNSUPPORTED_LIMIT);
    *value = context->limits[limit];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCacheConfig(int *config)
{
    ENTER_CONTEXT(context);
    REQUIRE(config, CUDA_ERROR_INVALID_VALUE);
    *config = context->cache_config;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCacheConfig(int config)
{
    ENTER_CONTEXT(context);
    REQUIRE(config >= 0 && config <= 3, CUDA_ERROR_INVALID_VALUE);
    context->cache_config = config;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetSharedMemConfig(int *config)
{
    ENTER_CONTEXT(context);
    REQUIRE(config, CUDA_ERROR_INVALID_VALUE);
    *config = context->shared_config;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetSharedMemConfig(int config)
{
    ENTER_CONTEXT(context);
    REQUIRE(config >= 0 && config <= 2, CUDA_ERROR_INVALID_VALUE);
    context->shared_config = config ? config : 1;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    ENTER_CONTEXT(context);
    (void)context;
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxResetPersistingL2Cache(void)
{
    ENTER_CONTEXT(context);
    (void)context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuProfilerStart(void)
{
    ENTER_CONTEXT(context);
    (void)context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuProfilerStop(void)
{
    ENTER_CONTEXT(context);
    (void)context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags)
{
    ENTER_CONTEXT(context);
    REQUIRE(flags == 0, CUDA_ERROR_INVALID_VALUE);
    CUresult result = context_check(peer);
    if (result != CUDA_SUCCESS)
        return result;
    REQUIRE(peer->device != context->device, CUDA_ERROR_INVALID_DEVICE);
    uint64_t bit = (uint64_t)1 << peer->device;
    pthread_mutex_lock(&context->mutex);
    bool enabled = context->peers & bit;
    context->peers |= bit;
    pthread_mutex_unlock(&context->mutex);
    return enabled ? CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED : CUDA_SUCCESS;
}

EXPORT CUresult cuCtxDisablePeerAccess(CUcontext peer)
{
    ENTER_CONTEXT(context);
    REQUIRE(peer && peer->magic == CONTEXT_MAGIC, CUDA_ERROR_INVALID_CONTEXT);
    uint64_t bit = (uint64_t)1 << peer->device;
    pthread_mutex_lock(&context->mutex);
    bool enabled = context->peers & bit;
    context->peers &= ~bit;
    pthread_mutex_unlock(&context->mutex);
    return enabled ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
}
