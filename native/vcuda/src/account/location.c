/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whose memory a location is. On a machine whose CPU and GPU share addresses (Grace) a GPU's memory is a node of the host, and
 * who asks for memory on that node gets the card's. NVML says which node is which GPU's; it lists those of this container alone.
 * A node that has no processors and is none of them may be another container's GPU: what would lie there is refused.
 */
#include "account.h"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

/* The GPU whose memory is this node; false: none that NVML knows. */
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

/* Known to have none, that is: where the kernel does not say, it is the host's. */
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
        *ordinal = location->id & 0xff; /* its first byte; the domain is the second */
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
        return NULL; /* the node of the calling thread's processor, which has one */
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
        *status = memory_refuse("memory of a NUMA node that is no GPU's of this slice and has no processors");
    return NULL;
}
