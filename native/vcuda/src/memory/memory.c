/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Defines the hooks (replacements) of cuMemAlloc, cuMemFree and similar functions. An allocation charges the memory,
 * calls the driver and stores the charge in a table under the pointer. A free does the reverse. It first removes the
 * block from the table, because another thread may get the same address at once. It uncharges the block last, so that
 * the account is never below the real usage.
 */
#include "memory.h"

#include "account/blocks.h"
#include "process.h"

#include <stdio.h>
#include <stdlib.h>

#define USUAL(condition) __builtin_expect(!!(condition), 1)

/* --- allocation ------------------------------------------------------------------------------------ */

/* Allocates on the card, or in host memory if the card is full and oversubscription (host_memory.c) is on. *kind tells
 * which of the two. */
static CUresult take(const struct device *device, CUdeviceptr *pointer, size_t bytes, int *kind)
{
    *kind = BLOCK_PLAIN;
    if (!limits_oversubscribe())
        return REAL(cuMemAlloc_v2)(pointer, bytes);
    CUresult status = CUDA_ERROR_OUT_OF_MEMORY;
    if (!host_memory_wanted(device, bytes))
        status = REAL(cuMemAlloc_v2)(pointer, bytes);
    if (status == CUDA_ERROR_OUT_OF_MEMORY) {
        *kind = BLOCK_HOST;
        status = host_memory_take(device, pointer, bytes);
    }
    return status;
}

static __attribute__((noinline)) CUresult alloc_slowly(CUdeviceptr *pointer, size_t bytes)
{
    ENTER(cuMemAlloc_v2, (pointer, bytes));
    struct allocation allocation;
    CUresult status = allocation_begin(control, &allocation, bytes);
    if (status != CUDA_SUCCESS)
        return status;
    status = take(allocation.device, pointer, bytes, &allocation.kind);
    return allocation_end(&allocation, status, &vgpu_memory, status ? 0 : *pointer);
}

/* This hook handles only the common case, for speed. In every other case it undoes its own steps and calls
 * alloc_slowly. */
EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes)
{
    const struct cached_limits *cached = vgpu_limits_now();
    CUcontext context;
    if (!USUAL(cached && cached->plain && REAL_HAS(cuMemAlloc_v2)))
        return alloc_slowly(pointer, bytes);
    const struct device *device;
    uint64_t limit;
    if (!USUAL(device_known(&context, &device) && (limit = cached_memory(cached, device))))
        return alloc_slowly(pointer, bytes);
    struct counters *counters = device->counters;
    counters_enter(counters);
    if (!USUAL(counters_charged(counters, ACCOUNT_USED, bytes, limit))) {
        counters_leave(counters);
        return alloc_slowly(pointer, bytes);
    }
    CUresult status = REAL(cuMemAlloc_v2)(pointer, bytes);
    struct block block = {.bytes = bytes, .owner = (uintptr_t)context, .device = counters->device, .kind = BLOCK_PLAIN};
    if (!USUAL(status == CUDA_SUCCESS)) {
        ledger_uncharge(counters->device, ACCOUNT_USED, bytes);
        memory_refused(device, status);
    } else {
        block.key = *pointer;
        if (!USUAL(block_put_now(&vgpu_memory, &block)))
            memory_keep(&vgpu_memory, *pointer, bytes, device, BLOCK_PLAIN, (uintptr_t)context);
    }
    counters_leave(counters);
    return status;
}

EXPORT CUresult cuMemAlloc(CUdeviceptr_v1 *pointer, unsigned int bytes)
{
    ENTER(cuMemAlloc, (pointer, bytes));
    struct allocation allocation;
    CUresult status = allocation_begin(control, &allocation, bytes);
    if (status != CUDA_SUCCESS)
        return status;
    status = REAL(cuMemAlloc)(pointer, bytes);
    return allocation_end(&allocation, status, &vgpu_memory, status ? 0 : *pointer);
}

EXPORT CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t bytes, unsigned int flags)
{
    ENTER(cuMemAllocManaged, (pointer, bytes, flags));
    struct allocation allocation;
    CUresult status = allocation_begin(control, &allocation, bytes);
    if (status != CUDA_SUCCESS)
        return status;
    status = REAL(cuMemAllocManaged)(pointer, bytes, flags);
    return allocation_end(&allocation, status, &vgpu_memory, status ? 0 : *pointer);
}

/*
 * The driver chooses the pitch, so the size is known only after the call. Padding of up to 512 bytes per row is charged
 * before the call. If a driver pads more, the rest is charged afterwards. If the rest exceeds the limit, the memory is
 * freed.
 */
#define PITCH_ALIGNMENT 512ull

static CUresult pitch_before(enum control control, struct allocation *allocation, uint64_t width, uint64_t height)
{
    uint64_t bytes;
    uint64_t row = width > UINT64_MAX - PITCH_ALIGNMENT ? width : (width + PITCH_ALIGNMENT - 1) / PITCH_ALIGNMENT * PITCH_ALIGNMENT;
    if (__builtin_mul_overflow(row, height, &bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    return allocation_begin(control, allocation, bytes);
}

static CUresult pitch_after(struct allocation *allocation, CUresult status, CUdeviceptr pointer, uint64_t pitch, uint64_t height)
{
    if (status == CUDA_SUCCESS && (status = allocation_resize(allocation, pitch * height)) != CUDA_SUCCESS)
        REAL(cuMemFree_v2)(pointer);
    return allocation_end(allocation, status, &vgpu_memory, pointer);
}

EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height, unsigned int element)
{
    ENTER(cuMemAllocPitch_v2, (pointer, pitch, width, height, element));
    struct allocation allocation;
    CUresult status = pitch_before(control, &allocation, width, height);
    if (status != CUDA_SUCCESS)
        return status;
    bool full = allocation.bytes && (element == 4 || element == 8 || element == 16) &&
                host_memory_wanted(allocation.device, allocation.bytes);
    status = full ? CUDA_ERROR_OUT_OF_MEMORY : REAL(cuMemAllocPitch_v2)(pointer, pitch, width, height, element);
    if (status == CUDA_ERROR_OUT_OF_MEMORY && pitch && limits_oversubscribe()) {
        allocation.kind = BLOCK_HOST;
        status = host_memory_take(allocation.device, pointer, allocation.bytes);
        if (status == CUDA_SUCCESS)
            *pitch = allocation.bytes / height;
    }
    return pitch_after(&allocation, status, status ? 0 : *pointer, status ? 0 : *pitch, height);
}

EXPORT CUresult cuMemAllocPitch(CUdeviceptr_v1 *pointer, unsigned int *pitch, unsigned int width, unsigned int height,
                                unsigned int element)
{
    ENTER(cuMemAllocPitch, (pointer, pitch, width, height, element));
    struct allocation allocation;
    CUresult status = pitch_before(control, &allocation, width, height);
    if (status != CUDA_SUCCESS)
        return status;
    status = REAL(cuMemAllocPitch)(pointer, pitch, width, height, element);
    return pitch_after(&allocation, status, status ? 0 : *pointer, status ? 0 : *pitch, height);
}

/* --- freeing --------------------------------------------------------------------------------------- */

void memory_gone(const struct block *block)
{
    if (block->kind == BLOCK_HOST)
        host_memory_freed(block->device, block->bytes);
    ledger_uncharge(block->device, ACCOUNT_USED, block->bytes);
}

static __attribute__((noinline)) CUresult free_known(const struct block *block, CUdeviceptr pointer,
                                                      CUresult (*release)(CUdeviceptr pointer, void *data), void *data)
{
    struct counters *counters = counters_of(block->device);
    struct block entry;
    counters_enter_free(counters);
    bool exported = block->kind == BLOCK_EXPORTED && ipc_exported(pointer, &entry);
    CUresult status = release(pointer, data);
    if (status != CUDA_SUCCESS && exported)
        block_put(&vgpu_exported, &entry);
    if (status != CUDA_SUCCESS)
        block_put(&vgpu_memory, block);
    else if (block->kind == BLOCK_POOL)
        pool_freed(block->owner, block->bytes);
    else if (exported)
        ipc_freed(&entry);
    else
        memory_gone(block);
    counters_leave_free(counters);
    return status;
}

CUresult memory_free(CUdeviceptr pointer, CUresult (*release)(CUdeviceptr pointer, void *data), void *data)
{
    struct block block;
    if (!block_take(&vgpu_memory, pointer, &block)) {
        bool any = atomic_load_explicit(&vgpu_external_any, memory_order_relaxed);
        struct external_buffer *external = any ? external_take(pointer) : NULL;
        CUresult status = release(pointer, data);
        if (external)
            external_settle(external, status == CUDA_SUCCESS);
        return status;
    }
    return free_known(&block, pointer, release, data);
}

static CUresult release_v2(CUdeviceptr pointer, void *data)
{
    (void)data;
    return REAL(cuMemFree_v2)(pointer);
}

static __attribute__((noinline)) CUresult free_slowly(CUdeviceptr pointer)
{
    ENTER(cuMemFree_v2, (pointer));
    return memory_free(pointer, release_v2, NULL);
}

/* Like cuMemAlloc_v2, this hook handles only the common case. The functions above handle all others. */
EXPORT CUresult cuMemFree_v2(CUdeviceptr pointer)
{
    const struct cached_limits *cached = vgpu_limits_now();
    struct block block;
    if (!USUAL(cached && cached->plain && REAL_HAS(cuMemFree_v2) && block_take_now(&vgpu_memory, pointer, &block)))
        return free_slowly(pointer);
    if (!USUAL(block.kind == BLOCK_PLAIN))
        return free_known(&block, pointer, release_v2, NULL);
    struct counters *counters = counters_of(block.device);
    counters_enter_free(counters);
    CUresult status = REAL(cuMemFree_v2)(pointer);
    if (!USUAL(status == CUDA_SUCCESS))
        block_put(&vgpu_memory, &block);
    else if (!USUAL(counters_uncharged(counters, ACCOUNT_USED, block.bytes)))
        ledger_uncharge(block.device, ACCOUNT_USED, block.bytes);
    counters_leave_free(counters);
    return status;
}

static CUresult release_v1(CUdeviceptr pointer, void *data)
{
    (void)data;
    return REAL(cuMemFree)((CUdeviceptr_v1)pointer);
}

EXPORT CUresult cuMemFree(CUdeviceptr_v1 pointer)
{
    ENTER(cuMemFree, (pointer));
    return memory_free(pointer, release_v1, NULL);
}
