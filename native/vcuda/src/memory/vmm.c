/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Virtual memory management. Physical memory made by cuMemCreate lives until its last handle is released and its last
 * mapping is gone, in whatever order; only then is it uncharged. Memory that was bound to a multicast object or a sparse
 * array, which keep it as long as they please, stays charged until exit. It is charged to the device of its location, which
 * need not be the current one.
 *
 * Memory that was exported lives until its last shareable handle is closed and its last import is gone, in whatever
 * process. Its maker stays charged until then, once for the container: handles are marked (shareable.c), and who imports one
 * holds a byte of the ledger that stands for it, as with IPC handles (ipc.c). If the maker dies, its slot keeps what it had
 * exported as long as any of both is left. A handle from elsewhere than this container is refused; only where the container has
 * made handles that show no mark, and this may be one of them, its memory is charged to the importer too, once it is mapped.
 */
#include "memory.h"

#include "process.h"

#include <stdlib.h>

struct physical {
    struct physical *next;       /* of those that wait */
    const struct device *device; /* NULL: imported, charged to its maker */
    uint64_t bytes;              /* that this process is charged */
    uint64_t shared;             /* the object that its shareable handles stand for; 0: there are none */
    void *import;                  /* of an import: the byte of the ledger that says so */
    unsigned handles, mappings;
    bool kept; /* by something that nobody counts, see above: charged as long as this process lives */
    bool exported; /* its slot says that others may have it */
};

static struct lock vmm_lock;
static struct physical *waiting; /* let go here, open elsewhere */

static struct physical *physical_of(uint64_t owner)
{
    return (struct physical *)(uintptr_t)owner;
}

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
    }
    ledger_import_end(object->import);
    free(object);
}

static void let_go(struct physical *object)
{
    if (object->handles || object->mappings || object->kept)
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
    if (!lock_try(&vmm_lock)) { /* another time: nobody else would come back to it */
        atomic_store_explicit(&vgpu_pools_dirty, 1, memory_order_relaxed);
        return;
    }
    for (struct physical **link = &waiting; *link;) {
        struct physical *object = *link;
        if (open_elsewhere(object)) {
            link = &object->next;
            continue;
        }
        *link = object->next;
        end(object);
    }
    if (waiting) /* to be looked at again */
        atomic_store_explicit(&vgpu_pools_dirty, 1, memory_order_relaxed);
    lock_drop(&vmm_lock);
}

/* Where the object behind a handle or mapping is charged; -1: nowhere. */
static int charged_at(struct block_map *map, uint64_t key)
{
    struct block block;
    lock_take(&vmm_lock);
    const struct physical *object = block_get(map, key, &block) ? physical_of(block.owner) : NULL;
    int device = object && object->device ? object->device->ledger : -1;
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
    memory_put(&vgpu_handles, &block, object->bytes);
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                            unsigned long long flags)
{
    ENTER(cuMemCreate, (handle, bytes, properties, flags));
    CUresult status;
    if (control == CONTROL_BROKEN)
        return memory_broken();
    CUdevice ordinal;
    if (!properties || !place_on_card(&properties->location, &ordinal)) {
        status = properties ? place_of_host(&properties->location, "cuMemCreate") : CUDA_SUCCESS;
        return status == CUDA_SUCCESS ? REAL(cuMemCreate)(handle, bytes, properties, flags) : status;
    }
    const struct device *device = device_of(ordinal, &status);
    if (!device)
        return status;
    if (limits_denied()) /* the one allocation that needs no context */
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
    (void)control;
    struct block block;
    lock_take(&vmm_lock);
    struct physical *object = block_get(&vgpu_handles, handle, &block) ? physical_of(block.owner) : NULL;
    /* Before the handle is there: a maker that is killed in between has exported it. */
    bool first = object && object->device && !object->exported;
    if (first)
        ledger_export(object->device->ledger, object->bytes, true);
    CUresult status = REAL(cuMemExportToShareableHandle)(shareable, handle, type, flags);
    if (status == CUDA_SUCCESS && object) {
        object->exported = object->device != NULL;
        if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
            object->kept = true;
            shareable_unmarked();
        } else if (!shareable_mark(*(const int *)shareable, &object->shared)) {
            object->kept = true;
        }
    } else if (first) {
        ledger_export(object->device->ledger, object->bytes, false);
    }
    lock_drop(&vmm_lock);
    return status;
}

/* --- imports ------------------------------------------------------------------------------------------------- */

/* The device that memory is on which came by a handle; NULL: the driver does not say. */
static const struct device *place_of(CUmemGenericAllocationHandle handle)
{
    CUmemAllocationProp properties;
    CUdevice ordinal;
    CUresult status;
    if (!REAL_HAS(cuMemGetAllocationPropertiesFromHandle) ||
        REAL(cuMemGetAllocationPropertiesFromHandle)(&properties, handle) != CUDA_SUCCESS ||
        !place_on_card(&properties.location, &ordinal))
        return NULL;
    return device_of(ordinal, &status);
}

/* The driver is asked all the same: what is no handle at all is its own to refuse. */
static CUresult refuse_import(CUmemGenericAllocationHandle *handle, void *shareable, int type)
{
    CUresult status = REAL(cuMemImportFromShareableHandle)(handle, shareable, type);
    if (status != CUDA_SUCCESS)
        return status;
    if (REAL_HAS(cuMemRelease))
        REAL(cuMemRelease)(*handle);
    return memory_refuse("an import of memory that another container made");
}

EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable, int type)
{
    ENTER(cuMemImportFromShareableHandle, (handle, shareable, type));
    uint64_t shared = 0;
    struct block block;
    if (control == CONTROL_BROKEN)
        return memory_broken();
    if (!ledger_join())
        return CUDA_ERROR_NOT_PERMITTED;
    bool descriptor = type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    enum shareable_origin origin = shareable_origin(descriptor ? (int)(intptr_t)shareable : -1, &shared);
    if (origin == SHAREABLE_FOREIGN)
        return refuse_import(handle, shareable, type);
    struct physical *object = calloc(1, sizeof *object);
    void *import = ledger_import(shareable_import_byte(shared));
    if (!object || !import) {
        ledger_import_end(import);
        free(object);
        return object ? CUDA_ERROR_NOT_PERMITTED : CUDA_ERROR_OUT_OF_MEMORY;
    }
    *object = (struct physical){.shared = shared, .import = import};
    lock_take(&vmm_lock);
    CUresult status = REAL(cuMemImportFromShareableHandle)(handle, shareable, type);
    if (status == CUDA_SUCCESS && block_get(&vgpu_handles, *handle, &block)) {
        add_handle(physical_of(block.owner), *handle); /* the same value again */
        end(object);
    } else if (status == CUDA_SUCCESS) {
        if (origin == SHAREABLE_UNKNOWN)
            object->device = place_of(*handle);
        add_handle(object, *handle);
    } else {
        end(object);
    }
    lock_drop(&vmm_lock);
    return status;
}

/* What an import of unknown origin is charged before it is mapped up to `end`; NULL: nothing. */
static const struct device *import_grows(CUmemGenericAllocationHandle handle, uint64_t end, uint64_t *more)
{
    struct block block;
    lock_take(&vmm_lock);
    const struct physical *object = block_get(&vgpu_handles, handle, &block) ? physical_of(block.owner) : NULL;
    const struct device *device = object && object->import && end > object->bytes ? object->device : NULL;
    *more = device ? end - object->bytes : 0;
    lock_drop(&vmm_lock);
    return device;
}

EXPORT CUresult cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags)
{
    ENTER(cuMemMap, (pointer, bytes, offset, handle, flags));
    (void)control;
    struct block block;
    uint64_t more;
    const struct device *grows = import_grows(handle, offset + bytes, &more);
    CUresult status = grows ? memory_charge(grows, ACCOUNT_USED, more) : CUDA_SUCCESS;
    if (status != CUDA_SUCCESS)
        return status;
    lock_take(&vmm_lock);
    status = REAL(cuMemMap)(pointer, bytes, offset, handle, flags);
    struct physical *object = block_get(&vgpu_handles, handle, &block) ? physical_of(block.owner) : NULL;
    if (grows && object && status == CUDA_SUCCESS)
        object->bytes += more;
    else if (grows)
        ledger_uncharge(grows->ledger, ACCOUNT_USED, more);
    if (status == CUDA_SUCCESS) {
        struct block mapping = {.key = pointer, .bytes = bytes, .owner = (uintptr_t)object, .kind = 1};
        if (object)
            object->mappings++;
        memory_put(&vgpu_mappings, &mapping, bytes);
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

/* Several mappings may lie behind one another. */
static void keep_range(uintptr_t start, size_t bytes)
{
    for (uintptr_t at = start; at - start < bytes; at += 2 * MIB) {
        struct physical *physical = mapped_at(at);
        if (physical)
            physical->kept = true;
    }
}

#define BIND(symbol, parameters, arguments, keep) \
    EXPORT CUresult symbol parameters \
    { \
        ENTER(symbol, arguments); \
        (void)control; \
        lock_take(&vmm_lock); \
        CUresult status = REAL(symbol) arguments; \
        if (status == CUDA_SUCCESS) \
            keep; \
        lock_drop(&vmm_lock); \
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
    waiting = NULL; /* the parent's */
}
