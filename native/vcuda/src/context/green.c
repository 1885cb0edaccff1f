/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Defines the hooks (replacements) of the functions for green contexts. A green context is a part of a device's SMs. It
 * is created on top of the device's primary context and keeps that context alive.
 *
 * Memory: the primary context is charged like any context. The additional memory of a green context is measured and
 * charged; if it cannot be measured, a whole context is charged. Memory allocated while a green context is current
 * belongs to its primary context and outlives the green context.
 *
 * Time: launches are throttled to the container's share of GPU time whichever SMs they use. That is safe, because a
 * part of the SMs never does more work than all of them.
 *
 * The driver lets a green context be current to only one thread at a time. So the library never makes a green context
 * current in its own threads or calls.
 */
#include "context.h"

#include "events.h"
#include "process.h"

/* Fields of a block in vgpu_greens: `key` is the CUgreenCtx, `owner` its CUcontext, `kind` the ordinal of its device +
 * 1, and `bytes` its charge. */

struct same {
    CUcontext context; /* The context whose block is searched. */
    struct block block;
    bool found;
};

static bool of_context(const struct block *block, void *data)
{
    struct same *same = data;
    if (block->owner == (uintptr_t)same->context) {
        same->block = *block;
        same->found = true;
    }
    return false;
}

static bool find(CUcontext context, struct block *block)
{
    struct same same = {.context = context};
    block_sweep(&vgpu_greens, of_context, &same);
    *block = same.block;
    return same.found;
}

CUcontext green_enters(CUcontext context)
{
    struct block block;
    if (!atomic_load_explicit(&vgpu_green_any, memory_order_relaxed) || !find(context, &block))
        return context;
    CUcontext primary = context_primary(block.device);
    return primary ? primary : context;
}

CUresult green_context_met(const struct device *device, CUcontext context, CUdevice ordinal, bool *known)
{
    struct block block;
    *known = atomic_load_explicit(&vgpu_green_any, memory_order_relaxed) && find(context, &block);
    return *known ? CUDA_SUCCESS : context_met(device, context, ordinal, known);
}

bool green_ordinal(CUstream stream, CUdevice *ordinal)
{
    CUgreenCtx green;
    struct block block;
    if (!atomic_load_explicit(&vgpu_green_any, memory_order_relaxed) || !REAL_HAS(cuStreamGetGreenCtx) ||
        REAL(cuStreamGetGreenCtx)(stream, &green) != CUDA_SUCCESS || !green ||
        !block_get(&vgpu_greens, (uintptr_t)green, &block))
        return false;
    *ordinal = block.kind - 1;
    return true;
}

/* --- what belongs to a green context that ends ------------------------------------------------------------- */

_Atomic bool vgpu_green_any;

static void leave(CUcontext green, CUcontext primary)
{
    struct leaving leaving = {.context = green, .heir = primary};
    EVENT(context_leaving, &leaving);
}

struct of_device {
    int device;
    struct block blocks[64];
    unsigned count, skip;
    bool take;
};

static bool collect(const struct block *block, void *data)
{
    struct of_device *found = data;
    if (block->device != found->device || found->count == sizeof found->blocks / sizeof *found->blocks)
        return false;
    if (found->skip) {
        found->skip--;
        return false;
    }
    found->blocks[found->count++] = *block;
    return found->take;
}

void green_context_leaving(struct leaving *leaving)
{
    struct of_device found = {.device = leaving->block.device};
    unsigned passed = 0;
    if (!leaving->primary)
        return;
    do { /* The caller has the device's lock, so no green context of the device is created or ends meanwhile. */
        found.count = 0;
        found.skip = passed;
        if (atomic_load_explicit(&vgpu_green_any, memory_order_relaxed))
            block_sweep(&vgpu_greens, collect, &found);
        for (unsigned i = 0; i < found.count; i++)
            leave((CUcontext)(uintptr_t)found.blocks[i].owner, leaving->context);
        passed += found.count;
    } while (found.count);
}

void green_context_left(struct leaving *leaving)
{
    struct of_device found = {.device = leaving->block.device, .take = true};
    if (!leaving->primary || !leaving->gone)
        return;
    do {
        found.count = 0;
        if (atomic_load_explicit(&vgpu_green_any, memory_order_relaxed))
            block_sweep(&vgpu_greens, collect, &found);
        for (unsigned i = 0; i < found.count; i++) {
            ledger_uncharge(found.device, ACCOUNT_CONTEXT, found.blocks[i].bytes);
        }
    } while (found.count);
}

/* --- creation and end ------------------------------------------------------------------------------------------ */

static CUresult destroy(CUgreenCtx green)
{
    return REAL_HAS(cuGreenCtxDestroy) ? REAL(cuGreenCtxDestroy)(green) : CUDA_ERROR_NOT_SUPPORTED;
}

/* Charges the measured additional memory of a green context, or the size of a whole context if it cannot be measured.
 * The green context exists already. If this function returns an error, the caller destroys it. */
static CUresult charge(const struct device *device, uint64_t before, bool locked, uint64_t *bytes)
{
    *bytes = 0;
    if (!limits_count_context())
        return CUDA_SUCCESS;
    enum looked looked = locked ? unaccounted_look_locked(device) : LOOKED_NOT;
    if (!locked)
        unaccounted_due(device->ledger);
    if (looked == LOOKED_AT && unaccounted_over(device->ledger) > before)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (looked != LOOKED_HIDDEN)
        return CUDA_SUCCESS;
    CUresult status = memory_charge(device, ACCOUNT_CONTEXT, ledger_context_bytes(device->ledger));
    if (status == CUDA_SUCCESS)
        *bytes = ledger_context_bytes(device->ledger);
    return status;
}

/* Creates a green context on an existing primary context. `locked` says whether the caller holds the device's lock. */
static CUresult make(const struct device *device, bool locked, CUgreenCtx *green, CUdevResourceDesc description,
                     CUdevice ordinal, unsigned flags)
{
    CUcontext context = NULL;
    uint64_t bytes, before = unaccounted_over(device->ledger);
    CUresult status = REAL(cuGreenCtxCreate)(green, description, ordinal, flags);
    if (status != CUDA_SUCCESS)
        return status;
    status = charge(device, before, locked, &bytes);
    if (status == CUDA_SUCCESS)
        status = REAL(cuCtxFromGreenCtx)(&context, *green);
    if (status != CUDA_SUCCESS) {
        ledger_uncharge(device->ledger, ACCOUNT_CONTEXT, bytes);
        destroy(*green);
        unaccounted_due(device->ledger);
        return status;
    }
    memory_keep(&vgpu_greens, (uintptr_t)*green, bytes, device, ordinal + 1, (uintptr_t)context);
    atomic_store_explicit(&vgpu_green_any, true, memory_order_release);
    device_forget_contexts();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGreenCtxCreate(CUgreenCtx *green, CUdevResourceDesc description, CUdevice ordinal, unsigned int flags)
{
    ENTER(cuGreenCtxCreate, (green, description, ordinal, flags));
    CUcontext primary;
    CUresult status;
    if (!REAL_HAS(cuCtxFromGreenCtx) || !REAL_HAS(cuGreenCtxDestroy))
        return memory_refuse("cuGreenCtxCreate");
    /* If the limits deny this process every context, refuse here: the driver would return a primary context that exists
     * already, and so the green context would be created. */
    if (control == CONTROL_BROKEN || limits_denied())
        return memory_broken();
    /* Retain the primary context twice: for this call, and for the life of the green context. The hook of the retaining
     * function charges the primary context like any context. */
    status = cuDevicePrimaryCtxRetain(&primary, ordinal);
    if (status != CUDA_SUCCESS)
        return status;
    const struct device *device = device_of(ordinal, &status);
    if (device && control == CONTROL_ON) {
        bool locked = context_lock(device->ledger);
        status = make(device, locked, green, description, ordinal, flags);
        if (status == CUDA_SUCCESS)
            context_used(primary);
        context_unlock(device->ledger, locked);
    } else if (status == CUDA_SUCCESS) {
        status = memory_broken();
    }
    if (REAL_HAS(cuDevicePrimaryCtxRelease_v2))
        cuDevicePrimaryCtxRelease_v2(ordinal);
    else
        cuDevicePrimaryCtxRelease(ordinal);
    return status;
}

static CUresult end(void *green)
{
    return REAL(cuGreenCtxDestroy)(green);
}

EXPORT CUresult cuGreenCtxDestroy(CUgreenCtx green)
{
    ENTER(cuGreenCtxDestroy, (green));
    (void)control;
    struct block block;
    if (!block_get(&vgpu_greens, (uintptr_t)green, &block))
        return REAL(cuGreenCtxDestroy)(green);
    bool locked = context_lock(block.device);
    /* If the green context is no longer in the table, another thread has reset the primary context meanwhile. */
    if (!block_get(&vgpu_greens, (uintptr_t)green, &block)) {
        context_unlock(block.device, locked);
        return REAL(cuGreenCtxDestroy)(green);
    }
    CUcontext context = (CUcontext)(uintptr_t)block.owner, primary = context_primary(block.device);
    /* Must precede the removal from the table: the limiter reads the timing events of this context in its primary
     * context, which it finds by the table. */
    leave(context, primary);
    block_take(&vgpu_greens, (uintptr_t)green, &block);
    CUresult status = context_end_use(block.device, block.kind - 1, end, green, false);
    if (status == CUDA_SUCCESS) {
        ledger_uncharge(block.device, ACCOUNT_CONTEXT, block.bytes);
        device_forget_contexts();
    } else {
        block_put(&vgpu_greens, &block);
    }
    context_unlock(block.device, locked);
    if (status == CUDA_SUCCESS)
        unaccounted_settle(block.device);
    return status;
}
