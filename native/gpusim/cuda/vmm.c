/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Implements virtual memory management: physical handles, reserved addresses, mappings. Physical memory lives as long
 * as a handle or a mapping refers to it, and is charged to the creating process and device.
 */
#include "vmm.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct mapping {
    CUdeviceptr base;
    size_t bytes, offset;
    struct physical *physical; /* NULL for memory of another process. */
    int device, access;
    struct mapping *next; /* The list is sorted by address. */
};

struct reservation {
    CUdeviceptr base;
    size_t bytes;
    struct reservation *next;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct mapping *mappings;
static struct reservation *reservations;

static bool aligned(uint64_t value)
{
    return value % VMM_GRANULARITY == 0;
}

static bool physical_valid(const struct physical *physical)
{
    return physical && physical->magic == PHYSICAL_MAGIC && physical->handles > 0;
}

/* Frees physical memory without handles and mappings. The caller must hold the mutex. */
static void drop(struct physical *physical)
{
    if (physical->handles || physical->mapped)
        return;
    if (physical->imported) {
        close(physical->fd);
        sim_shared_drop(physical->hold);
    /* Free the memory here unless other processes keep it. */
    } else if (!physical->shared || !sim_shared_release(physical->shared - 1)) {
        struct block block;
        arena_touch(driver.devices[physical->device].arena, physical->base);
        arena_free(driver.devices[physical->device].arena, physical->base, 1u << BLOCK_BACKING, &block);
        if (!physical->host)
            sim_uncharge(driver.devices[physical->device].gpu, SIM_MEMORY, physical->bytes);
    }
    physical->magic = 0;
    free(physical);
}

CUresult vmm_import(int device, int fd, const struct sim_shared *shared, void *hold, CUmemGenericAllocationHandle *out)
{
    struct physical *physical = calloc(1, sizeof *physical);
    REQUIRE(physical, CUDA_ERROR_OUT_OF_MEMORY);
    *physical = (struct physical){.magic = PHYSICAL_MAGIC, .device = device, .bytes = shared->bytes, .handles = 1,
                                  .fd = fd, .offset = shared->offset, .imported = true, .hold = hold,
                                  .prop = {.type = 1, .handle_types = 1, .location = {1, device}}};
    *out = (uintptr_t)physical;
    return CUDA_SUCCESS;
}

/* Returns the device of the location, -1 for host memory, -2 for an unknown location. A NUMA node may be a GPU's
 * memory. */
static int place(const CUmemLocation *location)
{
    if (location->type == 1)
        return device_valid(location->id) ? location->id : -2;
    for (int device = 0; location->type == 3 && device < driver.count; device++)
        if (location->id > 0 && sim_state()->gpus[driver.devices[device].gpu].numa_node == (uint64_t)location->id)
            return device;
    return location->type == 2 || location->type == 4 || (location->type == 3 && location->id == 0) ? -1 : -2;
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop,
                            unsigned long long flags)
{
    ENTER();
    struct block block;
    REQUIRE(handle && prop && bytes && aligned(bytes) && flags == 0, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(prop->type == 1 && prop->location.type >= 1 && prop->location.type <= 4, CUDA_ERROR_INVALID_VALUE);
    int device = place(&prop->location);
    bool host = device == -1;
    REQUIRE(device != -2, CUDA_ERROR_INVALID_DEVICE);
    REQUIRE(!host || (sim_state()->cuda_version >= 12020 && !prop->handle_types), CUDA_ERROR_INVALID_VALUE);
    device = host ? 0 : device; /* Host memory uses addresses of device 0. */
    int gpu = driver.devices[device].gpu;
    struct arena *arena = device_arena(device);
    struct physical *physical = calloc(1, sizeof *physical);
    REQUIRE(arena && physical, CUDA_ERROR_OUT_OF_MEMORY);
    enum sim_status status = host ? SIM_OK : sim_charge(gpu, SIM_MEMORY, bytes);
    if (status == SIM_ERR_MEMORY && pools_trim(device, true))
        status = sim_charge(gpu, SIM_MEMORY, bytes);
    if (status != SIM_OK) {
        free(physical);
        return status_to_result(status);
    }
    if (!arena_alloc(arena, bytes, BLOCK_BACKING, physical, &block)) {
        if (!host)
            sim_uncharge(gpu, SIM_MEMORY, bytes);
        free(physical);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *physical = (struct physical){.magic = PHYSICAL_MAGIC, .device = device, .bytes = bytes, .handles = 1, .host = host,
                                  .base = block.base, .fd = arena_fd(arena), .offset = arena_offset(arena, block.base),
                                  .prop = *prop};
    *handle = (uintptr_t)physical;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    ENTER();
    struct physical *physical = (struct physical *)(uintptr_t)handle;
    if (multicast_release(handle))
        return CUDA_SUCCESS;
    pthread_mutex_lock(&mutex);
    bool good = physical_valid(physical);
    if (good) {
        physical->handles--;
        drop(physical);
    }
    pthread_mutex_unlock(&mutex);
    return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t bytes, size_t alignment, CUdeviceptr wanted,
                                    unsigned long long flags)
{
    ENTER();
    REQUIRE(pointer && bytes && aligned(bytes) && flags == 0, CUDA_ERROR_INVALID_VALUE);
    REQUIRE((alignment & (alignment - 1)) == 0 && bytes < (size_t)1 << 46, CUDA_ERROR_INVALID_VALUE);
    if (alignment < VMM_GRANULARITY)
        alignment = VMM_GRANULARITY;
    size_t span = bytes + alignment;
    struct reservation *reservation = calloc(1, sizeof *reservation);
    void *at = mmap((void *)(uintptr_t)wanted, span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!reservation || at == MAP_FAILED) {
        free(reservation);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    uintptr_t start = ((uintptr_t)at + alignment - 1) / alignment * alignment, end = (uintptr_t)at + span;
    if (start > (uintptr_t)at)
        munmap(at, start - (uintptr_t)at);
    if (end > start + bytes)
        munmap((void *)(start + bytes), end - start - bytes);
    *reservation = (struct reservation){.base = start, .bytes = bytes};
    pthread_mutex_lock(&mutex);
    reservation->next = reservations;
    reservations = reservation;
    pthread_mutex_unlock(&mutex);
    *pointer = start;
    return CUDA_SUCCESS;
}

/* Returns the first mapping that ends above address. The caller must hold the mutex. */
static struct mapping **first_behind(CUdeviceptr address)
{
    struct mapping **link = &mappings;
    while (*link && (*link)->base + (*link)->bytes <= address)
        link = &(*link)->next;
    return link;
}

static bool touched(CUdeviceptr base, size_t bytes)
{
    struct mapping *mapping = *first_behind(base);
    return mapping && mapping->base < base + bytes;
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr pointer, size_t bytes)
{
    ENTER();
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&mutex);
    struct reservation **link = &reservations;
    while (*link && ((*link)->base != pointer || (*link)->bytes != bytes))
        link = &(*link)->next;
    if (*link && !touched(pointer, bytes)) {
        struct reservation *gone = *link;
        *link = gone->next;
        free(gone);
        munmap((void *)(uintptr_t)pointer, bytes);
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

static bool reserved(CUdeviceptr pointer, size_t bytes)
{
    for (const struct reservation *r = reservations; r; r = r->next)
        if (pointer >= r->base && pointer + bytes <= r->base + r->bytes)
            return true;
    return false;
}

static CUresult map(CUdeviceptr pointer, size_t bytes, size_t offset, struct physical *physical)
{
    REQUIRE(physical_valid(physical) && reserved(pointer, bytes) && !touched(pointer, bytes),
            CUDA_ERROR_INVALID_VALUE);
    REQUIRE(offset + bytes <= physical->bytes && offset + bytes >= bytes, CUDA_ERROR_INVALID_VALUE);
    struct mapping *mapping = calloc(1, sizeof *mapping);
    REQUIRE(mapping, CUDA_ERROR_OUT_OF_MEMORY);
    if (mmap((void *)(uintptr_t)pointer, bytes, PROT_NONE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, physical->fd,
             (off_t)(physical->offset + offset)) == MAP_FAILED) {
        free(mapping);
        return CUDA_ERROR_MAP_FAILED;
    }
    *mapping = (struct mapping){.base = pointer, .bytes = bytes, .offset = offset, .physical = physical,
                                .device = physical->device};
    struct mapping **link = first_behind(pointer);
    mapping->next = *link;
    *link = mapping;
    physical->mapped++;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags)
{
    ENTER();
    REQUIRE(bytes && aligned(bytes) && aligned(pointer) && aligned(offset) && flags == 0, CUDA_ERROR_INVALID_VALUE);
    pthread_mutex_lock(&mutex);
    CUresult result = map(pointer, bytes, offset, (struct physical *)(uintptr_t)handle);
    pthread_mutex_unlock(&mutex);
    return result;
}

/* True if whole mappings cover exactly [pointer, pointer + bytes). The caller must hold the mutex. */
static bool exactly(CUdeviceptr pointer, size_t bytes, bool partly)
{
    const struct mapping *mapping = *first_behind(pointer);
    CUdeviceptr at = pointer;
    if (!mapping || (partly ? mapping->base > pointer : mapping->base != pointer))
        return false;
    for (; mapping && at < pointer + bytes; mapping = mapping->next) {
        if (mapping->base > at || !mapping->physical)
            return false;
        at = mapping->base + mapping->bytes;
    }
    return partly ? at >= pointer + bytes : at == pointer + bytes;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr pointer, size_t bytes)
{
    ENTER();
    CUcontext current = context_current();
    if (current && context_check(current) == CUDA_SUCCESS)
        context_wait(current);
    pthread_mutex_lock(&mutex);
    bool good = bytes && exactly(pointer, bytes, false);
    struct mapping **link = first_behind(pointer);
    while (good && *link && (*link)->base < pointer + bytes) {
        struct mapping *gone = *link;
        *link = gone->next;
        gone->physical->mapped--;
        drop(gone->physical);
        free(gone);
    }
    if (good)
        mmap((void *)(uintptr_t)pointer, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
             0);
    pthread_mutex_unlock(&mutex);
    return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr pointer, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
    ENTER();
    REQUIRE(access && count && bytes, CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; i < count; i++) {
        REQUIRE(access[i].location.type == 1 && device_valid(access[i].location.id), CUDA_ERROR_INVALID_DEVICE);
        REQUIRE(access[i].flags == 0 || access[i].flags == 1 || access[i].flags == 3, CUDA_ERROR_INVALID_VALUE);
    }
    int flags = access[count - 1].flags;
    pthread_mutex_lock(&mutex);
    bool good = exactly(pointer, bytes, true);
    for (struct mapping *m = *first_behind(pointer); good && m && m->base < pointer + bytes; m = m->next)
        m->access = flags;
    /* The bytes stay writable for the driver's copies; copies check the device's access rights themselves. */
    good = good && mprotect((void *)(uintptr_t)pointer, bytes, flags ? PROT_READ | PROT_WRITE : PROT_NONE) == 0;
    pthread_mutex_unlock(&mutex);
    return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr pointer)
{
    ENTER();
    REQUIRE(flags && location && location->type == 1 && device_valid(location->id), CUDA_ERROR_INVALID_VALUE);
    pthread_mutex_lock(&mutex);
    const struct mapping *mapping = *first_behind(pointer);
    bool found = mapping && mapping->base <= pointer;
    if (found)
        *flags = (unsigned long long)mapping->access;
    pthread_mutex_unlock(&mutex);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop, int option)
{
    ENTER();
    REQUIRE(granularity && prop && (option == 0 || option == 1), CUDA_ERROR_INVALID_VALUE);
    REQUIRE(place(&prop->location) != -2, CUDA_ERROR_INVALID_DEVICE);
    *granularity = VMM_GRANULARITY;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle)
{
    ENTER();
    const struct physical *physical = (const struct physical *)(uintptr_t)handle;
    REQUIRE(prop && physical_valid(physical), CUDA_ERROR_INVALID_VALUE);
    *prop = physical->prop;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address)
{
    ENTER();
    REQUIRE(handle, CUDA_ERROR_INVALID_VALUE);
    pthread_mutex_lock(&mutex);
    struct mapping *mapping = *first_behind((uintptr_t)address);
    bool found = mapping && mapping->base <= (uintptr_t)address && mapping->physical;
    if (found) {
        mapping->physical->handles++;
        *handle = (uintptr_t)mapping->physical;
    }
    pthread_mutex_unlock(&mutex);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- functions for other files
 * ---------------------------------------------------------------------------------------------- */

bool vmm_find(CUdeviceptr pointer, CUdeviceptr *base, size_t *bytes, int *device)
{
    bool found = false;
    pthread_mutex_lock(&mutex);
    for (const struct mapping *m = mappings; m && m->base <= pointer; m = m->next) {
        if (!m->access)
            continue;
        if (found && *base + *bytes == m->base) {
            *bytes += m->bytes;
        } else {
            *base = m->base;
            *bytes = m->bytes;
        }
        *device = m->device;
        found = true;
    }
    found = found && pointer - *base < *bytes;
    /* Add the following mappings without a gap. */
    for (const struct mapping *m = found ? *first_behind(*base + *bytes) : NULL;
         m && m->access && m->base == *base + *bytes; m = m->next)
        *bytes += m->bytes;
    pthread_mutex_unlock(&mutex);
    return found;
}

struct physical *vmm_take(CUmemGenericAllocationHandle handle)
{
    struct physical *physical = (struct physical *)(uintptr_t)handle;
    pthread_mutex_lock(&mutex);
    if (physical_valid(physical))
        physical->mapped++;
    else
        physical = NULL;
    pthread_mutex_unlock(&mutex);
    return physical;
}

struct physical *vmm_take_at(CUdeviceptr pointer)
{
    pthread_mutex_lock(&mutex);
    const struct mapping *mapping = *first_behind(pointer);
    struct physical *physical = mapping && mapping->base <= pointer ? mapping->physical : NULL;
    if (physical)
        physical->mapped++;
    pthread_mutex_unlock(&mutex);
    return physical;
}

void vmm_let_go(struct physical *physical)
{
    pthread_mutex_lock(&mutex);
    physical->mapped--;
    drop(physical);
    pthread_mutex_unlock(&mutex);
}

CUresult vmm_adopt(CUdeviceptr base, size_t bytes, int device)
{
    struct mapping *mapping = calloc(1, sizeof *mapping);
    REQUIRE(mapping, CUDA_ERROR_OUT_OF_MEMORY);
    *mapping = (struct mapping){.base = base, .bytes = bytes, .device = device, .access = 3};
    pthread_mutex_lock(&mutex);
    struct mapping **link = first_behind(base);
    mapping->next = *link;
    *link = mapping;
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

bool vmm_disown(CUdeviceptr base)
{
    pthread_mutex_lock(&mutex);
    struct mapping **link = first_behind(base), *gone = *link;
    bool found = gone && gone->base == base && !gone->physical;
    if (found) {
        *link = gone->next;
        free(gone);
    }
    pthread_mutex_unlock(&mutex);
    return found;
}
