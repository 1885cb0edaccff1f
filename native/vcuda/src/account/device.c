/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Identifies devices by their UUIDs. CUDA's ordinals depend on CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, NVML's
 * indices do not, and the ledger (the file with the container's charges) has its own order. Only the UUID identifies a
 * GPU in all three.
 */
#include "account.h"

#include "events.h"

#include <stdio.h>
#include <string.h>

#define MAX_ORDINALS 64

static struct device devices[MAX_ORDINALS];
static _Atomic bool known[MAX_ORDINALS];
static struct lock lock;

static void spell(const CUuuid *uuid, char out[VGPU_UUID_SIZE])
{
    const unsigned char *b = uuid->bytes;
    snprintf(out, VGPU_UUID_SIZE, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
             b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
}

/* CUDA returns a 16-byte UUID, which may belong to a MIG device. NVML needs the name with the prefix GPU- or MIG-, so
 * this function tries both. */
static void name_in_nvml(char uuid[VGPU_UUID_SIZE])
{
    nvmlDevice_t handle;
    char other[VGPU_UUID_SIZE];
    if (!nvml_load() || !REAL_HAS(nvmlDeviceGetHandleByUUID) ||
        REAL(nvmlDeviceGetHandleByUUID)(uuid, &handle) == NVML_SUCCESS)
        return;
    memcpy(other, uuid, sizeof other);
    memcpy(other, "MIG-", 4);
    if (REAL(nvmlDeviceGetHandleByUUID)(other, &handle) == NVML_SUCCESS)
        memcpy(uuid, other, sizeof other);
}

int nvml_gpu_index(nvmlDevice_t handle, const char *uuid)
{
    unsigned index;
    if (!REAL_HAS(nvmlDeviceGetIndex))
        return -1;
    if (strncmp(uuid, "MIG-", 4) == 0 && (!REAL_HAS(nvmlDeviceGetDeviceHandleFromMigDeviceHandle) ||
                                          REAL(nvmlDeviceGetDeviceHandleFromMigDeviceHandle)(handle, &handle) != NVML_SUCCESS))
        return -1;
    return REAL(nvmlDeviceGetIndex)(handle, &index) == NVML_SUCCESS ? (int)index : -1;
}

static int index_in_nvml(const char *uuid)
{
    nvmlDevice_t handle;
    if (!limits_need_index() || !nvml_load() || !REAL_HAS(nvmlDeviceGetHandleByUUID) ||
        REAL(nvmlDeviceGetHandleByUUID)(uuid, &handle) != NVML_SUCCESS)
        return -1;
    return nvml_gpu_index(handle, uuid);
}

const struct device *device_of(CUdevice ordinal, CUresult *status)
{
    *status = CUDA_SUCCESS;
    if (ordinal >= 0 && ordinal < MAX_ORDINALS && atomic_load_explicit(&known[ordinal], memory_order_acquire))
        return &devices[ordinal];
    CUuuid uuid;
    /* For a MIG device cuDeviceGetUuid_v2 returns the UUID of the MIG device, but cuDeviceGetUuid returns the UUID of
     * its GPU. */
    bool second = REAL_HAS(cuDeviceGetUuid_v2);
    if (!second && !REAL_HAS(cuDeviceGetUuid)) {
        *status = CUDA_ERROR_NOT_SUPPORTED;
        return NULL;
    }
    *status = second ? REAL(cuDeviceGetUuid_v2)(&uuid, ordinal) : REAL(cuDeviceGetUuid)(&uuid, ordinal);
    if (*status != CUDA_SUCCESS)
        return NULL;
    *status = CUDA_ERROR_NOT_PERMITTED;
    if (ordinal < 0 || ordinal >= MAX_ORDINALS || !ledger_join())
        return NULL;
    struct device device = {.nvml_index = -1};
    spell(&uuid, device.uuid);
    char names[VGPU_MAX_DEVICES][VGPU_UUID_SIZE];
    bool named = false;
    for (int i = limits_devices(names) - 1; i >= 0; i--)
        if (uuid_same(names[i], device.uuid)) {
            memcpy(device.uuid, names[i], VGPU_UUID_SIZE);
            named = true;
        }
    if (!named)
        name_in_nvml(device.uuid);
    device.nvml_index = index_in_nvml(device.uuid);
    if (device.nvml_index < 0)
        device.nvml_index = ordinal; /* NVML is not available in this container, so CUDA's order is used. */
    device.ledger = ledger_device(device.uuid);
    if (device.ledger < 0) {
        vgpu_log_line(LOG_ERROR, "device %s has no place in the ledger %s", device.uuid, limits_ledger_path(0));
        return NULL;
    }
    device.counters = counters_of(device.ledger);
    lock_take(&lock);
    if (!atomic_load_explicit(&known[ordinal], memory_order_relaxed)) {
        devices[ordinal] = device;
        atomic_store_explicit(&known[ordinal], true, memory_order_release);
    }
    lock_drop(&lock);
    *status = CUDA_SUCCESS;
    return &devices[ordinal];
}

__thread struct used_last device_last __attribute__((tls_model("initial-exec")));
_Atomic uint32_t device_epoch = 1;

void device_forget_contexts(void)
{
    atomic_fetch_add_explicit(&device_epoch, 1, memory_order_release);
}

/* Asks the driver for the current context and its device. Sets *met to an error if the context may not allocate
 * memory. */
static const struct device *ask_current(CUcontext *context, CUresult *status, CUresult *met)
{
    CUdevice ordinal;
    bool known = false;
    uint32_t now = atomic_load_explicit(&device_epoch, memory_order_acquire);
    *context = NULL;
    *status = REAL(cuCtxGetCurrent)(context);
    if (*status == CUDA_SUCCESS && !*context)
        *status = CUDA_ERROR_INVALID_CONTEXT;
    if (*status == CUDA_SUCCESS)
        *status = REAL(cuCtxGetDevice)(&ordinal);
    const struct device *device = *status == CUDA_SUCCESS ? device_of(ordinal, status) : NULL;
    if (!device)
        return NULL;
    *met = vgpu_events.context_met(device, *context, ordinal, &known);
    if (known)
        device_last = (struct used_last){.context = *context, .device = device, .epoch = now};
    return device;
}

const struct device *device_current(CUcontext *context, CUresult *status)
{
    const struct device *device;
    CUresult met;
    *status = CUDA_SUCCESS;
    return device_known(context, &device) ? device : ask_current(context, status, &met);
}

const struct device *device_to_allocate(CUcontext *context, CUresult *status)
{
    const struct device *device;
    *status = CUDA_SUCCESS;
    if (device_known(context, &device))
        return device;
    CUresult met = CUDA_SUCCESS;
    device = ask_current(context, status, &met);
    if (met == CUDA_SUCCESS)
        return device;
    *status = met;
    return NULL;
}

void devices_context_left(struct leaving *leaving)
{
    (void)leaving;
    device_forget_contexts();
}

const struct device *device_in_ledger(int index)
{
    for (int ordinal = 0; ordinal < MAX_ORDINALS; ordinal++)
        if (atomic_load_explicit(&known[ordinal], memory_order_acquire) && devices[ordinal].ledger == index)
            return &devices[ordinal];
    return NULL;
}

uint64_t device_limit_asked(const struct device *device, bool *in_limits)
{
    struct cached_limits *cached = atomic_load_explicit(&vgpu_cached_limits, memory_order_acquire);
    int index = device->ledger;
    uint64_t bytes = limits_memory(device->uuid, device->nvml_index, in_limits);
    /* Caches the limit only if no other thread has reloaded the limits since `cached` was read. */
    if (cached && *in_limits && cached == atomic_load_explicit(&vgpu_cached_limits, memory_order_acquire))
        __atomic_store_n(&cached->memory[index], bytes, __ATOMIC_RELAXED);
    return bytes;
}

void devices_reset(void)
{
    device_forget_contexts();
    memset(known, 0, sizeof known);
    atomic_store_explicit(&lock.word, 0, memory_order_relaxed);
}
