/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Maps an NVML handle to the devices that the container may use through it: the device itself, the container's MIG
 * devices on that GPU, or none.
 */
#include "nvml_shown.h"

#include <stdio.h>
#include <string.h>

static bool uuid_of(nvmlDevice_t handle, char uuid[VGPU_UUID_SIZE])
{
    char text[96]; /* The size is that of NVML_DEVICE_UUID_V2_BUFFER_SIZE. */
    if (!REAL_HAS(nvmlDeviceGetUUID) || REAL(nvmlDeviceGetUUID)(handle, text, sizeof text) != NVML_SUCCESS)
        return false;
    snprintf(uuid, VGPU_UUID_SIZE, "%.*s", VGPU_UUID_SIZE - 1, text);
    return true;
}

static void fill(struct part *part, nvmlDevice_t handle, const char uuid[VGPU_UUID_SIZE])
{
    *part = (struct part){.nvml_index = -1, .gi = NVML_INSTANCE_NONE, .ci = NVML_INSTANCE_NONE};
    memcpy(part->uuid, uuid, VGPU_UUID_SIZE);
    if (strncmp(uuid, "MIG-", 4) != 0)
        return;
    if (REAL_HAS(nvmlDeviceGetGpuInstanceId))
        REAL(nvmlDeviceGetGpuInstanceId)(handle, &part->gi);
    if (REAL_HAS(nvmlDeviceGetComputeInstanceId))
        REAL(nvmlDeviceGetComputeInstanceId)(handle, &part->ci);
}

/* Lists the MIG devices of the limits file that belong to the GPU with this UUID. */
static int children(const char *parent, struct part parts[VGPU_MAX_DEVICES])
{
    char uuids[VGPU_MAX_DEVICES][VGPU_UUID_SIZE], above[VGPU_UUID_SIZE];
    int count = 0, devices = limits_devices(uuids);
    if (!REAL_HAS(nvmlDeviceGetHandleByUUID) || !REAL_HAS(nvmlDeviceGetDeviceHandleFromMigDeviceHandle))
        return 0;
    for (int i = 0; i < devices; i++) {
        nvmlDevice_t mig, gpu;
        if (strncmp(uuids[i], "MIG-", 4) == 0 && REAL(nvmlDeviceGetHandleByUUID)(uuids[i], &mig) == NVML_SUCCESS &&
            REAL(nvmlDeviceGetDeviceHandleFromMigDeviceHandle)(mig, &gpu) == NVML_SUCCESS && uuid_of(gpu, above) &&
            uuid_same(above, parent))
            fill(&parts[count++], mig, uuids[i]);
    }
    return count;
}

int nvml_parts(enum control control, nvmlDevice_t handle, struct part parts[VGPU_MAX_DEVICES])
{
    char uuid[VGPU_UUID_SIZE];
    bool known;
    if (control == CONTROL_BROKEN)
        return 0;
    if (!uuid_of(handle, uuid))
        return -1;
    limits_memory(uuid, -1, &known);
    if (!known)
        return children(uuid, parts);
    fill(&parts[0], handle, uuid);
    if (limits_need_index())
        parts[0].nvml_index = nvml_gpu_index(handle, uuid);
    return 1;
}
