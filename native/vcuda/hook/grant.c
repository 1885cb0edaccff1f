/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the limits file of each allocation (parts of GPUs) that the container was given. The file can be trusted,
 * because on the node only root may enter the file's folder. */
#include "hook.h"

#include "limits/limits_file.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#define PATIENCE_MS 1000

static bool add(struct grant *grant, const char *uuid, uint64_t bytes)
{
    int i = 0;
    while (i < grant->gpu_count && strcmp(grant->gpus[i].uuid, uuid) != 0)
        i++;
    if (i == GPUS)
        return fail("the container's allocations name more than %d GPUs", GPUS);
    struct gpu *gpu = &grant->gpus[i];
    if (i == grant->gpu_count) {
        grant->gpu_count++;
        *gpu = (struct gpu){.hard = bytes};
        snprintf(gpu->uuid, sizeof gpu->uuid, "%s", uuid);
    } else {
        gpu->hard = gpu->hard > UNLIMITED - bytes ? UNLIMITED : gpu->hard + bytes;
    }
    return true;
}

static bool add_all(struct grant *grant, const char *id, const struct vgpu_limits *limits)
{
    if (strncmp(limits->allocation, id, sizeof limits->allocation - 1) != 0)
        return fail("the limits of allocation %s are those of \"%.*s\"", id, (int)sizeof limits->allocation, limits->allocation);
    if (limits->flags & VGPU_LIMITS_DENY)
        return fail("allocation %s is not ready or was withdrawn: its limits file has the flag deny", id);
    if (!limits->device_count)
        return fail("the limits of allocation %s name no GPU", id);
    for (uint32_t i = 0; i < limits->device_count; i++) {
        const struct vgpu_limits_device *device = &limits->devices[i];
        bool unlimited = !device->memory_bytes && (device->flags & VGPU_DEVICE_UNLIMITED_MEMORY);
        if (strncmp(device->uuid, "MIG-", 4) == 0)
            return fail("allocation %s has %s: the driver limits no MIG device, because such a device has separate memory", id,
                        device->uuid);
        if (!device->memory_bytes && !unlimited)
            return fail("allocation %s has no memory on %s", id, device->uuid);
        if (!add(grant, device->uuid, unlimited ? UNLIMITED : device->memory_bytes))
            return false;
    }
    return true;
}

bool grant_read(const struct options *options, struct grant *grant)
{
    char path[PATH_MAX], reason[200];
    if (!grant->id_count)
        return fail("no mount of the container lies below %s, so the container has no allocation", options->allocations);
    for (int i = 0; i < grant->id_count; i++) {
        const char *id = grant->ids[i];
        struct limits_file file = {0};
        struct vgpu_limits limits;
        /* An allocation that the library does not limit has no folder. Its limits are in a single file next to the
         * folders. */
        snprintf(path, sizeof path, "%s/%s/limits", options->allocations, id);
        if (!limits_map(path, &file, reason, sizeof reason) && file.missing) {
            snprintf(path, sizeof path, "%s/%s.limits", options->allocations, id);
            limits_map(path, &file, reason, sizeof reason);
        }
        if (!file.data)
            return fail("allocation %s, which the container mounts, is not known on this node: %s: %s", id, path, reason);
        bool read = limits_copy(&file, PATIENCE_MS, &limits, reason, sizeof reason) || fail("%s: %s", path, reason);
        munmap((void *)(uintptr_t)file.data, file.length);
        if (!read || !add_all(grant, id, &limits))
            return false;
    }
    return true;
}
