/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Contexts: where the library fails closed, and what they are charged.
 *
 * The first context of a container on a device is created while no other process of the container creates one there; its
 * measured size is kept in the ledger. Every later one is charged that size before it is created, by any number of
 * processes at once, and corrected to its own figure afterwards.
 */
#include "context.h"

#include "events.h"
#include "process.h"

#include <string.h>

static CUcontext primary[VGPU_MAX_DEVICES];

struct opening {
    const struct device *device;
    struct measure measure;
    uint64_t charged;
    int measuring; /* handle of the container-wide lock, -1: the size is known */
    bool counted;
};

/* Whether a context may be on the device. Asked when there is a slot: the node that withdraws the allocation writes that
 * first, then looks for slots. One of the two sees the other. */
static bool permitted(const struct device *device)
{
    bool known;
    if (limits_denied()) {
        limits_complain();
        return false;
    }
    device_limit(device, &known);
    if (!known)
        vgpu_log_line(LOG_ERROR, "no context is created: device %s is not in the limits file", device->uuid);
    return known;
}

static const struct device *admit(enum control control, CUdevice ordinal, CUresult *status)
{
    if (control == CONTROL_BROKEN || limits_denied()) {
        limits_complain();
        *status = CUDA_ERROR_NOT_PERMITTED;
        return NULL;
    }
    const struct device *device = device_of(ordinal, status);
    if (!device || permitted(device))
        return device;
    *status = CUDA_ERROR_NOT_PERMITTED;
    return NULL;
}

/* Device locked, here and in open_end. */
static CUresult open_begin(struct opening *opening, const struct device *device)
{
    *opening = (struct opening){.device = device, .measuring = -1, .counted = limits_count_context()};
    if (!opening->counted)
        return CUDA_SUCCESS;
    opening->charged = ledger_context_bytes(device->ledger);
    if (!opening->charged) {
        opening->measuring = ledger_measure_begin(device->ledger);
        opening->charged = ledger_context_bytes(device->ledger);
        if (opening->measuring < 0 && !opening->charged)
            return CUDA_ERROR_NOT_PERMITTED;
        if (opening->charged) {
            ledger_measure_end(opening->measuring, device->ledger);
            opening->measuring = -1;
        }
    }
    CUresult status = memory_charge(device, ACCOUNT_CONTEXT, opening->charged);
    if (status != CUDA_SUCCESS) {
        ledger_measure_end(opening->measuring, device->ledger);
        return status;
    }
    measure_begin(&opening->measure, device);
    return CUDA_SUCCESS;
}

/* What the new context costs, and whether that is better than what the ledger has. */
static uint64_t size_of(const struct opening *opening, CUcontext context, CUdevice ordinal, bool *learn)
{
    uint64_t bytes = 0, known = opening->charged;
    enum measured how = measure_end(&opening->measure, &bytes);
    if (how == MEASURED_OWN) {
        *learn = bytes != known;
        return bytes;
    }
    if (opening->measuring >= 0) {
        bytes = measure_by_second(context, ordinal, how == MEASURED_CARD ? bytes : 0);
        *learn = bytes > 0;
        return bytes;
    }
    /* Of the first context of each process the card's figure is looked at again: the one in the ledger may be too high. */
    *learn = false;
    if (how == MEASURED_CARD && bytes < known && ledger_own(opening->device->ledger, ACCOUNT_CONTEXT) == known) {
        bytes = measure_by_second(context, ordinal, bytes);
        *learn = bytes > 0 && bytes < known;
    }
    return *learn ? bytes : known;
}

static CUresult open_end(struct opening *opening, CUresult status, CUcontext context, CUdevice ordinal,
                         CUresult (*undo)(CUcontext context, CUdevice ordinal))
{
    const struct device *device = opening->device;
    uint64_t bytes = opening->charged;
    device_forget_contexts();
    if (status == CUDA_SUCCESS && opening->counted) {
        bool first = opening->measuring >= 0, learn;
        bytes = size_of(opening, context, ordinal, &learn);
        if (bytes > opening->charged) {
            CUresult more = memory_charge(device, ACCOUNT_CONTEXT, bytes - opening->charged);
            if (more == CUDA_SUCCESS) {
                opening->charged = bytes;
            } else {
                undo(context, ordinal);
                status = more;
            }
        }
        /* Not of a context that did not fit: the figure may be a neighbour's, and nobody would ever get to correct it. */
        if (learn && status == CUDA_SUCCESS)
            ledger_learn_context(device->ledger, bytes);
        if (first && !bytes)
            vgpu_log_line(LOG_ERROR, "the size of a context on %s cannot be measured: contexts are not charged", device->uuid);
    }
    if (status != CUDA_SUCCESS) {
        ledger_uncharge(device->ledger, ACCOUNT_CONTEXT, opening->charged);
    } else {
        ledger_uncharge(device->ledger, ACCOUNT_CONTEXT, opening->charged - bytes);
        memory_keep(&vgpu_contexts, (uintptr_t)context, bytes, device, 1, 0);
        unaccounted_begin(device);
        EVENT(context_changed); /* it is the current one now */
        vgpu_log(LOG_INFO, "a context on %s costs %llu bytes", device->uuid, (unsigned long long)bytes);
    }
    if (opening->measuring >= 0)
        ledger_measure_end(opening->measuring, device->ledger);
    return status;
}

/* --- a context that the driver frees; device locked ---------------------------------------------------- */

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
        const struct device *admitted = admit(control, device, &status); \
        if (!admitted) \
            return status; \
        context_lock(admitted->ledger); \
        status = open_begin(&opening, admitted); \
        if (status == CUDA_SUCCESS) { \
            status = REAL(symbol) arguments; \
            status = open_end(&opening, status, status ? NULL : *context, device, destroy); \
        } \
        context_unlock(admitted->ledger); \
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

/* Locks the context's device and answers it; -1: not a context that was charged. */
static int lock_of(CUcontext context)
{
    struct block block;
    if (!block_get(&vgpu_contexts, (uintptr_t)context, &block))
        return -1;
    context_lock(block.device);
    return block.device;
}

/* A context lives until it is detached as often as it was created and attached; its block counts that. */
static int count_users(CUcontext context, int step)
{
    struct block block;
    if (!block_take(&vgpu_contexts, (uintptr_t)context, &block))
        return -1;
    int users = block.kind + step;
    block.kind = users > 0 ? users : 1; /* kind 0 would be a free place */
    block_put(&vgpu_contexts, &block);
    return users;
}

/* `last`: the call frees the context whatever its users. */
static CUresult end_context(CUcontext context, CUresult (*end)(CUcontext context), bool last)
{
    struct block block;
    struct leaving leaving;
    int device = lock_of(context);
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
    context_unlock(device);
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
    int device = status == CUDA_SUCCESS ? lock_of(*context) : -1;
    if (device >= 0) {
        count_users(*context, 1);
        context_unlock(device);
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

/* What a context costs where NVML does not show this process, as open_begin and size_of have it. */
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

/*
 * Device locked. Charged as far as the limit has room, where NVML shows what this process holds: that is there already.
 * Else as a whole, or nothing is allocated in it.
 */
static CUresult adopt(const struct device *device, CUcontext context, CUdevice ordinal)
{
    uint64_t bytes = 0;
    if (!unaccounted_begin_now(device) && limits_count_context())
        bytes = cost_of(device, context, ordinal);
    CUresult status = memory_charge(device, ACCOUNT_CONTEXT, bytes);
    if (status != CUDA_SUCCESS)
        return status;
    memory_keep(&vgpu_contexts, (uintptr_t)context, bytes, device, 1, 0);
    if (!primary[device->ledger] && is_primary(context, ordinal))
        primary[device->ledger] = context;
    vgpu_log(LOG_INFO, "a context on %s was made by no replaced function", device->uuid);
    return CUDA_SUCCESS;
}

CUresult context_met(const struct device *device, CUcontext context, CUdevice ordinal, bool *known)
{
    struct block block;
    CUresult status = CUDA_SUCCESS;
    *known = block_get(&vgpu_contexts, (uintptr_t)context, &block);
    if (*known)
        return CUDA_SUCCESS;
    if (!permitted(device))
        return CUDA_ERROR_NOT_PERMITTED;
    /* The holder of the lock is making a context, or is this thread, called back by the driver: another time. */
    if (!context_try(device->ledger))
        return CUDA_SUCCESS;
    if (!block_get(&vgpu_contexts, (uintptr_t)context, &block))
        status = adopt(device, context, ordinal);
    *known = status == CUDA_SUCCESS;
    context_unlock(device->ledger);
    return status;
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
    const struct device *device = admit(control, ordinal, &status);
    if (!device)
        return primary_active(ordinal) ? REAL(cuDevicePrimaryCtxRetain)(context, ordinal) : status;
    /* Whether it is there, the driver's call and the charge are one step: another thread may be releasing it. */
    context_lock(device->ledger);
    if (primary_active(ordinal)) {
        status = REAL(cuDevicePrimaryCtxRetain)(context, ordinal);
        if (status == CUDA_SUCCESS && count_users(*context, 1) < 0 && (status = adopt(device, *context, ordinal)) != CUDA_SUCCESS)
            release_primary(*context, ordinal);
    } else if ((status = open_begin(&opening, device)) == CUDA_SUCCESS) {
        status = REAL(cuDevicePrimaryCtxRetain)(context, ordinal);
        status = open_end(&opening, status, status ? NULL : *context, ordinal, release_primary);
        if (status == CUDA_SUCCESS)
            primary[device->ledger] = *context;
    }
    context_unlock(device->ledger);
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
        leave_begin(&leaving, context); /* released more often than it was retained through us */
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
    context_lock(device->ledger);
    CUresult status = context_end_use(device->ledger, ordinal, end, &ordinal, reset);
    context_unlock(device->ledger);
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
