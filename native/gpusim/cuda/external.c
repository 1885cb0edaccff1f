/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Implements external memory. The imported object is a descriptor of physical memory that a process of this driver
 * exported. On hardware, too, descriptors of exported CUDA memory can be imported in this way. The import takes
 * ownership of the descriptor. A mapped buffer lives until it is freed, even if the external memory object is destroyed
 * earlier.
 */
#include "vmm.h"

#include <stdlib.h>
#include <unistd.h>

#define EXTERNAL_MAGIC 0x45585431u
#define OPAQUE_FD 1

struct CUextMemory_st {
    uint32_t magic;
    CUmemGenericAllocationHandle handle;
    size_t bytes;
    int device;
};

struct buffer {
    CUdeviceptr pointer;
    size_t bytes;
    struct buffer *next;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct buffer *buffers;

/* The driver's own calls of these functions must not be intercepted by a preloaded library, so the linker binds them to
 * the driver's definitions. */
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *os_handle, int type);
CUresult cuMemRelease(CUmemGenericAllocationHandle handle);
CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t bytes, size_t alignment, CUdeviceptr wanted,
                             unsigned long long flags);
CUresult cuMemAddressFree(CUdeviceptr pointer, size_t bytes);
CUresult cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags);
CUresult cuMemUnmap(CUdeviceptr pointer, size_t bytes);
CUresult cuMemSetAccess(CUdeviceptr pointer, size_t bytes, const CUmemAccessDesc *access, size_t count);

EXPORT CUresult cuImportExternalMemory(CUexternalMemory *out, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *desc)
{
    ENTER_CONTEXT(context);
    struct sim_shared shared;
    REQUIRE(out && desc && desc->size, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(desc->type == OPAQUE_FD, CUDA_ERROR_NOT_SUPPORTED);
    REQUIRE(sim_shared_find(desc->handle.fd, &shared) >= 0 && shared.fd >= 0 && desc->size <= shared.bytes,
            CUDA_ERROR_INVALID_VALUE);
    struct CUextMemory_st *memory = calloc(1, sizeof *memory);
    REQUIRE(memory, CUDA_ERROR_OUT_OF_MEMORY);
    *memory = (struct CUextMemory_st){.magic = EXTERNAL_MAGIC, .bytes = desc->size, .device = context->device};
    CUresult result = cuMemImportFromShareableHandle(&memory->handle, (void *)(intptr_t)desc->handle.fd, OPAQUE_FD);
    if (result != CUDA_SUCCESS) {
        free(memory);
        return result;
    }
    close(desc->handle.fd);
    *out = memory;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuExternalMemoryGetMappedBuffer(CUdeviceptr *pointer, CUexternalMemory memory,
                                                const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *desc)
{
    ENTER();
    REQUIRE(pointer && desc && memory && memory->magic == EXTERNAL_MAGIC, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(desc->size && desc->offset + desc->size <= memory->bytes && desc->offset + desc->size >= desc->size,
            CUDA_ERROR_INVALID_VALUE);
    const CUmemAccessDesc both = {.location = {1, memory->device}, .flags = 3};
    struct buffer *buffer = calloc(1, sizeof *buffer);
    REQUIRE(buffer, CUDA_ERROR_OUT_OF_MEMORY);
    buffer->bytes = desc->size;
    CUresult result = cuMemAddressReserve(&buffer->pointer, buffer->bytes, 0, 0, 0);
    bool reserved = result == CUDA_SUCCESS, mapped = false;
    if (reserved)
        result = cuMemMap(buffer->pointer, buffer->bytes, desc->offset, memory->handle, 0);
    if (result == CUDA_SUCCESS) {
        mapped = true;
        result = cuMemSetAccess(buffer->pointer, buffer->bytes, &both, 1);
    }
    if (result != CUDA_SUCCESS) {
        if (mapped)
            cuMemUnmap(buffer->pointer, buffer->bytes);
        if (reserved)
            cuMemAddressFree(buffer->pointer, buffer->bytes);
        free(buffer);
        return result;
    }
    *pointer = buffer->pointer;
    pthread_mutex_lock(&mutex);
    buffer->next = buffers;
    buffers = buffer;
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

bool external_free(CUdeviceptr pointer)
{
    pthread_mutex_lock(&mutex);
    struct buffer **link = &buffers;
    while (*link && (*link)->pointer != pointer)
        link = &(*link)->next;
    struct buffer *gone = *link;
    if (gone)
        *link = gone->next;
    pthread_mutex_unlock(&mutex);
    if (!gone)
        return false;
    cuMemUnmap(gone->pointer, gone->bytes);
    cuMemAddressFree(gone->pointer, gone->bytes);
    free(gone);
    return true;
}

EXPORT CUresult cuDestroyExternalMemory(CUexternalMemory memory)
{
    ENTER();
    REQUIRE(memory && memory->magic == EXTERNAL_MAGIC, CUDA_ERROR_INVALID_VALUE);
    CUresult result = cuMemRelease(memory->handle);
    memory->magic = 0;
    free(memory);
    return result;
}
