/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that other processes have open by cuIpcGetMemHandle. It is charged once, to the process that made it; but when
 * that process frees it, or dies, the card keeps it as long as anybody has it open. So it stays charged until then.
 *
 * Who has it open is known from the kernel: whoever opens a handle holds a lock on one byte of the ledger file that the
 * handle stands for, as long as its mapping of the file lives. A process that dies closes what it had open. What of a dead
 * process's memory is open is told by its slot (lent_mib), which nobody clears or takes while anything is open.
 */
#include "ledger.h"

#include <stdlib.h>
#include <string.h>

_Atomic bool vgpu_lent_any;
static struct lock lent_lock;

/* Freed here, open elsewhere. */
struct waiting {
    struct waiting *next;
    struct block loan; /* key: the pointer; owner: the byte, or 0: several handles, any byte counts */
};
static struct waiting *waiting;

static uint64_t byte_of(const CUipcMemHandle *handle)
{
    uint64_t hash = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < sizeof handle->reserved; i++)
        hash = (hash ^ (unsigned char)handle->reserved[i]) * 0x100000001b3ull;
    return VGPU_LEDGER_LENT_BASE + (hash ^ hash >> 32) % VGPU_LEDGER_LENT_SPAN;
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

EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr pointer)
{
    ENTER(cuIpcGetMemHandle, (handle, pointer));
    struct block block, loan;
    CUresult status = REAL(cuIpcGetMemHandle)(handle, pointer);
    CUdeviceptr start = status == CUDA_SUCCESS && control == CONTROL_ON ? start_of(pointer, &block) : 0;
    if (!start)
        return status;
    lock_take(&lent_lock);
    uint64_t byte = byte_of(handle);
    if (block_take(&vgpu_lent, start, &loan)) {
        if (loan.owner != byte)
            loan.owner = 0;
    } else {
        loan = (struct block){.key = start, .bytes = block.bytes, .owner = byte, .device = block.device, .kind = 1};
        ledger_lend(loan.device, loan.bytes, true);
        if (block_take(&vgpu_memory, start, &block)) {
            block.kind = BLOCK_LENT;
            block_put(&vgpu_memory, &block);
        }
    }
    block_put(&vgpu_lent, &loan);
    atomic_store_explicit(&vgpu_lent_any, true, memory_order_relaxed);
    lock_drop(&lent_lock);
    return status;
}

static void end_loan(const struct block *loan)
{
    ledger_uncharge(loan->device, ACCOUNT_USED, loan->bytes);
    ledger_lend(loan->device, loan->bytes, false);
}

void ipc_freed(const struct block *loan)
{
    lock_take(&lent_lock);
    struct waiting *one = ledger_lent_open(loan->owner) ? malloc(sizeof *one) : NULL;
    if (one) {
        *one = (struct waiting){waiting, *loan};
        waiting = one;
        atomic_store_explicit(&vgpu_pools_dirty, 1, memory_order_relaxed);
    } else {
        end_loan(loan);
    }
    lock_drop(&lent_lock);
}

void ipc_settle(void)
{
    if (!atomic_load_explicit(&vgpu_lent_any, memory_order_relaxed))
        return;
    if (!lock_try(&lent_lock)) { /* another time: nobody else would come back to it */
        atomic_store_explicit(&vgpu_pools_dirty, 1, memory_order_relaxed);
        return;
    }
    for (struct waiting **link = &waiting; *link;) {
        struct waiting *one = *link;
        if (ledger_lent_open(one->loan.owner)) {
            link = &one->next;
            continue;
        }
        *link = one->next;
        end_loan(&one->loan);
        free(one);
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
        void *loan = ledger_borrow(byte_of(&handle)); \
        CUcontext context; \
        CUresult status; \
        /* Without a context the driver refuses it, and says why. */ \
        if (!loan && device_current(&context, &status)) \
            return CUDA_ERROR_NOT_PERMITTED; \
        status = REAL(symbol)(pointer, handle, flags); \
        return opened(pointer, loan, status); \
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
}
