/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Finds the GPU whose memory a memory location of the driver API means. On a machine whose CPU and GPU share addresses
 * (Grace) a GPU's memory is a NUMA node of the host, so a program that asks for memory on that node gets GPU memory.
 * NVML reports which node belongs to which GPU, but lists only the GPUs of this container. A node without processors
 * that belongs to none of these GPUs may be another container's GPU, so an allocation there is refused.
 */
#include "account.h"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

/* Finds the GPU whose memory is this node. Returns false if NVML reports no such GPU. */
static bool gpu_of(unsigned node, char uuid[VGPU_UUID_SIZE])
{
    unsigned count = 0, other;
    nvmlDevice_t gpu;
    if (!nvml_load() || !REAL_HAS(nvmlDeviceGetNumaNodeId) || !REAL_HAS(nvmlDeviceGetCount_v2) ||
        !REAL_HAS(nvmlDeviceGetHandleByIndex_v2) || !REAL_HAS(nvmlDeviceGetUUID) ||
        REAL(nvmlDeviceGetCount_v2)(&count) != NVML_SUCCESS)
        return false;
    for (unsigned i = 0; i < count; i++)
        if (REAL(nvmlDeviceGetHandleByIndex_v2)(i, &gpu) == NVML_SUCCESS &&
            REAL(nvmlDeviceGetNumaNodeId)(gpu, &other) == NVML_SUCCESS && other == node)
            return REAL(nvmlDeviceGetUUID)(gpu, uuid, VGPU_UUID_SIZE) == NVML_SUCCESS;
    return false;
}

/* Returns true only if the kernel says that the node has no processors. A node about which the kernel says nothing
 * counts as host memory. */
static bool without_processors(int node)
{
    char path[64], text[8];
    snprintf(path, sizeof path, "/sys/devices/system/node/node%d/cpulist", node);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return false;
    ssize_t length = read(file, text, sizeof text);
    close(file);
    return length == 0 || (length > 0 && text[0] == '\n');
}

bool location_on_card(const CUmemLocation *location, CUdevice *ordinal)
{
    if (location->type == CU_MEM_LOCATION_TYPE_DEVICE)
        *ordinal = location->id;
    else if (location->type == CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN)
        *ordinal = location->id & 0xff; /* The lowest byte is the device, the next byte the locality domain. */
    else
        return false;
    return true;
}

const struct device *device_at(const CUmemLocation *location, CUresult *status)
{
    char uuid[VGPU_UUID_SIZE] = "";
    int count = 0;
    *status = CUDA_SUCCESS;
    CUdevice place;
    if (location_on_card(location, &place))
        return device_of(place, status);
    if (location->type != CU_MEM_LOCATION_TYPE_HOST_NUMA || location->id <= 0)
        /* This is host memory. The remaining types of host location mean the node of the calling thread's processor,
         * and such a node has processors. */
        return NULL;
    if (gpu_of((unsigned)location->id, uuid)) {
        if (REAL_HAS(cuDeviceGetCount))
            REAL(cuDeviceGetCount)(&count);
        for (int ordinal = 0; ordinal < count; ordinal++) {
            const struct device *device = device_of(ordinal, status);
            if (device && uuid_same(device->uuid, uuid))
                return device;
        }
        *status = CUDA_SUCCESS;
    }
    if (uuid[0] || without_processors(location->id))
        *status = memory_refuse("memory of a NUMA node without processors that belongs to no GPU of this slice");
    return NULL;
}
