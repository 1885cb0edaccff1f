/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The steps of the hooks (replacements of driver functions) around a driver call that allocates: they charge the memory
 * before the driver allocates it, and keep or remove the charge after the driver has returned.
 */
#include "account.h"

#include "events.h"

CUresult memory_broken(void)
{
    limits_complain();
    return CUDA_ERROR_NOT_PERMITTED;
}

CUresult memory_refuse(const char *what)
{
    static _Atomic unsigned count;
    if (vgpu_log_again(&count))
        vgpu_log_line(LOG_ERROR, "%s is refused, because the memory cannot be charged exactly", what);
    return CUDA_ERROR_NOT_SUPPORTED;
}

const struct device *memory_target(enum control control, CUcontext *context, CUresult *status)
{
    if (control == CONTROL_BROKEN) {
        *status = memory_broken();
        return NULL;
    }
    return device_to_allocate(context, status);
}

CUresult memory_meet(void)
{
    CUcontext context;
    CUresult status;
    bool refused = !device_to_allocate(&context, &status) &&
                   (status == CUDA_ERROR_NOT_PERMITTED || status == CUDA_ERROR_OUT_OF_MEMORY);
    /* Other errors are not returned here: either no context is current, or the driver's call reports the error. */
    return refused ? status : CUDA_SUCCESS;
}

void memory_refused(const struct device *device, CUresult status)
{
    size_t unused, shown;
    if (status == CUDA_ERROR_OUT_OF_MEMORY && limits_card(device->uuid) && REAL_HAS(cuMemGetInfo_v2) &&
        REAL(cuMemGetInfo_v2)(&unused, &shown) == CUDA_SUCCESS)
        memory_beyond(device, unused);
}

void memory_beyond(const struct device *device, uint64_t unused)
{
    bool known;
    uint64_t charged = 0, limit;
    /* A container with oversubscription (host memory in place of device memory) can get the missing bytes, so nothing
     * is recorded. */
    if (!limits_card(device->uuid) || limits_oversubscribe() || (limit = device_limit(device, &known)) == UINT64_MAX || !known ||
        !ledger_total(device->uuid, &charged))
        return;
    uint64_t room = charged < limit ? limit - charged : 0;
    ledger_beyond_is(device->ledger, room > unused ? room - unused : 0);
}

CUresult memory_charge(const struct device *device, enum account account, uint64_t bytes)
{
    bool known;
    uint64_t limit = device_limit(device, &known);
    if (!known) {
        vgpu_log_line(LOG_ERROR, "device %s is not among the devices of the limits file", device->uuid);
        return CUDA_ERROR_NOT_PERMITTED;
    }
    enum charge result = ledger_charge(device->ledger, account, bytes, limit);
    for (int trim = 0; result == CHARGE_FULL && trim < 2; trim++) {
        EVENT(reclaim, trim != 0);
        result = ledger_charge(device->ledger, account, bytes, limit);
    }
    if (result == CHARGE_FULL)
        vgpu_log(LOG_INFO, "%llu bytes on %s are over the limit of %llu", (unsigned long long)bytes, device->uuid,
                 (unsigned long long)limit);
    return result == CHARGE_OK ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

void memory_lost(uint64_t bytes)
{
    vgpu_log_line(LOG_ERROR, "no host memory to remember a block of %llu bytes: it stays charged until exit",
                  (unsigned long long)bytes);
}

void memory_put(struct block_map *map, const struct block *block, uint64_t bytes)
{
    if (!block_put(map, block))
        memory_lost(bytes);
}

void memory_keep(struct block_map *map, uint64_t key, uint64_t bytes, const struct device *device, int kind, uint64_t owner)
{
    struct block block = {.key = key, .bytes = bytes, .owner = owner, .device = device->ledger, .kind = kind};
    memory_put(map, &block, bytes);
}

/* --- the steps of a hook that allocates --------------------------------------------------------------- */

CUresult allocation_target(enum control control, struct allocation *allocation)
{
    CUresult status;
    *allocation = (struct allocation){.kind = BLOCK_PLAIN};
    allocation->device = memory_target(control, &allocation->context, &status);
    if (allocation->device)
        /* The flight (the time in which charge and driver may differ) ends in allocation_end. */
        flight_begin(allocation->device->ledger);
    return status;
}

CUresult allocation_begin(enum control control, struct allocation *allocation, uint64_t bytes)
{
    CUresult status = allocation_target(control, allocation);
    if (status == CUDA_SUCCESS && (status = allocation_resize(allocation, bytes)) != CUDA_SUCCESS)
        flight_end(&allocation->device->ledger);
    return status;
}

CUresult allocation_resize(struct allocation *allocation, uint64_t bytes)
{
    CUresult status = CUDA_SUCCESS;
    if (bytes > allocation->bytes || !allocation->bytes)
        status = memory_charge(allocation->device, ACCOUNT_USED, bytes - allocation->bytes);
    else
        ledger_uncharge(allocation->device->ledger, ACCOUNT_USED, allocation->bytes - bytes);
    if (status == CUDA_SUCCESS)
        allocation->bytes = bytes;
    return status;
}

CUresult allocation_end(struct allocation *allocation, CUresult status, struct block_map *map, uint64_t key)
{
    const struct device *device = allocation->device;
    if (status != CUDA_SUCCESS)
        ledger_uncharge(device->ledger, ACCOUNT_USED, allocation->bytes);
    else if (map)
        memory_keep(map, key, allocation->bytes, device, allocation->kind, (uintptr_t)allocation->context);
    flight_end(&device->ledger);
    memory_refused(device, status);
    return status;
}
