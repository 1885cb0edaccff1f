/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that other processes have open by cuIpcGetMemHandle. It is charged once, to the process that made it; but when
 * that process frees it, or dies, the card keeps it as long as anybody has it open. So it stays charged until then.
 *
 * Who has it open is known from the kernel: whoever opens a handle holds a lock on one byte of the ledger file that the
 * handle stands for, as long as its mapping of the file lives. A process that dies closes what it had open. What of a dead
 * process's memory is open is told by its slot (lent_mib), which nobody clears or takes while anything is open.
 *
 * A maker in another container knows nothing of locks on our ledger, and we are not charged for what it frees. So a maker
 * holds a byte too, of another range, that says that a handle was made in this container; one without it is refused.
 */
#include "memory.h"

#include "process.h"

#include <stdlib.h>
#include <string.h>

_Atomic bool vgpu_lent_any;
static struct lock lent_lock;

/* What says that a handle was made here. */
struct mark {
    struct mark *next;
    uint64_t byte;
    void *held;
};

struct loan {
    struct loan *next; /* freed here, open elsewhere */
    uint64_t bytes;
    int32_t device;
    uint64_t byte; /* that stands for the handle; 0: there are several, any byte counts */
    struct mark *marks;
};
static struct loan *waiting;
static struct loan nobodys; /* of memory that is in no table of ours: for as long as this process lives */

static uint64_t hash_of(const CUipcMemHandle *handle)
{
    uint64_t hash = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < sizeof handle->reserved; i++)
        hash = (hash ^ (unsigned char)handle->reserved[i]) * 0x100000001b3ull;
    return hash;
}

static uint64_t byte_of(uint64_t hash)
{
    return VGPU_LEDGER_LENT_BASE + (hash ^ hash >> 32) % VGPU_LEDGER_LENT_SPAN;
}

static uint64_t made_byte_of(uint64_t hash)
{
    return VGPU_LEDGER_MADE_BASE + hash % VGPU_LEDGER_MADE_SPAN;
}

/* --- the process that made the memory --------------------------------------------------------------------- */

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

static struct loan *loan_of(const struct block *entry)
{
    return (struct loan *)(uintptr_t)entry->owner;
}

/* Lock held. NULL: no memory for it. */
static struct loan *begin_loan(CUdeviceptr start, const struct block *block)
{
    struct block whole;
    struct loan *loan = calloc(1, sizeof *loan);
    if (!loan)
        return NULL;
    *loan = (struct loan){.bytes = block->bytes, .device = block->device};
    ledger_lend(loan->device, loan->bytes, true);
    if (block_take(&vgpu_memory, start, &whole)) {
        whole.kind = BLOCK_LENT;
        block_put(&vgpu_memory, &whole);
    }
    block_put(&vgpu_lent, &(struct block){.key = start, .owner = (uintptr_t)loan, .kind = 1});
    atomic_store_explicit(&vgpu_lent_any, true, memory_order_relaxed);
    return loan;
}

static void add_mark(struct loan *loan, uint64_t byte)
{
    static _Atomic unsigned count;
    struct mark *one = loan->marks;
    while (one && one->byte != byte)
        one = one->next;
    if (one)
        return;
    void *held = (one = malloc(sizeof *one)) ? ledger_borrow(byte) : NULL;
    if (!held) {
        free(one);
        if (vgpu_log_again(&count))
            vgpu_log_line(LOG_ERROR,
                          "ledger %s cannot say that an IPC handle was made here, so no process may open it; see whether this "
                          "process can still open files (ulimit -n), and ask for the handle again",
                          limits_ledger_path());
        return;
    }
    *one = (struct mark){loan->marks, byte, held};
    loan->marks = one;
}

EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr pointer)
{
    ENTER(cuIpcGetMemHandle, (handle, pointer));
    struct block block, entry;
    CUresult status = REAL(cuIpcGetMemHandle)(handle, pointer);
    if (status != CUDA_SUCCESS || control != CONTROL_ON)
        return status;
    CUdeviceptr start = start_of(pointer, &block);
    lock_take(&lent_lock);
    uint64_t hash = hash_of(handle), byte = byte_of(hash);
    struct loan *loan = &nobodys;
    if (start && block_get(&vgpu_lent, start, &entry)) {
        loan = loan_of(&entry);
        if (loan->byte != byte)
            loan->byte = 0;
    } else if (start && (loan = begin_loan(start, &block))) {
        loan->byte = byte;
    }
    if (loan) /* one without a mark, for want of a ledger, is the program's all the same; nobody can open it here */
        add_mark(loan, made_byte_of(hash));
    lock_drop(&lent_lock);
    return loan ? status : CUDA_ERROR_OUT_OF_MEMORY;
}

static void end_loan(struct loan *loan)
{
    ledger_uncharge(loan->device, ACCOUNT_USED, loan->bytes);
    ledger_lend(loan->device, loan->bytes, false);
    for (struct mark *one = loan->marks, *next; one; one = next) {
        next = one->next;
        ledger_return(one->held);
        free(one);
    }
    free(loan);
}

void ipc_freed(const struct block *entry)
{
    struct loan *loan = loan_of(entry);
    lock_take(&lent_lock);
    if (ledger_lent_open(loan->byte)) {
        loan->next = waiting;
        waiting = loan;
        atomic_store_explicit(&vgpu_pools_dirty, 1, memory_order_relaxed);
    } else {
        end_loan(loan);
    }
    lock_drop(&lent_lock);
}

void ipc_settle(bool trim)
{
    (void)trim;
    if (!atomic_load_explicit(&vgpu_lent_any, memory_order_relaxed))
        return;
    if (!lock_try(&lent_lock)) { /* another time: nobody else would come back to it */
        atomic_store_explicit(&vgpu_pools_dirty, 1, memory_order_relaxed);
        return;
    }
    for (struct loan **link = &waiting; *link;) {
        struct loan *one = *link;
        if (ledger_lent_open(one->byte)) {
            link = &one->next;
            continue;
        }
        *link = one->next;
        end_loan(one);
    }
    if (waiting) /* to be looked at again */
        atomic_store_explicit(&vgpu_pools_dirty, 1, memory_order_relaxed);
    lock_drop(&lent_lock);
}

/* --- the process that opens it ------------------------------------------------------------------------------- */

/* The lock is there before the driver's call: the maker finds it whenever it frees. */
#define OPEN(symbol) \
    EXPORT CUresult symbol(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned int flags) \
    { \
        ENTER(symbol, (pointer, handle, flags)); \
        if (control == CONTROL_BROKEN) \
            return memory_broken(); \
        uint64_t hash = hash_of(&handle); \
        void *loan = ledger_borrow(byte_of(hash)); \
        CUcontext context; \
        CUresult status; \
        /* Without a context the driver refuses it, and says why. */ \
        if (!loan && device_current(&context, &status)) \
            return CUDA_ERROR_NOT_PERMITTED; \
        bool ours = loan && ledger_made_here(made_byte_of(hash)); \
        status = REAL(symbol)(pointer, handle, flags); \
        return ours ? opened(pointer, loan, status) : foreign(pointer, loan, status); \
    }

/* The driver is asked all the same: what is no handle at all is its own to refuse. */
static CUresult foreign(const CUdeviceptr *pointer, void *loan, CUresult status)
{
    if (status == CUDA_SUCCESS) {
        REAL(cuIpcCloseMemHandle)(*pointer);
        status = memory_refuse("an import of memory that another container made");
    }
    ledger_return(loan);
    return status;
}

static CUresult opened(const CUdeviceptr *pointer, void *loan, CUresult status)
{
    struct block block;
    if (status != CUDA_SUCCESS) {
        ledger_return(loan);
        return status;
    }
    lock_take(&lent_lock);
    if (block_take(&vgpu_borrowed, *pointer, &block)) { /* opened again: the first lock is enough */
        ledger_return(loan);
        block.kind++;
    } else {
        block = (struct block){.key = *pointer, .owner = (uintptr_t)loan, .kind = 1};
    }
    block_put(&vgpu_borrowed, &block);
    lock_drop(&lent_lock);
    return status;
}

OPEN(cuIpcOpenMemHandle)
OPEN(cuIpcOpenMemHandle_v2)

EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr pointer)
{
    ENTER(cuIpcCloseMemHandle, (pointer));
    (void)control;
    struct block block;
    lock_take(&lent_lock);
    CUresult status = REAL(cuIpcCloseMemHandle)(pointer);
    if (status == CUDA_SUCCESS && block_take(&vgpu_borrowed, pointer, &block)) {
        if (--block.kind > 0)
            block_put(&vgpu_borrowed, &block);
        else
            ledger_return((void *)(uintptr_t)block.owner);
    }
    lock_drop(&lent_lock);
    return status;
}

void ipc_reset(void)
{
    /* A child has no mapping of what its parent opened, and none of its parent's memory. */
    atomic_store_explicit(&lent_lock.word, 0, memory_order_relaxed);
    atomic_store(&vgpu_lent_any, false);
    waiting = NULL;
    nobodys.marks = NULL;
}
