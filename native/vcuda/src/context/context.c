/* SPDX-License-Identifier: Apache-2.0 */
/* Charges contexts when they are created or first used, counts their users, and uncharges them when they end. A hook is
 * this library's replacement of a driver function. NVIDIA's runtime can create a context without calling a hook. Such a
 * context is charged when a hook first finds it as the current context. */
#include "context.h"

#include "events.h"
#include "process.h"

#include <string.h>

/* The primary context of each device; NULL if that context is not charged. Atomic, because calls that could not get the
 * device's lock write it without the lock. */
static CUcontext _Atomic primary[VGPU_MAX_DEVICES];

/* --- the end of a context; the device is locked -------------------------------------------------------- */

static void leave_begin(struct leaving *leaving, CUcontext context)
{
    *leaving = (struct leaving){.context = context};
    EVENT(context_leaving, leaving);
}

static void leave_end(struct leaving *leaving, bool gone)
{
    leaving->gone = gone;
    EVENT(context_left, leaving);
}

void context_leaving(struct leaving *leaving)
{
    leaving->ours = block_take(&vgpu_contexts, (uintptr_t)leaving->context, &leaving->block);
    leaving->primary = leaving->ours && leaving->context == primary[leaving->block.device];
}

void context_left(struct leaving *leaving)
{
    if (!leaving->ours)
        return;
    if (!leaving->gone) {
        block_put(&vgpu_contexts, &leaving->block);
        return;
    }
    EVENT(reclaim, false);
    ledger_uncharge(leaving->block.device, ACCOUNT_CONTEXT, leaving->block.bytes);
}

/* Lets the library measure how much memory the context's end freed. This happens after the lock is released, so that no
 * other thread waits meanwhile. */
static void unlock_left(int device, bool locked)
{
    context_unlock(device, locked);
    if (vgpu_counters[device].due)
        unaccounted_settle(device);
}

/* --- created contexts -------------------------------------------------------------------------------- */

static CUresult destroy(CUcontext context, CUdevice ordinal)
{
    (void)ordinal;
    return REAL_HAS(cuCtxDestroy_v2) ? REAL(cuCtxDestroy_v2)(context) : REAL(cuCtxDestroy)(context);
}

#define CREATE(symbol, parameters, arguments) \
    EXPORT CUresult symbol parameters \
    { \
        ENTER(symbol, arguments); \
        struct opening opening; \
        CUresult status; \
        const struct device *admitted = context_admit(control, device, &status); \
        if (!admitted) \
            return status; \
        status = opening_begin(&opening, admitted, context_lock(admitted->ledger)); \
        if (status == CUDA_SUCCESS) { \
            status = REAL(symbol) arguments; \
            status = opening_end(&opening, status, status ? NULL : *context, device, destroy); \
        } \
        context_unlock(admitted->ledger, opening.locked); \
        return status; \
    }

CREATE(cuCtxCreate, (CUcontext *context, unsigned int flags, CUdevice device), (context, flags, device))
CREATE(cuCtxCreate_v2, (CUcontext *context, unsigned int flags, CUdevice device), (context, flags, device))
CREATE(cuCtxCreate_v3,
       (CUcontext *context, CUexecAffinityParam *affinity, int count, unsigned int flags, CUdevice device),
       (context, affinity, count, flags, device))
CREATE(cuCtxCreate_v4, (CUcontext *context, CUctxCreateParams *parameters, unsigned int flags, CUdevice device),
       (context, parameters, flags, device))
CREATE(cuGLCtxCreate, (CUcontext *context, unsigned int flags, CUdevice device), (context, flags, device))
CREATE(cuGLCtxCreate_v2, (CUcontext *context, unsigned int flags, CUdevice device), (context, flags, device))
CREATE(cuVDPAUCtxCreate,
       (CUcontext *context, unsigned int flags, CUdevice device, unsigned int vdp_device, void *vdp_get_proc_address),
       (context, flags, device, vdp_device, vdp_get_proc_address))
CREATE(cuVDPAUCtxCreate_v2,
       (CUcontext *context, unsigned int flags, CUdevice device, unsigned int vdp_device, void *vdp_get_proc_address),
       (context, flags, device, vdp_device, vdp_get_proc_address))

/* Locks the device of a context and returns its index; -1: the context was never charged. */
static int lock_of(CUcontext context, bool *locked)
{
    struct block block;
    if (!block_get(&vgpu_contexts, (uintptr_t)context, &block))
        return -1;
    *locked = context_lock(block.device);
    return block.device;
}

/* Changes the number of users of a context by `step` and returns the new number; -1: the context was never charged. A
 * context lives until it was detached as often as it was created and attached. The number is stored as the field `kind`
 * of the context's block. */
static int count_users(CUcontext context, int step)
{
    struct block block;
    if (!block_take(&vgpu_contexts, (uintptr_t)context, &block))
        return -1;
    int users = block.kind + step;
    /* A kind of 0 would mark a free position in the table, so at least 1 is stored. */
    block.kind = users > 0 ? users : 1;
    block_put(&vgpu_contexts, &block);
    return users;
}

/* Ends one use of the context by calling `end`, which calls the driver. `last` is true if this call frees the context
 * even if it has other users. */
static CUresult end_context(CUcontext context, CUresult (*end)(CUcontext context), bool last)
{
    struct block block;
    struct leaving leaving;
    bool locked;
    int device = lock_of(context, &locked);
    if (device < 0)
        return end(context);
    if (!last)
        last = block_get(&vgpu_contexts, (uintptr_t)context, &block) && block.kind <= 1;
    if (last)
        leave_begin(&leaving, context);
    CUresult status = end(context);
    if (last)
        leave_end(&leaving, status == CUDA_SUCCESS);
    else if (status == CUDA_SUCCESS)
        count_users(context, -1);
    unlock_left(device, locked);
    return status;
}

EXPORT CUresult cuCtxDestroy_v2(CUcontext context)
{
    ENTER(cuCtxDestroy_v2, (context));
    return end_context(context, REAL(cuCtxDestroy_v2), true);
}

EXPORT CUresult cuCtxDestroy(CUcontext context)
{
    ENTER(cuCtxDestroy, (context));
    return end_context(context, REAL(cuCtxDestroy), true);
}

EXPORT CUresult cuCtxAttach(CUcontext *context, unsigned int flags)
{
    ENTER(cuCtxAttach, (context, flags));
    CUresult status = REAL(cuCtxAttach)(context, flags);
    bool locked;
    int device = status == CUDA_SUCCESS ? lock_of(*context, &locked) : -1;
    if (device >= 0) {
        count_users(*context, 1);
        context_unlock(device, locked);
    }
    return status;
}

EXPORT CUresult cuCtxDetach(CUcontext context)
{
    ENTER(cuCtxDetach, (context));
    return end_context(context, REAL(cuCtxDetach), false);
}

/* --- contexts that no hook saw ------------------------------------------------------------------------- */

static bool primary_active(CUdevice ordinal);
static CUresult release_primary(CUcontext context, CUdevice ordinal);

static bool is_primary(CUcontext context, CUdevice ordinal)
{
    CUcontext found = NULL;
    if (!primary_active(ordinal) || REAL(cuDevicePrimaryCtxRetain)(&found, ordinal) != CUDA_SUCCESS)
        return false;
    release_primary(found, ordinal);
    return found == context;
}

/* Returns the size of a context, for a process that NVML does not show: the size in the ledger (the file of the
 * container's charges). If the ledger has none yet, measures the size and stores it there. */
static uint64_t cost_of(const struct device *device, CUcontext context, CUdevice ordinal)
{
    uint64_t bytes = ledger_context_bytes(device->ledger);
    if (bytes)
        return bytes;
    int measuring = ledger_measure_begin(device->ledger);
    bytes = ledger_context_bytes(device->ledger);
    if (!bytes && measuring >= 0 && (bytes = measure_by_second(context, ordinal, 0)) > 0)
        ledger_learn_context(device->ledger, bytes);
    ledger_measure_end(measuring, device->ledger);
    return bytes;
}

/* Charges a context that no hook saw being created. It exists already, so it cannot be refused. It is charged like
 * other memory that the driver uses without a request of the program. The device is locked. */
static bool adopt(const struct device *device, CUcontext context, CUdevice ordinal)
{
    struct block block = {.key = (uintptr_t)context, .device = device->ledger, .kind = 1};
    unaccounted_begin(device);
    enum looked looked = unaccounted_look_locked(device);
    if (looked == LOOKED_NOT)
        return false; /* The figures could not be compared now. The next call for this context tries again. */
    if (looked == LOOKED_HIDDEN && limits_count_context()) {
        block.owner = cost_of(device, context, ordinal);
        unaccounted_unseen(device->ledger, block.owner, true);
        unaccounted_look_locked(device);
    }
    block_put(&vgpu_contexts, &block);
    if (!primary[device->ledger] && is_primary(context, ordinal))
        primary[device->ledger] = context;
    vgpu_log(LOG_INFO, "a context on %s was created without a call that the library replaces", device->uuid);
    return true;
}

CUresult context_met(const struct device *device, CUcontext context, CUdevice ordinal, bool *known)
{
    struct block block;
    uint64_t over = unaccounted_over(device->ledger);
    *known = block_get(&vgpu_contexts, (uintptr_t)context, &block);
    if (*known && over)
        /* The limit may now have room for the part that could not be charged before, so compare again. */
        over = unaccounted_look(device);
    if (!*known && !context_permitted(device))
        return CUDA_ERROR_NOT_PERMITTED;
    /* If the lock is not free, another thread is creating a context, or the driver has called back into this thread
     * during such a call. The next call tries again. */
    if (!*known && context_try(device->ledger)) {
        *known = block_get(&vgpu_contexts, (uintptr_t)context, &block) || adopt(device, context, ordinal);
        context_unlock(device->ledger, true);
        over = unaccounted_over(device->ledger);
    }
    *known = *known && !over;
    return over ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

/* --- the primary context ------------------------------------------------------------------------------- */

static bool primary_active(CUdevice ordinal)
{
    unsigned flags;
    int active = 0;
    return REAL_HAS(cuDevicePrimaryCtxGetState) &&
           REAL(cuDevicePrimaryCtxGetState)(ordinal, &flags, &active) == CUDA_SUCCESS && active;
}

static CUresult release_primary(CUcontext context, CUdevice ordinal)
{
    (void)context;
    return REAL_HAS(cuDevicePrimaryCtxRelease_v2) ? REAL(cuDevicePrimaryCtxRelease_v2)(ordinal)
                                                  : REAL(cuDevicePrimaryCtxRelease)(ordinal);
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice ordinal)
{
    ENTER(cuDevicePrimaryCtxRetain, (context, ordinal));
    struct opening opening;
    CUresult status;
    const struct device *device = context_admit(control, ordinal, &status);
    if (!device)
        return primary_active(ordinal) ? REAL(cuDevicePrimaryCtxRetain)(context, ordinal) : status;
    /* The check, the driver's call and the charge are one step under the lock, because another thread may be releasing
     * the primary context. */
    bool locked = context_lock(device->ledger);
    if (primary_active(ordinal)) {
        status = REAL(cuDevicePrimaryCtxRetain)(context, ordinal);
        if (status == CUDA_SUCCESS && count_users(*context, 1) < 0 && locked)
            adopt(device, *context, ordinal);
    } else if ((status = opening_begin(&opening, device, locked)) == CUDA_SUCCESS) {
        status = REAL(cuDevicePrimaryCtxRetain)(context, ordinal);
        status = opening_end(&opening, status, status ? NULL : *context, ordinal, release_primary);
        if (status == CUDA_SUCCESS)
            primary[device->ledger] = *context;
        if (status == CUDA_SUCCESS && opening.former_users)
            count_users(*context, opening.former_users);
    }
    context_unlock(device->ledger, locked);
    return status;
}

CUcontext context_primary(int device)
{
    return primary[device];
}

void context_used(CUcontext context)
{
    count_users(context, 1);
}

CUresult context_end_use(int device, CUdevice ordinal, CUresult (*end)(void *data), void *data, bool reset)
{
    struct leaving leaving = {.ours = false};
    struct block block;
    CUcontext context = primary[device];
    bool known = context && block_get(&vgpu_contexts, (uintptr_t)context, &block);
    if (known && (reset || block.kind <= 1))
        leave_begin(&leaving, context);
    CUresult status = end(data);
    bool gone = context && !primary_active(ordinal);
    if (leaving.ours) {
        leave_end(&leaving, gone);
    } else if (known && gone) {
        /* The program has released the primary context more often than it retained the context through hooks. */
        leave_begin(&leaving, context);
        leave_end(&leaving, true);
    } else if (known && status == CUDA_SUCCESS) {
        count_users(context, -1);
    }
    if (gone)
        primary[device] = NULL;
    return status;
}

static CUresult end_primary(enum control control, CUdevice ordinal, CUresult (*end)(void *ordinal), bool reset)
{
    CUresult unused;
    const struct device *device = control == CONTROL_ON ? device_of(ordinal, &unused) : NULL;
    if (!device)
        return end(&ordinal);
    bool locked = context_lock(device->ledger);
    CUresult status = context_end_use(device->ledger, ordinal, end, &ordinal, reset);
    unlock_left(device->ledger, locked);
    return status;
}

#define PRIMARY_END(symbol, reset) \
    static CUresult end_by_##symbol(void *ordinal) \
    { \
        return REAL(symbol)(*(const CUdevice *)ordinal); \
    } \
    EXPORT CUresult symbol(CUdevice ordinal) \
    { \
        ENTER(symbol, (ordinal)); \
        return end_primary(control, ordinal, end_by_##symbol, reset); \
    }

PRIMARY_END(cuDevicePrimaryCtxRelease, false)
PRIMARY_END(cuDevicePrimaryCtxRelease_v2, false)
PRIMARY_END(cuDevicePrimaryCtxReset, true)
PRIMARY_END(cuDevicePrimaryCtxReset_v2, true)

void context_reset(void)
{
    memset(primary, 0, sizeof primary);
}
