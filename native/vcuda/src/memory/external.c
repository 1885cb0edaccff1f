/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Defines the hooks (replacements) of cuImportExternalMemory, which imports memory of another interface such as Vulkan,
 * and of the functions for such imports. The file descriptors are of the same kind as those of cuMemCreate memory, so
 * exported CUDA memory can be imported too. Imported memory exists until the import is destroyed and every buffer
 * mapped from it is freed, in any order.
 *
 * A mark is a lock on the descriptor that shows which container exported the memory. Memory exported by this container
 * stays charged to the exporting process until the import ends (shareable.c). Memory of another container is refused.
 * Memory without a mark, such as Vulkan's, is charged to no process yet, so the importing process is charged.
 */
#include "memory.h"

#include "process.h"

#include <stdlib.h>

struct external {
    struct external *next;
    /* The program's handle; NULL after the import was destroyed. */
    CUexternalMemory memory;
    /* The device that is charged; NULL if the exporting process is charged. */
    const struct device *device;
    uint64_t bytes;
    /* Lock on a byte of the ledger (the file with the container's charges), by which the exporting process sees that
     * the memory is imported. */
    void *import;
    /* Number of buffers mapped from the import. */
    unsigned buffers;
    /* True if something that the library does not track uses the memory. Then the memory stays charged until this
     * process ends. */
    bool kept;
};

struct external_buffer {
    struct external_buffer *next;
    CUdeviceptr pointer;
    struct external *of;
};

_Atomic bool vgpu_external_any;
static struct lock external_lock;
static struct external *externals;
static struct external_buffer *buffers;

static void end(struct external *one)
{
    if (one->device)
        ledger_uncharge(one->device->ledger, ACCOUNT_USED, one->bytes);
    ledger_import_end(one->import);
    free(one);
}

/* Ends the import if the program has destroyed it and nothing uses its memory any more. The caller holds the lock. */
static void let_go(struct external *one)
{
    if (one->memory || one->buffers || one->kept)
        return;
    struct external **link = &externals;
    while (*link != one)
        link = &(*link)->next;
    *link = one->next;
    end(one);
}

static struct external *of(CUexternalMemory memory)
{
    struct external *one = externals;
    while (one && one->memory != memory)
        one = one->next;
    return one;
}

/* Charges the import. If the exporting process is charged, records the import in the ledger instead. This is done
 * before the driver's call, because the file descriptor belongs to the driver afterwards. */
static CUresult begin(struct external *one, struct allocation *allocation, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *description)
{
    int descriptor = description->type == CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD ? description->handle.fd : -1;
    uint64_t shared = 0;
    enum shareable_origin origin = descriptor >= 0 ? shareable_origin(descriptor, &shared) : SHAREABLE_UNKNOWN;
    if (origin == SHAREABLE_OURS) {
        one->import = ledger_import(shareable_import_byte(shared));
        return one->import ? CUDA_SUCCESS : CUDA_ERROR_NOT_PERMITTED;
    }
    if (shareable_marked(descriptor))
        return memory_refuse("an import of memory that another container made");
    one->device = allocation->device;
    one->bytes = description->size;
    return allocation_resize(allocation, one->bytes);
}

EXPORT CUresult cuImportExternalMemory(CUexternalMemory *memory, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *description)
{
    ENTER(cuImportExternalMemory, (memory, description));
    struct allocation allocation;
    if (!memory || !description)
        return REAL(cuImportExternalMemory)(memory, description);
    CUresult status = allocation_target(control, &allocation);
    if (status != CUDA_SUCCESS)
        return status;
    struct external *one = calloc(1, sizeof *one);
    status = one ? begin(one, &allocation, description) : CUDA_ERROR_OUT_OF_MEMORY;
    if (status == CUDA_SUCCESS)
        status = REAL(cuImportExternalMemory)(memory, description);
    if (status != CUDA_SUCCESS) {
        ledger_import_end(one ? one->import : NULL);
        free(one);
        return allocation_end(&allocation, status, NULL, 0);
    }
    lock_take(&external_lock);
    one->memory = *memory;
    one->next = externals;
    externals = one;
    atomic_store_explicit(&vgpu_external_any, true, memory_order_relaxed);
    lock_drop(&external_lock);
    return allocation_end(&allocation, status, NULL, 0);
}

EXPORT CUresult cuDestroyExternalMemory(CUexternalMemory memory)
{
    ENTER(cuDestroyExternalMemory, (memory));
    (void)control;
    lock_take(&external_lock);
    struct external *one = memory ? of(memory) : NULL;
    CUresult status = REAL(cuDestroyExternalMemory)(memory);
    if (status == CUDA_SUCCESS && one) {
        one->memory = NULL;
        let_go(one);
    }
    lock_drop(&external_lock);
    return status;
}

EXPORT CUresult cuExternalMemoryGetMappedBuffer(CUdeviceptr *pointer, CUexternalMemory memory,
                                                const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *description)
{
    ENTER(cuExternalMemoryGetMappedBuffer, (pointer, memory, description));
    (void)control;
    lock_take(&external_lock);
    struct external *one = memory ? of(memory) : NULL;
    struct external_buffer *buffer = one ? malloc(sizeof *buffer) : NULL;
    CUresult status = REAL(cuExternalMemoryGetMappedBuffer)(pointer, memory, description);
    if (status == CUDA_SUCCESS && buffer) {
        *buffer = (struct external_buffer){buffers, *pointer, one};
        buffers = buffer;
        one->buffers++;
    } else {
        if (status == CUDA_SUCCESS && one)
            /* There is no host memory for a record of the buffer, so the import stays charged as long as this process
             * lives. */
            one->kept = true;
        free(buffer);
    }
    lock_drop(&external_lock);
    return status;
}

EXPORT CUresult cuExternalMemoryGetMappedMipmappedArray(CUmipmappedArray *array, CUexternalMemory memory,
                                                        const CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC *description)
{
    ENTER(cuExternalMemoryGetMappedMipmappedArray, (array, memory, description));
    (void)control;
    lock_take(&external_lock);
    struct external *one = memory ? of(memory) : NULL;
    CUresult status = REAL(cuExternalMemoryGetMappedMipmappedArray)(array, memory, description);
    if (status == CUDA_SUCCESS && one)
        one->kept = true;
    lock_drop(&external_lock);
    return status;
}

/* Takes the buffer from the list. This must happen before the driver frees it, because afterwards another buffer may
 * get the same address. */
struct external_buffer *external_take(CUdeviceptr pointer)
{
    lock_take(&external_lock);
    struct external_buffer **link = &buffers;
    while (*link && (*link)->pointer != pointer)
        link = &(*link)->next;
    struct external_buffer *taken = *link;
    if (taken)
        *link = taken->next;
    lock_drop(&external_lock);
    return taken;
}

void external_settle(struct external_buffer *taken, bool freed)
{
    lock_take(&external_lock);
    if (freed) {
        taken->of->buffers--;
        let_go(taken->of);
        free(taken);
    } else {
        taken->next = buffers;
        buffers = taken;
    }
    lock_drop(&external_lock);
}

void external_reset(void)
{
    /* A forked child has none of its parent's device memory, and the mappings that hold the import locks are not
     * inherited. */
    atomic_store_explicit(&external_lock.word, 0, memory_order_relaxed);
    atomic_store(&vgpu_external_any, false);
    externals = NULL;
    buffers = NULL;
}
