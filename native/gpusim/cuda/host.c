/* SPDX-License-Identifier: Apache-2.0 */
/* Manages page-locked host memory, which the driver allocates or the program registers. It costs no device memory. */
#include "capture.h"
#include "hostile.h"

#include <stdlib.h>
#include <string.h>

#define PAGE 4096

struct range {
    uintptr_t base;
    size_t bytes;
    unsigned flags;
    CUcontext context;
    bool registered; /* True for memory of the program, which the driver does not free. */
};

static struct {
    pthread_mutex_t mutex;
    struct range *ranges; /* The list is sorted by address. */
    size_t count, room;
} host = {.mutex = PTHREAD_MUTEX_INITIALIZER};

/* Returns the index of the first range that ends above address. The caller must hold the mutex. */
static size_t position(uintptr_t address)
{
    size_t low = 0, high = host.count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (host.ranges[middle].base + host.ranges[middle].bytes <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

bool host_find(uintptr_t address, uintptr_t *base, size_t *bytes, unsigned *flags, CUcontext *context)
{
    pthread_mutex_lock(&host.mutex);
    size_t at = position(address);
    bool found = at < host.count && host.ranges[at].base <= address;
    if (found) {
        *base = host.ranges[at].base;
        *bytes = host.ranges[at].bytes;
        if (flags)
            *flags = host.ranges[at].flags;
        if (context)
            *context = host.ranges[at].context;
    }
    pthread_mutex_unlock(&host.mutex);
    return found;
}

static CUresult add(const struct range *range)
{
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&host.mutex);
    size_t at = position(range->base);
    if (at < host.count && host.ranges[at].base < range->base + range->bytes)
        result = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    if (result == CUDA_SUCCESS && host.count == host.room) {
        size_t room = host.room ? host.room * 2 : 64;
        struct range *more = realloc(host.ranges, room * sizeof *more);
        if (more) {
            host.ranges = more;
            host.room = room;
        } else {
            result = CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    if (result == CUDA_SUCCESS) {
        memmove(&host.ranges[at + 1], &host.ranges[at], (host.count - at) * sizeof *host.ranges);
        host.ranges[at] = *range;
        host.count++;
    }
    pthread_mutex_unlock(&host.mutex);
    return result;
}

static bool drop(uintptr_t base, bool registered)
{
    pthread_mutex_lock(&host.mutex);
    size_t at = position(base);
    bool found = at < host.count && host.ranges[at].base == base && host.ranges[at].registered == registered;
    if (found) {
        memmove(&host.ranges[at], &host.ranges[at + 1], (host.count - at - 1) * sizeof *host.ranges);
        host.count--;
    }
    pthread_mutex_unlock(&host.mutex);
    return found;
}

static CUresult allocate(void **out, size_t bytes, unsigned flags)
{
    ENTER_CONTEXT(context);
    REQUIRE(out && bytes && flags <= 7, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(capture_forbids_also() == CUDA_SUCCESS, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    void *memory = NULL;
    REQUIRE(bytes <= SIZE_MAX / 2 && posix_memalign(&memory, PAGE, bytes) == 0, CUDA_ERROR_OUT_OF_MEMORY);
    struct range range = {.base = (uintptr_t)memory, .bytes = bytes, .flags = flags, .context = context};
    CUresult result = add(&range);
    if (result == CUDA_SUCCESS)
        *out = memory;
    else
        free(memory);
    return result;
}

EXPORT CUresult cuMemHostAlloc(void **pointer, size_t bytes, unsigned flags)
{
    return allocate(pointer, bytes, flags);
}

EXPORT CUresult cuMemAllocHost_v2(void **pointer, size_t bytes)
{
    return allocate(pointer, bytes, 3); /* Flags 3 mean portable and mapped, as always with unified addresses. */
}

EXPORT CUresult cuMemAllocHost(void **pointer, unsigned bytes)
{
    return allocate(pointer, bytes, 3);
}

EXPORT CUresult cuMemFreeHost(void *pointer)
{
    ENTER_CONTEXT(context);
    REQUIRE(capture_forbids_also() == CUDA_SUCCESS, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CUresult result = free_wait(context);
    if (result != CUDA_SUCCESS)
        return result;
    REQUIRE(drop((uintptr_t)pointer, false), CUDA_ERROR_INVALID_VALUE);
    free(pointer);
    return CUDA_SUCCESS;
}

static CUresult enroll(void *pointer, size_t bytes, unsigned flags)
{
    ENTER_CONTEXT(context);
    REQUIRE(pointer && bytes && flags <= 15 && (uintptr_t)pointer + bytes > (uintptr_t)pointer,
            CUDA_ERROR_INVALID_VALUE);
    struct range range = {.base = (uintptr_t)pointer, .bytes = bytes, .flags = flags, .context = context,
                          .registered = true};
    return add(&range);
}

EXPORT CUresult cuMemHostRegister_v2(void *pointer, size_t bytes, unsigned flags)
{
    return enroll(pointer, bytes, flags);
}

EXPORT CUresult cuMemHostRegister(void *pointer, size_t bytes, unsigned flags)
{
    return enroll(pointer, bytes, flags);
}

EXPORT CUresult cuMemHostUnregister(void *pointer)
{
    ENTER_CONTEXT(context);
    (void)context;
    return drop((uintptr_t)pointer, true) ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device, void *pointer, unsigned flags)
{
    ENTER_CONTEXT(context);
    uintptr_t base;
    size_t bytes;
    (void)context;
    REQUIRE(device && flags == 0, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(host_find((uintptr_t)pointer, &base, &bytes, NULL, NULL), CUDA_ERROR_INVALID_VALUE);
    *device = (CUdeviceptr)(uintptr_t)pointer;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostGetDevicePointer(unsigned *device, void *pointer, unsigned flags)
{
    CUdeviceptr wide = 0;
    CUresult result = cuMemHostGetDevicePointer_v2(&wide, pointer, flags);
    if (result == CUDA_SUCCESS && wide > UINT32_MAX)
        return CUDA_ERROR_INVALID_VALUE; /* The address does not fit into the old 32-bit pointer type. */
    if (result == CUDA_SUCCESS && device)
        *device = (unsigned)wide;
    return result;
}

EXPORT CUresult cuMemHostGetFlags(unsigned *flags, void *pointer)
{
    ENTER_CONTEXT(context);
    uintptr_t base;
    size_t bytes;
    (void)context;
    REQUIRE(flags && host_find((uintptr_t)pointer, &base, &bytes, flags, NULL), CUDA_ERROR_INVALID_VALUE);
    return CUDA_SUCCESS;
}
