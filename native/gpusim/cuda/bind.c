/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stores the bindings of physical memory to tiles of sparse arrays and to multicast objects. A binding keeps the memory
 * alive, as handles and mappings do. Copies through bound memory are not simulated; only the place of each binding is
 * stored.
 */
#include "vmm.h"

#include <stdlib.h>

#define MULTICAST_MAGIC 0x4d434153u

struct binding {
    /* Array or multicast object to which the memory is bound. */
    const void *to;
    /* Position of the binding in that object. A position has at most one binding. */
    uint64_t place;
    struct physical *physical;
    struct binding *next;
};

struct multicast {
    uint32_t magic;
    unsigned devices, added;
    size_t bytes;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct binding *bindings;

static bool unbind(const void *to, uint64_t from, uint64_t bytes)
{
    bool found = false;
    pthread_mutex_lock(&mutex);
    for (struct binding **link = &bindings; *link;) {
        struct binding *binding = *link;
        if (binding->to == to && binding->place >= from && binding->place - from < bytes) {
            *link = binding->next;
            vmm_let_go(binding->physical);
            free(binding);
            found = true;
        } else {
            link = &binding->next;
        }
    }
    pthread_mutex_unlock(&mutex);
    return found;
}

static CUresult bind(const void *to, uint64_t place, struct physical *physical)
{
    REQUIRE(physical, CUDA_ERROR_INVALID_VALUE);
    struct binding *binding = calloc(1, sizeof *binding);
    if (!binding) {
        vmm_let_go(physical);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    unbind(to, place, 1); /* A new binding replaces an older one at the same position. */
    pthread_mutex_lock(&mutex);
    *binding = (struct binding){.to = to, .place = place, .physical = physical, .next = bindings};
    bindings = binding;
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

void bindings_end(const void *to)
{
    unbind(to, 0, UINT64_MAX);
}

/* ---- sparse arrays ---------------------------------------------------------------------------------------------------- */

/* The layout of CUDA's CUarrayMapInfo. Level, layer and offset identify a tile. */
struct map_info {
    int resource_type;
    void *resource;
    int subresource_type;
    union {
        struct {
            unsigned level, layer, x, y, z, width, height, depth;
        } level;
        struct {
            unsigned layer;
            unsigned long long offset, size;
        } tail;
    } at;
    int operation, handle_type; /* The operation is 1 to map and 2 to unmap. */
    CUmemGenericAllocationHandle handle;
    unsigned long long offset;
    unsigned devices, flags, reserved[2];
};
_Static_assert(sizeof(struct map_info) == 96, "CUarrayMapInfo");

static CUresult map_tiles(const struct map_info *list, unsigned count, CUstream handle)
{
    ENTER_CONTEXT(context);
    CUstream stream;
    REQUIRE(list && count, CUDA_ERROR_INVALID_VALUE);
    CUresult result = stream_resolve(context, handle, &stream);
    for (unsigned i = 0; i < count && result == CUDA_SUCCESS; i++) {
        const struct map_info *one = &list[i];
        uint64_t place = one->subresource_type == 0 ? (uint64_t)one->at.level.z << 48 ^ (uint64_t)one->at.level.y << 24 ^ one->at.level.x
                                                    : one->at.tail.offset;
        REQUIRE(one->resource_type == 0 && array_sparse(one->resource), CUDA_ERROR_INVALID_VALUE);
        REQUIRE((one->operation == 1 || one->operation == 2) && one->flags == 0, CUDA_ERROR_INVALID_VALUE);
        if (one->operation == 1)
            result = bind(one->resource, place, vmm_take(one->handle));
        else
            unbind(one->resource, place, 1);
    }
    return result;
}

EXPORT CUresult cuMemMapArrayAsync(struct map_info *list, unsigned count, CUstream stream)
{
    return map_tiles(list, count, LEGACY_STREAM(stream));
}

EXPORT CUresult cuMemMapArrayAsync_ptsz(struct map_info *list, unsigned count, CUstream stream)
{
    return map_tiles(list, count, PER_THREAD_STREAM(stream));
}

/* ---- multicast: GPUs of compute capability 9 and newer ------------------------------------------------------------------ */

struct multicast_prop {
    unsigned devices;
    size_t bytes;
    unsigned long long handle_types, flags;
};

static bool capable(CUdevice device)
{
    return device_valid(device) && sim_state()->gpus[driver.devices[device].gpu].cc_major >= 9;
}

static struct multicast *multicast_of(CUmemGenericAllocationHandle handle)
{
    struct multicast *object = (struct multicast *)(uintptr_t)handle;
    return object && object->magic == MULTICAST_MAGIC ? object : NULL;
}

EXPORT CUresult cuMulticastCreate(CUmemGenericAllocationHandle *handle, const struct multicast_prop *prop)
{
    ENTER();
    REQUIRE(capable(0), CUDA_ERROR_NOT_SUPPORTED);
    REQUIRE(handle && prop && prop->devices && (int)prop->devices <= driver.count && prop->flags == 0, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(prop->bytes && prop->bytes % VMM_GRANULARITY == 0, CUDA_ERROR_INVALID_VALUE);
    struct multicast *object = calloc(1, sizeof *object);
    REQUIRE(object, CUDA_ERROR_OUT_OF_MEMORY);
    *object = (struct multicast){.magic = MULTICAST_MAGIC, .devices = prop->devices, .bytes = prop->bytes};
    *handle = (uintptr_t)object;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMulticastAddDevice(CUmemGenericAllocationHandle handle, CUdevice device)
{
    ENTER();
    struct multicast *object = multicast_of(handle);
    REQUIRE(object && capable(device) && object->added < object->devices, CUDA_ERROR_INVALID_VALUE);
    object->added++;
    return CUDA_SUCCESS;
}

static CUresult bind_object(CUmemGenericAllocationHandle handle, size_t place, size_t bytes, unsigned long long flags,
                            struct physical *physical)
{
    struct multicast *object = multicast_of(handle);
    if (!object || object->added < object->devices || flags || !bytes || place > object->bytes || bytes > object->bytes - place ||
        bytes % VMM_GRANULARITY || place % VMM_GRANULARITY) {
        if (physical)
            vmm_let_go(physical);
        return CUDA_ERROR_INVALID_VALUE;
    }
    return bind(object, place, physical);
}

EXPORT CUresult cuMulticastBindMem(CUmemGenericAllocationHandle handle, size_t place, CUmemGenericAllocationHandle memory,
                                   size_t offset, size_t bytes, unsigned long long flags)
{
    ENTER();
    (void)offset;
    return bind_object(handle, place, bytes, flags, vmm_take(memory));
}

EXPORT CUresult cuMulticastBindAddr(CUmemGenericAllocationHandle handle, size_t place, CUdeviceptr pointer, size_t bytes,
                                    unsigned long long flags)
{
    ENTER();
    return bind_object(handle, place, bytes, flags, vmm_take_at(pointer));
}

EXPORT CUresult cuMulticastUnbind(CUmemGenericAllocationHandle handle, CUdevice device, size_t place, size_t bytes)
{
    ENTER();
    REQUIRE(multicast_of(handle) && capable(device), CUDA_ERROR_INVALID_VALUE);
    return unbind(multicast_of(handle), place, bytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMulticastGetGranularity(size_t *granularity, const struct multicast_prop *prop, int option)
{
    ENTER();
    REQUIRE(granularity && prop && (option == 0 || option == 1), CUDA_ERROR_INVALID_VALUE);
    *granularity = VMM_GRANULARITY;
    return CUDA_SUCCESS;
}

bool multicast_release(CUmemGenericAllocationHandle handle)
{
    struct multicast *object = multicast_of(handle);
    if (!object)
        return false;
    bindings_end(object);
    object->magic = 0;
    free(object);
    return true;
}
