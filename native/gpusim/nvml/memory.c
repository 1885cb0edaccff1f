/* SPDX-License-Identifier: Apache-2.0 */
/* Implements NVML's functions for the memory of a GPU or of one GPU instance (MIG). */
#include "nvml_internal.h"

#include <string.h>

void nvml_memory(const struct nvml_target *target, nvmlMemory_v2_t *memory)
{
    sim_lock();
    sim_reap();
    if (target->gi >= 0) {
        const struct sim_mig_profile *profile = nvml_mig_profile(target, target->gpu->gi[target->gi].profile_id);
        memory->total = profile ? (unsigned long long)profile->memory_mib << 20 : 0;
        memory->reserved = 0;
        memory->used = sim_instance_used(target->number, target->gi);
    } else {
        memory->total = target->gpu->total;
        memory->reserved = target->gpu->reserved_bytes;
        memory->used = target->gpu->used;
    }
    sim_unlock();
    unsigned long long taken = memory->used + memory->reserved;
    memory->free = taken < memory->total ? memory->total - taken : 0;
}

/* Returns the NUMA node that a GPU's memory forms on the host (Grace). */
NVML_API nvmlReturn_t nvmlDeviceGetNumaNodeId(nvmlDevice_t device, unsigned *node)
{
    struct nvml_target target;
    NVML_TRY(nvml_open(device, NVML_ANY_DEVICE, &target));
    NVML_NEED(node != NULL);
    *node = (unsigned)target.gpu->numa_node;
    return *node ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

/* Version 1 of the structure has no field for the driver's own memory, so this memory counts as used. */
NVML_API nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    struct nvml_target target;
    nvmlMemory_v2_t whole;
    NVML_TRY(nvml_open(device, NVML_ANY_DEVICE, &target));
    NVML_NEED(memory != NULL);
    nvml_memory(&target, &whole);
    *memory = (nvmlMemory_t){.total = whole.total, .free = whole.free, .used = whole.used + whole.reserved};
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    struct nvml_target target;
    NVML_TRY(nvml_open(device, NVML_ANY_DEVICE, &target));
    NVML_NEED(memory != NULL);
    if (memory->version != NVML_STRUCT_VERSION(nvmlMemory_v2_t, 2))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    nvml_memory(&target, memory);
    return NVML_SUCCESS;
}

/* BAR1 is the window through which the host accesses GPU memory. The driver maps 2 MiB of it, and 1 MiB for each
 * process with a context. */
NVML_API nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t *bar1)
{
    struct nvml_target target;
    NVML_TRY(nvml_open(device, NVML_ANY_DEVICE, &target));
    NVML_NEED(bar1 != NULL);
    bar1->bar1Total = (unsigned long long)target.model->bar1_mib << 20;
    if (target.gi >= 0) { /* An instance has one eighth of BAR1 for each of its memory slices. */
        sim_lock();
        bar1->bar1Total = bar1->bar1Total / 8 * target.gpu->gi[target.gi].placement_size;
        sim_unlock();
        bar1->bar1Used = 0;
    } else {
        bar1->bar1Used = (2ull + nvml_processes(&target, NULL, 0)) << 20;
    }
    bar1->bar1Free = bar1->bar1Total - bar1->bar1Used;
    return NVML_SUCCESS;
}
