/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The steps of creating a context: the library checks that the context is allowed, charges it before the driver's call,
 * and measures its real size afterwards. The ledger is the file in which the container's charges are recorded.
 *
 * While the first context of a container on a device is created, no other process of the container creates a context on
 * that device. The measured size is stored in the ledger. Every later context is charged that size before its creation,
 * and the charge is corrected to its own measured size afterwards. Any number of processes may create later contexts at
 * once. A thread that did not get the device's lock cannot measure. Its context is charged the stored size. If there is
 * none yet, the context is charged at its first use, like a context that no hook (replacement of a driver function)
 * saw.
 */
#include "context.h"

#include "events.h"

/* Returns whether the device may have a context. Must be called after this process has claimed its slot (its entry) in
 * the ledger, because a node that withdraws the allocation first writes the flag `deny` to the limits file and then
 * looks for slots. So either this process sees `deny`, or the node sees the slot. */
bool context_permitted(const struct device *device)
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

const struct device *context_admit(enum control control, CUdevice ordinal, CUresult *status)
{
    if (control == CONTROL_BROKEN || limits_denied()) {
        limits_complain();
        *status = CUDA_ERROR_NOT_PERMITTED;
        return NULL;
    }
    const struct device *device = device_of(ordinal, status);
    if (!device || context_permitted(device))
        return device;
    *status = CUDA_ERROR_NOT_PERMITTED;
    return NULL;
}

/* The caller of opening_begin and opening_end holds the device's lock if `locked` is true. */
CUresult opening_begin(struct opening *opening, const struct device *device, bool locked)
{
    *opening = (struct opening){.device = device, .measuring = -1, .counted = limits_count_context(), .locked = locked};
    if (!opening->counted)
        return CUDA_SUCCESS;
    opening->charged = ledger_context_bytes(device->ledger);
    if (!opening->charged && locked) {
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
    if (locked)
        measure_begin(&opening->measure, device);
    return CUDA_SUCCESS;
}

/* Stores the charge of a context. Two threads may have created the same context at once, because one of them waited for
 * the lock in vain. Then there is only one context, so the earlier charge is removed. */
static void keep(struct opening *opening, CUcontext context, uint64_t bytes)
{
    int device = opening->device->ledger;
    struct block block = {.key = (uintptr_t)context, .bytes = bytes, .device = device, .kind = 1}, former = {.kind = 0};
    if (!block_swap(&vgpu_contexts, &block, &former))
        memory_lost(bytes);
    if (!former.kind)
        return;
    opening->former_users = former.kind;
    ledger_uncharge(device, ACCOUNT_CONTEXT, former.bytes);
    unaccounted_unseen(device, former.owner, false);
}

/* Returns the bytes that the new context costs. *learn is true if this size should be stored in the ledger. */
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
    /* The size in the ledger may be too high. So if the card's figure for the first context of a process is lower, the
     * context is measured again, and a lower size is stored. */
    *learn = false;
    if (how == MEASURED_CARD && bytes < known && ledger_own(opening->device->ledger, ACCOUNT_CONTEXT) == known) {
        bytes = measure_by_second(context, ordinal, bytes);
        *learn = bytes > 0 && bytes < known;
    }
    return *learn ? bytes : known;
}

CUresult opening_end(struct opening *opening, CUresult status, CUcontext context, CUdevice ordinal,
                     CUresult (*undo)(CUcontext context, CUdevice ordinal))
{
    const struct device *device = opening->device;
    uint64_t bytes = opening->charged;
    device_forget_contexts();
    if (status == CUDA_SUCCESS && opening->counted && opening->locked) {
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
        /* Do not store the size of a context that exceeded the limit: it may include another container's bytes, and no
         * later context could correct it. */
        if (learn && status == CUDA_SUCCESS)
            ledger_learn_context(device->ledger, bytes);
        if (first && !bytes)
            vgpu_log_line(LOG_ERROR, "the size of a context on %s cannot be measured: contexts are not charged", device->uuid);
    }
    if (status != CUDA_SUCCESS) {
        ledger_uncharge(device->ledger, ACCOUNT_CONTEXT, opening->charged);
    } else {
        ledger_uncharge(device->ledger, ACCOUNT_CONTEXT, opening->charged - bytes);
        unaccounted_begin(device);
        if (bytes || opening->locked)
            keep(opening, context, bytes);
        if (!opening->locked)
            unaccounted_due(device->ledger);
        EVENT(context_changed); /* The new context is now the current context. */
        vgpu_log(LOG_INFO, "a context on %s costs %llu bytes", device->uuid, (unsigned long long)bytes);
    }
    if (opening->measuring >= 0)
        ledger_measure_end(opening->measuring, device->ledger);
    return status;
}
