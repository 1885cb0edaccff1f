/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Handles memory that other processes open by an IPC handle (cuIpcGetMemHandle). The memory is charged once, to the
 * exporting process. The card keeps it while any process has it open, even after the exporting process has freed it or
 * died, so it stays charged for that time.
 *
 * Locks show which memory is open. The ledger is the file with the charges of the container's processes, and each
 * handle has a byte in it. A process that opens a handle has a lock on this byte as long as its mapping of the file
 * exists. A process that dies releases its locks. The slot (entry in the ledger) of a dead process records how much of
 * its memory is open (exported_mib), and no process clears or takes that slot while anything is open.
 *
 * A process of another container does not see locks on this ledger, and this container is not charged for what that
 * process exports. So an exporting process also locks a byte of another range, which shows that the handle was created
 * in this container. A handle without such a lock is refused.
 */
#include "memory.h"

#include "process.h"

#include <stdlib.h>
#include <string.h>

_Atomic bool vgpu_exported_any;
static struct lock ipc_lock;

/* A mark: the lock on a byte of the ledger that shows that a handle was created in this container. */
struct mark {
    struct mark *next;
    uint64_t byte;
    void *held;
};

struct exported {
    struct exported *next; /* The next block that this process has freed while another process has it open. */
    uint64_t bytes;
    int32_t device;
    /* Byte of the ledger that importing processes lock for the handle. 0 means that there are several handles, so a
     * lock on any import byte counts. */
    uint64_t byte;
    struct mark *marks;
};
static struct exported *waiting;
/* Holds, until the process ends, the marks of handles to memory that is in no table of this process. */
static struct exported nobodys;

static uint64_t hash_of(const CUipcMemHandle *handle)
{
    uint64_t hash = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < sizeof handle->reserved; i++)
        hash = (hash ^ (unsigned char)handle->reserved[i]) * 0x100000001b3ull;
    return hash;
}

static uint64_t byte_of(uint64_t hash)
{
    return VGPU_LEDGER_IMPORT_BASE + (hash ^ hash >> 32) % VGPU_LEDGER_IMPORT_SPAN;
}

static uint64_t made_byte_of(uint64_t hash)
{
    return VGPU_LEDGER_MADE_BASE + hash % VGPU_LEDGER_MADE_SPAN;
}

/* --- the exporting process -------------------------------------------------------------------------------- */

static CUdeviceptr start_of(CUdeviceptr pointer, struct block *block)
{
    size_t size;
    CUdeviceptr start = pointer;
    if (block_get(&vgpu_memory, start, block))
        return block->kind == BLOCK_POOL ? 0 : start;
    if (!REAL_HAS(cuMemGetAddressRange_v2) || REAL(cuMemGetAddressRange_v2)(&start, &size, pointer) != CUDA_SUCCESS)
        return 0;
    return block_get(&vgpu_memory, start, block) && block->kind != BLOCK_POOL ? start : 0;
}

static struct exported *exported_of(const struct block *entry)
{
    return (struct exported *)(uintptr_t)entry->owner;
}

/* Records that a block was exported. Needs the lock. Returns NULL if there is no host memory for the record. */
static struct exported *begin_export(CUdeviceptr start, const struct block *block)
{
    struct block whole;
    struct exported *exported = calloc(1, sizeof *exported);
    if (!exported)
        return NULL;
    *exported = (struct exported){.bytes = block->bytes, .device = block->device};
    ledger_export(exported->device, exported->bytes, true);
    if (block_take(&vgpu_memory, start, &whole)) {
        whole.kind = BLOCK_EXPORTED;
        block_put(&vgpu_memory, &whole);
    }
    block_put(&vgpu_exported, &(struct block){.key = start, .owner = (uintptr_t)exported, .kind = 1});
    atomic_store_explicit(&vgpu_exported_any, true, memory_order_relaxed);
    return exported;
}

static void add_mark(struct exported *exported, uint64_t byte)
{
    static _Atomic unsigned count;
    struct mark *one = exported->marks;
    while (one && one->byte != byte)
        one = one->next;
    if (one)
        return;
    void *held = (one = malloc(sizeof *one)) ? ledger_import(byte) : NULL;
    if (!held) {
        free(one);
        if (vgpu_log_again(&count))
            vgpu_log_line(LOG_ERROR,
                          "ledger %s cannot record an IPC handle of this process, so no process may open it; check whether this "
                          "process can open files (ulimit -n), then export the handle again",
                          limits_ledger_path(0));
        return;
    }
    *one = (struct mark){exported->marks, byte, held};
    exported->marks = one;
}

EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr pointer)
{
    ENTER(cuIpcGetMemHandle, (handle, pointer));
    struct block block, entry;
    CUresult status = REAL(cuIpcGetMemHandle)(handle, pointer);
    if (status != CUDA_SUCCESS || control != CONTROL_ON)
        return status;
    CUdeviceptr start = start_of(pointer, &block);
    lock_take(&ipc_lock);
    uint64_t hash = hash_of(handle), byte = byte_of(hash);
    struct exported *exported = &nobodys;
    if (start && block_get(&vgpu_exported, start, &entry)) {
        exported = exported_of(&entry);
        if (exported->byte != byte)
            exported->byte = 0;
    } else if (start && (exported = begin_export(start, &block))) {
        exported->byte = byte;
    }
    /* If the ledger cannot be opened, the handle gets no mark. The program still gets the handle, but no process of
     * this container can open it. */
    if (exported)
        add_mark(exported, made_byte_of(hash));
    lock_drop(&ipc_lock);
    return exported ? status : CUDA_ERROR_OUT_OF_MEMORY;
}

static void end_export(struct exported *exported)
{
    ledger_uncharge(exported->device, ACCOUNT_USED, exported->bytes);
    ledger_export(exported->device, exported->bytes, false);
    for (struct mark *one = exported->marks, *next; one; one = next) {
        next = one->next;
        ledger_import_end(one->held);
        free(one);
    }
    free(exported);
}

void ipc_freed(const struct block *entry)
{
    struct exported *exported = exported_of(entry);
    lock_take(&ipc_lock);
    if (ledger_import_open(exported->byte)) {
        exported->next = waiting;
        waiting = exported;
        atomic_store_explicit(&vgpu_pools_dirty, 1, memory_order_relaxed);
    } else {
        end_export(exported);
    }
    lock_drop(&ipc_lock);
}

void ipc_settle(bool trim)
{
    (void)trim;
    if (!atomic_load_explicit(&vgpu_exported_any, memory_order_relaxed))
        return;
    /* Another thread has the lock. Set the flag that pools have changed, so that a later call repeats this check. No
     * other event would cause that. */
    if (!lock_try(&ipc_lock)) {
        atomic_store_explicit(&vgpu_pools_dirty, 1, memory_order_relaxed);
        return;
    }
    for (struct exported **link = &waiting; *link;) {
        struct exported *one = *link;
        if (ledger_import_open(one->byte)) {
            link = &one->next;
            continue;
        }
        *link = one->next;
        end_export(one);
    }
    if (waiting) /* Some memory is still open in another process, so check again later. */
        atomic_store_explicit(&vgpu_pools_dirty, 1, memory_order_relaxed);
    lock_drop(&ipc_lock);
}

/* --- the importing process ----------------------------------------------------------------------------------- */

/* Defines the hook of a function that opens a handle. It locks the handle's byte before the driver's call, so that the
 * exporting process finds the lock whenever it frees the memory. */
#define OPEN(symbol) \
    EXPORT CUresult symbol(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned int flags) \
    { \
        ENTER(symbol, (pointer, handle, flags)); \
        if (control == CONTROL_BROKEN) \
            return memory_broken(); \
        uint64_t hash = hash_of(&handle); \
        void *import = ledger_import(byte_of(hash)); \
        CUcontext context; \
        CUresult status; \
        /* Without a context the driver refuses the call and returns its own error. */ \
        if (!import && device_current(&context, &status)) \
            return CUDA_ERROR_NOT_PERMITTED; \
        bool ours = import && ledger_made_here(made_byte_of(hash)); \
        status = REAL(symbol)(pointer, handle, flags); \
        return ours ? opened(pointer, import, status) : foreign(pointer, import, status); \
    }

/* Refuses a handle of another container. The driver was called before, so if the handle is not valid, the driver's
 * error is returned. */
static CUresult foreign(const CUdeviceptr *pointer, void *import, CUresult status)
{
    if (status == CUDA_SUCCESS) {
        REAL(cuIpcCloseMemHandle)(*pointer);
        status = memory_refuse("an import of memory that another container made");
    }
    ledger_import_end(import);
    return status;
}

static CUresult opened(const CUdeviceptr *pointer, void *import, CUresult status)
{
    struct block block;
    if (status != CUDA_SUCCESS) {
        ledger_import_end(import);
        return status;
    }
    lock_take(&ipc_lock);
    if (block_take(&vgpu_imported, *pointer, &block)) { /* The handle was opened a second time. One lock is enough. */
        ledger_import_end(import);
        block.kind++;
    } else {
        block = (struct block){.key = *pointer, .owner = (uintptr_t)import, .kind = 1};
    }
    block_put(&vgpu_imported, &block);
    lock_drop(&ipc_lock);
    return status;
}

OPEN(cuIpcOpenMemHandle)
OPEN(cuIpcOpenMemHandle_v2)

EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr pointer)
{
    ENTER(cuIpcCloseMemHandle, (pointer));
    (void)control;
    struct block block;
    lock_take(&ipc_lock);
    CUresult status = REAL(cuIpcCloseMemHandle)(pointer);
    if (status == CUDA_SUCCESS && block_take(&vgpu_imported, pointer, &block)) {
        if (--block.kind > 0)
            block_put(&vgpu_imported, &block);
        else
            ledger_import_end((void *)(uintptr_t)block.owner);
    }
    lock_drop(&ipc_lock);
    return status;
}

void ipc_reset(void)
{
    /* A forked child inherits no device memory and no mapping of the ledger. The locks stay with its parent's
     * mappings. */
    atomic_store_explicit(&ipc_lock.word, 0, memory_order_relaxed);
    atomic_store(&vgpu_exported_any, false);
    waiting = NULL;
    nobodys.marks = NULL;
}
