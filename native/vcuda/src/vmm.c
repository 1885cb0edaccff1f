/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Virtual memory management. Physical memory made by cuMemCreate lives until its last handle is released and its last
 * mapping is gone, in whatever order; only then is it uncharged. Memory that was exported lives until its last shareable
 * handle is closed, and those are descriptors that nobody counts: it stays charged to its exporter. So does memory that was
 * bound to a multicast object or a sparse array, which keep it as long as they please. It is charged to the device of its
 * location, which need not be the current one. Memory imported from another process is that process's charge.
 */
#include "vgpu.h"

#include <stdlib.h>

struct physical {
    const struct device *device;
    uint64_t bytes;
    unsigned handles, mappings;
    bool kept; /* by something that nobody counts, see above: charged as long as this process lives */
};

static struct lock vmm_lock;

static struct physical *physical_of(uint64_t owner)
{
    return (struct physical *)(uintptr_t)owner;
}

static void let_go(struct physical *object)
{
    if (object->handles || object->mappings || object->kept)
        return;
    ledger_uncharge(object->device->ledger, ACCOUNT_USED, object->bytes);
    free(object);
}

/* Where the object behind a handle or mapping is charged; -1: nowhere. */
static int charged_at(struct block_map *map, uint64_t key)
{
    struct block block;
    lock_take(&vmm_lock);
    int device = block_get(map, key, &block) && block.owner ? physical_of(block.owner)->device->ledger : -1;
    lock_drop(&vmm_lock);
    return device;
}

/* The block of a handle counts in `kind` how often that value was handed out. */
static void add_handle(struct physical *object, uint64_t handle)
{
    struct block block;
    if (block_take(&vgpu_handles, handle, &block))
        block.kind++;
    else
        block = (struct block){.key = handle, .owner = (uintptr_t)object, .kind = 1};
    object->handles++;
    block_put(&vgpu_handles, &block);
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                            unsigned long long flags)
{
    ENTER(cuMemCreate, (handle, bytes, properties, flags));
    CUresult status;
    if (control == CONTROL_BROKEN)
        return memory_broken();
    if (!properties || properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return REAL(cuMemCreate)(handle, bytes, properties, flags);
    const struct device *device = device_of(properties->location.id, &status);
    if (!device)
        return status;
    if (limits_denied()) /* the one allocation that needs no context */
        return memory_broken();
    struct physical *object = calloc(1, sizeof *object);
    if (!object)
        return CUDA_ERROR_OUT_OF_MEMORY;
    FLIGHT(device->ledger);
    status = memory_charge(device, ACCOUNT_USED, bytes);
    if (status != CUDA_SUCCESS) {
        free(object);
        return status;
    }
    *object = (struct physical){.device = device, .bytes = bytes};
    lock_take(&vmm_lock);
    status = REAL(cuMemCreate)(handle, bytes, properties, flags);
    if (status == CUDA_SUCCESS)
        add_handle(object, *handle);
    else
        let_go(object);
    lock_drop(&vmm_lock);
    return status;
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    ENTER(cuMemRelease, (handle));
    struct block block;
    FLIGHT(charged_at(&vgpu_handles, handle));
    lock_take(&vmm_lock);
    CUresult status = REAL(cuMemRelease)(handle);
    if (status == CUDA_SUCCESS && block_take(&vgpu_handles, handle, &block)) {
        struct physical *object = physical_of(block.owner);
        object->handles--;
        if (--block.kind > 0)
            block_put(&vgpu_handles, &block);
        let_go(object);
    }
    lock_drop(&vmm_lock);
    return status;
}

EXPORT CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle, int type,
                                             unsigned long long flags)
{
    ENTER(cuMemExportToShareableHandle, (shareable, handle, type, flags));
    struct block block;
    lock_take(&vmm_lock);
    CUresult status = REAL(cuMemExportToShareableHandle)(shareable, handle, type, flags);
    if (status == CUDA_SUCCESS && block_get(&vgpu_handles, handle, &block))
        physical_of(block.owner)->kept = true;
    lock_drop(&vmm_lock);
    return status;
}

EXPORT CUresult cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags)
{
    ENTER(cuMemMap, (pointer, bytes, offset, handle, flags));
    struct block block;
    lock_take(&vmm_lock);
    CUresult status = REAL(cuMemMap)(pointer, bytes, offset, handle, flags);
    if (status == CUDA_SUCCESS) {
        struct physical *object = block_get(&vgpu_handles, handle, &block) ? physical_of(block.owner) : NULL;
        struct block mapping = {.key = pointer, .bytes = bytes, .owner = (uintptr_t)object, .kind = 1};
        if (object)
            object->mappings++;
        block_put(&vgpu_mappings, &mapping);
    }
    lock_drop(&vmm_lock);
    return status;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr pointer, size_t bytes)
{
    ENTER(cuMemUnmap, (pointer, bytes));
    struct block mapping;
    FLIGHT(charged_at(&vgpu_mappings, pointer));
    lock_take(&vmm_lock);
    CUresult status = REAL(cuMemUnmap)(pointer, bytes);
    /* The driver unmaps whole mappings only, so they follow each other through the range. */
    for (CUdeviceptr at = pointer; status == CUDA_SUCCESS && at - pointer < bytes; at += mapping.bytes) {
        if (!block_take(&vgpu_mappings, at, &mapping) || !mapping.bytes)
            break;
        struct physical *object = physical_of(mapping.owner);
        if (object) {
            object->mappings--;
            let_go(object);
        }
    }
    lock_drop(&vmm_lock);
    return status;
}

struct containing {
    uint64_t address, owner;
};

static bool contains(const struct block *mapping, void *data)
{
    struct containing *containing = data;
    if (containing->address - mapping->key < mapping->bytes)
        containing->owner = mapping->owner;
    return false;
}

static struct physical *mapped_at(uint64_t address)
{
    struct containing containing = {.address = address};
    block_sweep(&vgpu_mappings, contains, &containing);
    return physical_of(containing.owner);
}

EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address)
{
    ENTER(cuMemRetainAllocationHandle, (handle, address));
    lock_take(&vmm_lock);
    CUresult status = REAL(cuMemRetainAllocationHandle)(handle, address);
    struct physical *physical = status == CUDA_SUCCESS ? mapped_at((uintptr_t)address) : NULL;
    if (physical)
        add_handle(physical, *handle);
    lock_drop(&vmm_lock);
    return status;
}

/* --- kept by other things than handles and mappings ------------------------------------------------------- */

static void keep_handle(CUmemGenericAllocationHandle handle)
{
    struct block block;
    if (block_get(&vgpu_handles, handle, &block))
        physical_of(block.owner)->kept = true;
}

EXPORT CUresult cuMulticastBindMem(CUmemGenericAllocationHandle object, size_t place, CUmemGenericAllocationHandle memory,
                                   size_t offset, size_t bytes, unsigned long long flags)
{
    ENTER(cuMulticastBindMem, (object, place, memory, offset, bytes, flags));
    (void)control;
    lock_take(&vmm_lock);
    CUresult status = REAL(cuMulticastBindMem)(object, place, memory, offset, bytes, flags);
    if (status == CUDA_SUCCESS)
        keep_handle(memory);
    lock_drop(&vmm_lock);
    return status;
}

EXPORT CUresult cuMulticastBindAddr(CUmemGenericAllocationHandle object, size_t place, CUdeviceptr pointer, size_t bytes,
                                    unsigned long long flags)
{
    ENTER(cuMulticastBindAddr, (object, place, pointer, bytes, flags));
    (void)control;
    lock_take(&vmm_lock);
    CUresult status = REAL(cuMulticastBindAddr)(object, place, pointer, bytes, flags);
    /* Several mappings may lie behind one another. */
    for (CUdeviceptr at = pointer; status == CUDA_SUCCESS && at - pointer < bytes; at += 2 * MIB) {
        struct physical *physical = mapped_at(at);
        if (physical)
            physical->kept = true;
    }
    lock_drop(&vmm_lock);
    return status;
}

#define MAP_TILES(symbol) \
    EXPORT CUresult symbol(CUarrayMapInfo *tiles, unsigned int count, CUstream stream) \
    { \
        ENTER(symbol, (tiles, count, stream)); \
        (void)control; \
        lock_take(&vmm_lock); \
        CUresult status = REAL(symbol)(tiles, count, stream); \
        for (unsigned int i = 0; status == CUDA_SUCCESS && i < count; i++) \
            if (tiles[i].memOperationType == CU_MEM_OPERATION_TYPE_MAP) \
                keep_handle(tiles[i].memHandle.memHandle); \
        lock_drop(&vmm_lock); \
        return status; \
    }

MAP_TILES(cuMemMapArrayAsync)
MAP_TILES(cuMemMapArrayAsync_ptsz)

void vmm_reset(void)
{
    atomic_store_explicit(&vmm_lock.word, 0, memory_order_relaxed);
}
