/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Defines the hooks (replacements) of CUDA's functions for virtual memory management. Physical memory that cuMemCreate
 * creates (here: an object) lives until its last handle is released and its last mapping is removed, in any order. Only
 * then is it uncharged. Memory that is bound to a multicast object or a sparse array stays charged until exit, because
 * these keep the memory for an unknown time. The memory is charged to the device of its location, which need not be the
 * current device. vmm_shared.c handles sharing with other processes.
 *
 * No lock is held during a driver call, because a call for one GPU must not wait for a call for another GPU. A call
 * holds a reference to its object, so that the object is not uncharged meanwhile. A release is recorded only after the
 * driver's call. Until the release is recorded, the driver may return the same handle or address to another caller.
 * That caller then records the release instead.
 */
#include "vmm.h"

#include "process.h"

#include <stdlib.h>

/* Protects the structures in this file and the tables of handles and mappings. Never held during a driver call. */
struct lock vmm_lock;
/* List of the objects that this process has released while another process has them open. */
static struct physical *waiting;
/* Number of the last mapping, stored as the kind of the mapping's block; never 0. */
static uint32_t mapping_number;

static bool open_elsewhere(const struct physical *object)
{
    return object->shared && (shareable_open(object->shared) || ledger_import_open(shareable_import_byte(object->shared)));
}

static void end(struct physical *object)
{
    if (object->device) {
        ledger_uncharge(object->device->ledger, ACCOUNT_USED, object->bytes);
        if (object->exported)
            ledger_export(object->device->ledger, object->bytes, false);
        if (object->host)
            host_memory_freed(object->device->ledger, object->bytes);
    }
    ledger_import_end(object->import);
    free(object);
}

static void let_go(struct physical *object)
{
    if (object->handles || object->mappings || object->calls || object->kept)
        return;
    if (object->import || !open_elsewhere(object)) {
        end(object);
        return;
    }
    object->next = waiting;
    waiting = object;
    atomic_store_explicit(&vgpu_pools_dirty, 1, memory_order_relaxed);
}

void vmm_settle(bool trim)
{
    (void)trim;
    if (!__atomic_load_n(&waiting, __ATOMIC_RELAXED))
        return;
    /* Another thread has the lock. Set the flag that pools have changed, so that a later call repeats this check. No
     * other event would cause that. */
    if (!lock_try(&vmm_lock)) {
        atomic_store_explicit(&vgpu_pools_dirty, 1, memory_order_relaxed);
        return;
    }
    uint64_t released[VGPU_MAX_DEVICES] = {0};
    struct physical *closed = NULL;
    for (struct physical **link = &waiting; *link;) {
        struct physical *object = *link;
        if (open_elsewhere(object)) {
            if (object->device && !vmm_imported_here(object->shared))
                released[object->device->ledger] += object->bytes;
            link = &object->next;
            continue;
        }
        *link = object->next;
        object->next = closed;
        closed = object;
    }
    shareable_release(released);
    for (struct physical *object; (object = closed); end(object))
        closed = object->next;
    if (waiting) /* Some memory is still open in another process, so check again later. */
        atomic_store_explicit(&vgpu_pools_dirty, 1, memory_order_relaxed);
    lock_drop(&vmm_lock);
}

struct physical *vmm_begin(struct block_map *map, uint64_t key)
{
    struct block block;
    lock_take(&vmm_lock);
    struct physical *object = block_get(map, key, &block) ? physical_of(block.owner) : NULL;
    if (object)
        object->calls++;
    lock_drop(&vmm_lock);
    return object;
}

void vmm_done(struct physical *object)
{
    if (!object)
        return;
    lock_take(&vmm_lock);
    object->calls--;
    let_go(object);
    lock_drop(&vmm_lock);
}

static int charged_at(const struct physical *object)
{
    return object && object->device ? object->device->ledger : -1;
}

/* Records a handle. The field `kind` of its block counts how often the driver has returned that value. `fresh` is true
 * if the driver has no other open handle of that value. Needs the lock. Returns false if there is no host memory for
 * the record. */
static bool add_handle(struct physical *object, uint64_t handle, bool fresh)
{
    struct block block;
    if (!block_get(&vgpu_handles, handle, &block))
        block = (struct block){.key = handle, .owner = (uintptr_t)object};
    struct physical *former = physical_of(block.owner);
    /* The driver has released the former handle with this value, but the thread that called cuMemRelease has not
     * recorded that yet. */
    if (former != object && fresh) {
        former->handles -= (unsigned)block.kind;
        let_go(former);
        block = (struct block){.key = handle, .owner = (uintptr_t)object};
    }
    block.kind++;
    if (!block_put(&vgpu_handles, &block))
        return false;
    physical_of(block.owner)->handles++;
    return true;
}

CUresult vmm_remember(struct physical *object, CUmemGenericAllocationHandle handle, bool fresh)
{
    lock_take(&vmm_lock);
    bool added = add_handle(object, handle, fresh);
    lock_drop(&vmm_lock);
    if (added)
        return CUDA_SUCCESS;
    if (REAL_HAS(cuMemRelease))
        REAL(cuMemRelease)(handle);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* Records the release of a handle. Needs the lock. */
static void drop_handle(const struct physical *object, uint64_t handle)
{
    struct block block;
    if (!block_get(&vgpu_handles, handle, &block) || physical_of(block.owner) != object)
        /* After the release the driver has returned the same value to another thread, and that thread has already
         * recorded the release. */
        return;
    physical_of(block.owner)->handles--;
    /* Taking the block out makes room in the table, so that the block can be put back below. */
    block_take(&vgpu_handles, handle, &block);
    if (--block.kind > 0)
        block_put(&vgpu_handles, &block);
}

/* Creates the memory on the card, or in host memory if the card is full and oversubscription (host_memory.c) is on. */
static CUresult create(struct physical *object, CUmemGenericAllocationHandle *handle, const CUmemAllocationProp *properties,
                       unsigned long long flags)
{
    bool wanted = host_memory_physical_wanted(object->device, properties, object->bytes);
    object->host = wanted && host_memory_create(object->device, handle, object->bytes, properties) == CUDA_SUCCESS;
    if (object->host)
        return CUDA_SUCCESS;
    CUresult status = REAL(cuMemCreate)(handle, object->bytes, properties, flags);
    if (status == CUDA_ERROR_OUT_OF_MEMORY && limits_oversubscribe() && !wanted) {
        status = host_memory_create(object->device, handle, object->bytes, properties);
        object->host = status == CUDA_SUCCESS;
    }
    return status;
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                            unsigned long long flags)
{
    ENTER(cuMemCreate, (handle, bytes, properties, flags));
    CUresult status;
    if (control == CONTROL_BROKEN)
        return memory_broken();
    if (!properties)
        return REAL(cuMemCreate)(handle, bytes, properties, flags);
    const struct device *device = device_at(&properties->location, &status);
    if (!device)
        return status == CUDA_SUCCESS ? REAL(cuMemCreate)(handle, bytes, properties, flags) : status;
    /* Other allocations need a context, and no context can be created. cuMemCreate needs no context, so it must be
     * refused here. */
    if (limits_denied())
        return memory_broken();
    if ((status = memory_meet()) != CUDA_SUCCESS)
        return status;
    struct physical *object = calloc(1, sizeof *object);
    if (!object)
        return CUDA_ERROR_OUT_OF_MEMORY;
    FLIGHT(device->ledger);
    status = memory_charge(device, ACCOUNT_USED, bytes);
    if (status != CUDA_SUCCESS) {
        free(object);
        return status;
    }
    *object = (struct physical){.device = device, .bytes = bytes, .calls = 1};
    status = create(object, handle, properties, flags);
    if (status == CUDA_SUCCESS)
        status = vmm_remember(object, *handle, true);
    vmm_done(object);
    memory_refused(device, status);
    return status;
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    ENTER(cuMemRelease, (handle));
    (void)control;
    struct physical *object = vmm_begin(&vgpu_handles, handle);
    FLIGHT(charged_at(object));
    CUresult status = REAL(cuMemRelease)(handle);
    if (status == CUDA_SUCCESS && object) {
        lock_take(&vmm_lock);
        drop_handle(object, handle);
        lock_drop(&vmm_lock);
    }
    vmm_done(object);
    return status;
}

/* Memory that was imported without a readable mark may be of this container, so it is charged to this process. But its
 * size is not known before it is mapped. Returns the additional bytes to charge when such an import is mapped up to
 * `end`. */
static uint64_t grows(const struct physical *object, uint64_t end)
{
    return object && object->import && object->device && end > object->bytes ? end - object->bytes : 0;
}

/* Records the removal of a mapping. Needs the lock. */
static void drop_mapping(const struct block *mapping)
{
    struct block block;
    struct physical *object = physical_of(mapping->owner);
    block_take(&vgpu_mappings, mapping->key, &block);
    if (object) {
        object->mappings--;
        let_go(object);
    }
}

/* Records that the driver has unmapped a range. `number` is the number of the last mapping at the begin of that call.
 * If the range contains a newer mapping, the call that made this mapping has already recorded the removal of the older
 * one. Needs the lock. */
static void drop_mappings(CUdeviceptr pointer, size_t bytes, uint32_t number)
{
    struct block mapping;
    for (CUdeviceptr at = pointer; at - pointer < bytes;) {
        bool found = block_get(&vgpu_mappings, at, &mapping) && mapping.bytes;
        if (found && (int32_t)(number - (uint32_t)mapping.kind) >= 0)
            drop_mapping(&mapping);
        at += found ? mapping.bytes : 2 * MIB;
    }
}

static bool add_mapping(struct physical *object, CUdeviceptr pointer, size_t bytes)
{
    lock_take(&vmm_lock);
    /* Remove the records of former mappings of this range: the driver has unmapped them, but the unmapping calls have
     * not recorded that yet. */
    drop_mappings(pointer, bytes, mapping_number);
    mapping_number += mapping_number == UINT32_MAX ? 2 : 1;
    struct block mapping = {.key = pointer, .bytes = bytes, .owner = (uintptr_t)object, .kind = (int32_t)mapping_number};
    bool added = block_put(&vgpu_mappings, &mapping);
    if (added && object)
        object->mappings++;
    lock_drop(&vmm_lock);
    return added;
}

EXPORT CUresult cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags)
{
    ENTER(cuMemMap, (pointer, bytes, offset, handle, flags));
    (void)control;
    struct physical *object = vmm_begin(&vgpu_handles, handle);
    uint64_t more = grows(object, offset + bytes), needed = 0;
    CUresult status = more ? memory_charge(object->device, ACCOUNT_USED, more) : CUDA_SUCCESS;
    if (status != CUDA_SUCCESS) {
        vmm_done(object);
        return status;
    }
    status = REAL(cuMemMap)(pointer, bytes, offset, handle, flags);
    if (status == CUDA_SUCCESS && !add_mapping(object, pointer, bytes)) {
        REAL(cuMemUnmap)(pointer, bytes);
        status = CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (more) {
        lock_take(&vmm_lock);
        if (status == CUDA_SUCCESS)
            /* `needed` becomes less than `more` if another thread has mapped the memory meanwhile. */
            needed = grows(object, offset + bytes);
        object->bytes += needed;
        lock_drop(&vmm_lock);
        ledger_uncharge(object->device->ledger, ACCOUNT_USED, more - needed);
    }
    vmm_done(object);
    return status;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr pointer, size_t bytes)
{
    ENTER(cuMemUnmap, (pointer, bytes));
    (void)control;
    struct physical *object = vmm_begin(&vgpu_mappings, pointer);
    lock_take(&vmm_lock);
    uint32_t number = mapping_number;
    lock_drop(&vmm_lock);
    FLIGHT(charged_at(object));
    CUresult status = REAL(cuMemUnmap)(pointer, bytes);
    if (status == CUDA_SUCCESS) {
        lock_take(&vmm_lock);
        drop_mappings(pointer, bytes, number);
        lock_drop(&vmm_lock);
    }
    vmm_done(object);
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
    (void)control;
    lock_take(&vmm_lock);
    struct physical *object = mapped_at((uintptr_t)address);
    if (object)
        object->calls++;
    lock_drop(&vmm_lock);
    CUresult status = REAL(cuMemRetainAllocationHandle)(handle, address);
    if (status == CUDA_SUCCESS && object)
        status = vmm_remember(object, *handle, false);
    vmm_done(object);
    return status;
}

/* --- memory that is used by other objects than handles and mappings --------------------------------------- */

static void keep_handle(CUmemGenericAllocationHandle handle)
{
    struct block block;
    lock_take(&vmm_lock);
    if (block_get(&vgpu_handles, handle, &block))
        physical_of(block.owner)->kept = true;
    lock_drop(&vmm_lock);
}

/* Marks all memory mapped in the range as used by an object that is not tracked. The range may contain several
 * mappings. */
static void keep_range(uintptr_t start, size_t bytes)
{
    lock_take(&vmm_lock);
    for (uintptr_t at = start; at - start < bytes; at += 2 * MIB) {
        struct physical *physical = mapped_at(at);
        if (physical)
            physical->kept = true;
    }
    lock_drop(&vmm_lock);
}

#define BIND(symbol, parameters, arguments, keep) \
    EXPORT CUresult symbol parameters \
    { \
        ENTER(symbol, arguments); \
        (void)control; \
        CUresult status = REAL(symbol) arguments; \
        if (status == CUDA_SUCCESS) \
            keep; \
        return status; \
    }

BIND(cuMulticastBindMem,
     (CUmemGenericAllocationHandle object, size_t place, CUmemGenericAllocationHandle memory, size_t offset, size_t bytes,
      unsigned long long flags),
     (object, place, memory, offset, bytes, flags), keep_handle(memory))
BIND(cuMulticastBindMem_v2,
     (CUmemGenericAllocationHandle object, CUdevice device, size_t place, CUmemGenericAllocationHandle memory, size_t offset,
      size_t bytes, unsigned long long flags),
     (object, device, place, memory, offset, bytes, flags), keep_handle(memory))
BIND(cuLogicalEndpointBindMem,
     (unsigned int endpoint, CUdevice device, cuuint64_t place, CUmemGenericAllocationHandle memory, cuuint64_t offset,
      cuuint64_t bytes, unsigned long long flags),
     (endpoint, device, place, memory, offset, bytes, flags), keep_handle(memory))
BIND(cuMulticastBindAddr,
     (CUmemGenericAllocationHandle object, size_t place, CUdeviceptr pointer, size_t bytes, unsigned long long flags),
     (object, place, pointer, bytes, flags), keep_range(pointer, bytes))
BIND(cuMulticastBindAddr_v2,
     (CUmemGenericAllocationHandle object, CUdevice device, size_t place, CUdeviceptr pointer, size_t bytes,
      unsigned long long flags),
     (object, device, place, pointer, bytes, flags), keep_range(pointer, bytes))
BIND(cuLogicalEndpointBindAddr,
     (unsigned int endpoint, CUdevice device, cuuint64_t place, void *pointer, cuuint64_t bytes, unsigned long long flags),
     (endpoint, device, place, pointer, bytes, flags), keep_range((uintptr_t)pointer, bytes))

#define MAP_TILES(symbol) \
    EXPORT CUresult symbol(CUarrayMapInfo *tiles, unsigned int count, CUstream stream) \
    { \
        ENTER(symbol, (tiles, count, stream)); \
        (void)control; \
        CUresult status = REAL(symbol)(tiles, count, stream); \
        for (unsigned int i = 0; status == CUDA_SUCCESS && i < count; i++) \
            if (tiles[i].memOperationType == CU_MEM_OPERATION_TYPE_MAP) \
                keep_handle(tiles[i].memHandle.memHandle); \
        return status; \
    }

MAP_TILES(cuMemMapArrayAsync)
MAP_TILES(cuMemMapArrayAsync_ptsz)

void vmm_reset(void)
{
    atomic_store_explicit(&vmm_lock.word, 0, memory_order_relaxed);
    waiting = NULL; /* The waiting objects belong to the parent process, not to this child. */
}
