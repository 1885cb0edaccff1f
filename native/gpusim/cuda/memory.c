/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Allocates device memory in plain, pitched and managed blocks. Each block is charged to the process before it gets an
 * address. A managed block is wholly on the GPU or wholly in host memory: in host memory if the GPU was full or the
 * program asked for that.
 */
#include "capture.h"
#include "graph.h"
#include "hostile.h"

#define FREEABLE (1u << BLOCK_PLAIN | 1u << BLOCK_MANAGED)
#define OWNED (FREEABLE | 1u << BLOCK_ARRAY) /* The kinds of blocks that a context owns and frees at its end. */
#define LOW_ARENA_BYTES ((uint64_t)2 << 30)

struct arena *memory_arena(CUdeviceptr pointer, int *device)
{
    for (int i = 0; i < driver.count; i++)
        if (arena_contains(driver.devices[i].arena, pointer)) {
            *device = i;
            return driver.devices[i].arena;
        }
    *device = -1; /* The arena (arena.h) of 32-bit addresses serves all devices; the block's owner tells the device. */
    return arena_contains(driver.low, pointer) ? driver.low : NULL;
}

bool memory_find(CUdeviceptr pointer, struct block *out, int *device)
{
    struct arena *arena = memory_arena(pointer, device);
    if (!arena || !arena_find(arena, pointer, out))
        return false;
    if (*device < 0)
        *device = ((CUcontext)out->owner)->device;
    return true;
}

static enum sim_kind charged_as(enum block_kind kind)
{
    return kind == BLOCK_MANAGED ? SIM_MANAGED : SIM_MEMORY;
}

static CUresult allocate(struct arena *arena, CUcontext context, uint64_t bytes, enum block_kind kind, CUdeviceptr *out)
{
    struct block block;
    enum sim_kind charged = charged_as(kind);
    enum sim_status status = sim_charge(context->gpu, charged, bytes);
    /* If the GPU is full, a managed block is placed in host memory. */
    bool on_host = status == SIM_ERR_MEMORY && kind == BLOCK_MANAGED;
    if (status != SIM_OK && !on_host)
        return status_to_result(status);
    if (!arena || !arena_alloc(arena, bytes, kind, context, &block)) {
        if (!on_host)
            sim_uncharge(context->gpu, charged, bytes);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (on_host)
        arena_place(arena, block.base, true, &block);
    *out = block.base;
    return CUDA_SUCCESS;
}

CUresult memory_alloc(CUcontext context, uint64_t bytes, enum block_kind kind, CUdeviceptr *out)
{
    ipc_free_deferred();
    CUresult result = allocate(device_of(context)->arena, context, bytes, kind, out);
    /* Try again after unused memory of pools was freed. */
    if (result == CUDA_ERROR_OUT_OF_MEMORY && pools_trim(context->device, true))
        result = allocate(device_of(context)->arena, context, bytes, kind, out);
    return result;
}

bool memory_free_owned(CUdeviceptr pointer, unsigned kinds)
{
    struct block block;
    int device;
    struct arena *arena = memory_arena(pointer, &device);
    if (!arena || !arena_free(arena, pointer, kinds, &block))
        return false;
    if (!block.on_host)
        sim_uncharge(((CUcontext)block.owner)->gpu, charged_as(block.kind), block.bytes);
    return true;
}

/* A block moves to the GPU only if the GPU has room; else it stays in host memory and the GPU reads it over the bus. */
void memory_migrate(CUdeviceptr pointer, bool to_host)
{
    struct block block;
    int device;
    struct arena *arena = memory_arena(pointer, &device);
    if (!arena || !arena_find(arena, pointer, &block) || block.kind != BLOCK_MANAGED || block.on_host == to_host)
        return;
    int gpu = ((CUcontext)block.owner)->gpu;
    if (!to_host && sim_charge(gpu, SIM_MANAGED, block.bytes) != SIM_OK)
        return;
    bool moved = arena_place(arena, pointer, to_host, &block);
    if (to_host == moved) /* Either the block has left the GPU, or another thread has already moved it to the GPU. */
        sim_uncharge(gpu, SIM_MANAGED, block.bytes);
}

CUresult memory_free(CUdeviceptr pointer)
{
    struct block block;
    int device;
    ipc_free_deferred();
    if (ipc_defer(pointer) || memory_free_owned(pointer, FREEABLE))
        return CUDA_SUCCESS;
    if (external_free(pointer))
        return CUDA_SUCCESS;
    struct arena *arena = memory_arena(pointer, &device);
    REQUIRE(arena, CUDA_ERROR_INVALID_VALUE);
    /* This call may also free memory of cuMemAllocAsync. */
    if (arena_find(arena, pointer, &block) && block.base == pointer && block.kind == BLOCK_POOL)
        return pool_free(pointer, &block);
    if (graph_memory_unuse(pointer))
        return CUDA_SUCCESS;
    return CUDA_ERROR_INVALID_VALUE;
}

static void release(const struct block *block)
{
    memory_free_owned(block->base, OWNED);
}

void memory_release_all(CUcontext context)
{
    if (device_of(context)->arena)
        arena_each(device_of(context)->arena, context, release);
    if (driver.low)
        arena_each(driver.low, context, release);
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes)
{
    ENTER_CONTEXT(context);
    REQUIRE(pointer && bytes, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(capture_forbids() == CUDA_SUCCESS, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    return memory_alloc(context, bytes, BLOCK_PLAIN, pointer);
}

/* As on hardware, cuMemFree waits for the context's work first, because a queued kernel may still use the memory. */
EXPORT CUresult cuMemFree_v2(CUdeviceptr pointer)
{
    ENTER_CONTEXT(context);
    REQUIRE(capture_forbids() == CUDA_SUCCESS, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CUresult result = free_wait(context);
    return result == CUDA_SUCCESS ? memory_free(pointer) : result;
}

static CUresult alloc_pitch(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height, unsigned element)
{
    ENTER_CONTEXT(context);
    REQUIRE(pointer && pitch && width && height, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(element == 4 || element == 8 || element == 16, CUDA_ERROR_INVALID_VALUE);
    size_t aligned = (width + 511) / 512 * 512, bytes;
    REQUIRE(aligned >= width && !__builtin_mul_overflow(aligned, height, &bytes), CUDA_ERROR_OUT_OF_MEMORY);
    CUresult result = memory_alloc(context, bytes, BLOCK_PLAIN, pointer);
    if (result == CUDA_SUCCESS)
        *pitch = aligned;
    return result;
}

EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height, unsigned element)
{
    return alloc_pitch(pointer, pitch, width, height, element);
}

EXPORT CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t bytes, unsigned flags)
{
    ENTER_CONTEXT(context);
    REQUIRE(pointer && bytes && (flags == 1 || flags == 2), CUDA_ERROR_INVALID_VALUE);
    REQUIRE(capture_forbids() == CUDA_SUCCESS, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    return memory_alloc(context, bytes, BLOCK_MANAGED, pointer);
}

EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    ENTER_CONTEXT(context);
    ipc_free_deferred();
    uint64_t unused, all;
    REQUIRE(free_bytes && total, CUDA_ERROR_INVALID_VALUE);
    sim_memory_info(context->gpu, &unused, &all);
    *free_bytes = unused;
    *total = all;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr pointer)
{
    ENTER_CONTEXT(context);
    struct block block;
    CUdeviceptr start = 0;
    size_t length = 0;
    int device;
    (void)context;
    if (memory_find(pointer, &block, &device)) {
        start = block.base;
        length = block.bytes;
    } else if (!vmm_find(pointer, &start, &length, &device) && !host_find(pointer, &start, &length, NULL, NULL)) {
        return CUDA_ERROR_NOT_FOUND;
    }
    if (base)
        *base = start;
    if (bytes)
        *bytes = length;
    return CUDA_SUCCESS;
}

/* ---- the first versions, with 32-bit pointers --------------------------------------------------------------------- */

static CUresult alloc_low(CUcontext context, unsigned *pointer, uint64_t bytes)
{
    CUdeviceptr wide = 0;
    pthread_mutex_lock(&driver.mutex);
    if (!driver.low)
        driver.low = arena_create(LOW_ARENA_BYTES, true);
    pthread_mutex_unlock(&driver.mutex);
    CUresult result = allocate(driver.low, context, bytes, BLOCK_PLAIN, &wide);
    if (result == CUDA_SUCCESS)
        *pointer = (unsigned)wide;
    return result;
}

EXPORT CUresult cuMemAlloc(unsigned *pointer, unsigned bytes)
{
    ENTER_CONTEXT(context);
    REQUIRE(pointer && bytes, CUDA_ERROR_INVALID_VALUE);
    return alloc_low(context, pointer, bytes);
}

EXPORT CUresult cuMemAllocPitch(unsigned *pointer, unsigned *pitch, unsigned width, unsigned height, unsigned element)
{
    ENTER_CONTEXT(context);
    REQUIRE(pointer && pitch && width && height, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(element == 4 || element == 8 || element == 16, CUDA_ERROR_INVALID_VALUE);
    uint64_t aligned = ((uint64_t)width + 511) / 512 * 512;
    REQUIRE(aligned <= UINT32_MAX, CUDA_ERROR_OUT_OF_MEMORY);
    CUresult result = alloc_low(context, pointer, aligned * height);
    if (result == CUDA_SUCCESS)
        *pitch = (unsigned)aligned;
    return result;
}

EXPORT CUresult cuMemFree(unsigned pointer)
{
    return cuMemFree_v2(pointer);
}

EXPORT CUresult cuMemGetInfo(unsigned *free_bytes, unsigned *total)
{
    size_t unused, all;
    REQUIRE(free_bytes && total, CUDA_ERROR_INVALID_VALUE);
    CUresult result = cuMemGetInfo_v2(&unused, &all);
    if (result == CUDA_SUCCESS) {
        *free_bytes = unused > UINT32_MAX ? UINT32_MAX : (unsigned)unused;
        *total = all > UINT32_MAX ? UINT32_MAX : (unsigned)all;
    }
    return result;
}

EXPORT CUresult cuMemGetAddressRange(unsigned *base, unsigned *bytes, unsigned pointer)
{
    CUdeviceptr start;
    size_t length;
    CUresult result = cuMemGetAddressRange_v2(&start, &length, pointer);
    if (result == CUDA_SUCCESS) {
        if (base)
            *base = (unsigned)start;
        if (bytes)
            *bytes = (unsigned)length;
    }
    return result;
}
