/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Shows a program the memory that its container may use instead of the memory of the whole card: the limit as total,
 * the container's charge as used, the rest as free. The driver is called first, so that its errors are returned. A
 * device without a limit keeps the driver's figures.
 */
#include "nvml_shown.h"

#include "memory/memory.h"
#include "events.h"

#include <limits.h>

struct shown {
    uint64_t total, used, free;
};

static void settle(struct shown *shown)
{
    /* If a limit was lowered, the usage may exceed it. Then nothing is free. */
    if (shown->used > shown->total)
        shown->used = shown->total;
    shown->free = shown->total - shown->used;
}

/* Computes what is shown for a device. Returns false if there is no limit, so that the driver's figures are shown. */
static bool show(const char *uuid, int nvml_index, struct shown *shown)
{
    bool known;
    uint64_t beyond;
    shown->total = limits_memory(uuid, nvml_index, &known);
    if (!known || shown->total == UINT64_MAX)
        return false;
    if (!ledger_total(uuid, &shown->used))
        shown->used = 0; /* If the ledger cannot be read, no process can have a context, so nothing is used. */
    else if (limits_card(uuid) && (beyond = ledger_beyond(uuid)) != 0)
        shown->used = beyond < shown->total ? shown->used + beyond : shown->total;
    settle(shown);
    return true;
}

static bool show_current(enum control control, uint64_t card_free, struct shown *shown)
{
    CUcontext context;
    CUresult status;
    const struct device *device = control == CONTROL_ON ? device_current(&context, &status) : NULL;
    if (!device)
        return false;
    if (atomic_load_explicit(&vgpu_pools_dirty, memory_order_relaxed))
        EVENT(reclaim, false);
    if (card_free != UINT64_MAX)
        memory_beyond(device, card_free);
    if (!show(device->uuid, device->nvml_index, shown))
        return false;
    /* Show at most the card's free memory as free. There is one exception: with oversubscription (host_memory.c) every
     * allocation may be able to use host memory instead. */
    if (shown->free > card_free && !(limits_oversubscribe() && host_memory_complete()))
        shown->free = card_free;
    return true;
}

static unsigned narrow(uint64_t bytes)
{
    return bytes < UINT_MAX ? (unsigned)bytes : UINT_MAX;
}

EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
    ENTER(cuMemGetInfo_v2, (free_bytes, total_bytes));
    struct shown shown;
    CUresult status = REAL(cuMemGetInfo_v2)(free_bytes, total_bytes);
    if (status == CUDA_SUCCESS && show_current(control, free_bytes ? *free_bytes : UINT64_MAX, &shown)) {
        if (free_bytes)
            *free_bytes = shown.free;
        if (total_bytes)
            *total_bytes = shown.total;
    }
    return status;
}

EXPORT CUresult cuMemGetInfo(unsigned int *free_bytes, unsigned int *total_bytes)
{
    ENTER(cuMemGetInfo, (free_bytes, total_bytes));
    struct shown shown;
    CUresult status = REAL(cuMemGetInfo)(free_bytes, total_bytes);
    if (status == CUDA_SUCCESS && show_current(control, free_bytes && *free_bytes < UINT_MAX ? *free_bytes : UINT64_MAX, &shown)) {
        if (free_bytes)
            *free_bytes = narrow(shown.free);
        if (total_bytes)
            *total_bytes = narrow(shown.total);
    }
    return status;
}

/* Sets *bytes to the size that is shown for a device. Returns false if there is no limit. A device that this container
 * may not use has size 0, because no context can be created on it. */
static bool limit_of(enum control control, CUdevice ordinal, uint64_t *bytes)
{
    CUresult status;
    bool known = false;
    const struct device *device = control == CONTROL_ON ? device_of(ordinal, &status) : NULL;
    *bytes = device ? device_limit(device, &known) : 0;
    if (!known)
        *bytes = 0;
    return *bytes != UINT64_MAX;
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    ENTER(cuDeviceTotalMem_v2, (bytes, device));
    uint64_t limit;
    CUresult status = REAL(cuDeviceTotalMem_v2)(bytes, device);
    if (status == CUDA_SUCCESS && bytes && limit_of(control, device, &limit))
        *bytes = limit;
    return status;
}

EXPORT CUresult cuDeviceTotalMem(unsigned int *bytes, CUdevice device)
{
    ENTER(cuDeviceTotalMem, (bytes, device));
    uint64_t limit;
    CUresult status = REAL(cuDeviceTotalMem)(bytes, device);
    if (status == CUDA_SUCCESS && bytes && limit_of(control, device, &limit))
        *bytes = narrow(limit);
    return status;
}

/* Computes the container's figures that replace the driver's figures of a device. Returns NO_PERMISSION if the
 * container may not use the device. */
static nvmlReturn_t show_nvml(enum control control, nvmlDevice_t handle, bool *limited, struct shown *shown)
{
    struct part parts[VGPU_MAX_DEVICES];
    int count = nvml_parts(control, handle, parts);
    *shown = (struct shown){0, 0, 0};
    *limited = count > 0;
    for (int i = 0; i < count && *limited; i++) {
        struct shown part;
        *limited = show(parts[i].uuid, parts[i].nvml_index, &part);
        shown->total += part.total;
        shown->used += part.used;
    }
    settle(shown);
    return count == 0 ? NVML_ERROR_NO_PERMISSION : NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    ENTER_NVML(nvmlDeviceGetMemoryInfo, (device, memory));
    struct shown shown;
    bool limited;
    nvmlReturn_t status = REAL(nvmlDeviceGetMemoryInfo)(device, memory);
    if (status != NVML_SUCCESS || !memory)
        return status;
    status = show_nvml(control, device, &limited, &shown);
    if (limited || status != NVML_SUCCESS)
        *memory = (nvmlMemory_t){.total = shown.total, .used = shown.used, .free = shown.free};
    return status;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    ENTER_NVML(nvmlDeviceGetMemoryInfo_v2, (device, memory));
    struct shown shown;
    bool limited;
    nvmlReturn_t status = REAL(nvmlDeviceGetMemoryInfo_v2)(device, memory);
    if (status != NVML_SUCCESS || !memory)
        return status;
    status = show_nvml(control, device, &limited, &shown);
    /* The reserved memory is not shown, because the driver's reserve belongs to the card and not to the container. */
    if (limited || status != NVML_SUCCESS)
        *memory = (nvmlMemory_v2_t){
            .version = memory->version, .total = shown.total, .used = shown.used, .free = shown.free};
    return status;
}
