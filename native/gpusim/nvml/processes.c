/* SPDX-License-Identifier: Apache-2.0 */
/* Implements NVML's lists of the processes with a context on a GPU. The lists of graphics and MPS processes are empty,
 * because neither is simulated. */
#include "nvml_internal.h"

#include <stdlib.h>
#include <string.h>

/* Lists the processes. As in the driver, a process that the caller's PID namespace does not show is left out. */
unsigned nvml_processes(const struct nvml_target *target, struct nvml_process *list, unsigned room)
{
    unsigned count = 0;
    sim_lock();
    sim_reap();
    const struct sim_state *state = sim_state();
    for (unsigned slot = 0; slot < state->proc_high; slot++) {
        const struct sim_proc *proc = &state->procs[slot];
        const struct sim_usage *use = &proc->use[target->number];
        if (proc->role == SIM_ROLE_NONE || (use->contexts == 0 && sim_usage_bytes(use) == 0))
            continue;
        uint32_t in = use->instance - 1;
        if (target->gi >= 0 && (!use->instance || (int)(in >> 8) != target->gi || (int)(in & 255) != target->ci))
            continue;
        pid_t pid = sim_proc_pid((int)slot);
        if (pid <= 0)
            continue;
        if (count < room)
            list[count] = (struct nvml_process){.pid = (unsigned)pid, .bytes = sim_usage_bytes(use),
                                                .gi = NVML_INSTANCE_ID_NONE, .ci = NVML_INSTANCE_ID_NONE};
        if (count < room && use->instance) {
            list[count].gi = target->gpu->gi[in >> 8].id;
            list[count].ci = target->gpu->gi[in >> 8].ci[in & 255].id;
        }
        count++;
    }
    sim_unlock();
    return count;
}

/* Opens the device and takes a snapshot of its processes into *list, to be freed by the caller. */
static nvmlReturn_t snapshot(nvmlDevice_t device, struct nvml_process **list, unsigned *count)
{
    struct nvml_target target;
    NVML_TRY(nvml_open(device, NVML_ANY_DEVICE, &target));
    *list = calloc(SIM_MAX_PROCS, sizeof **list);
    if (*list == NULL)
        return NVML_ERROR_MEMORY;
    *count = nvml_processes(&target, *list, SIM_MAX_PROCS);
    return NVML_SUCCESS;
}

/* Checks the room of a list. In all lists *count is the room on input and the number of entries on output; if the room
 * is too small, only the number is written. An empty list needs no buffer. */
static nvmlReturn_t fits(unsigned *room, unsigned found, const void *buffer)
{
    unsigned had = *room;
    *room = found;
    if (found > had)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    return found == 0 || buffer != NULL ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

NVML_API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count,
                                                              nvmlProcessInfo_t *infos)
{
    struct nvml_process *list;
    unsigned found;
    NVML_NEED(count != NULL);
    NVML_TRY(snapshot(device, &list, &found));
    nvmlReturn_t result = fits(count, found, infos);
    for (unsigned i = 0; result == NVML_SUCCESS && i < found; i++)
        infos[i] = (nvmlProcessInfo_t){.pid = list[i].pid, .usedGpuMemory = list[i].bytes,
                                       .gpuInstanceId = list[i].gi, .computeInstanceId = list[i].ci};
    free(list);
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned *count,
                                                              nvmlProcessInfo_t *infos)
{
    return nvmlDeviceGetComputeRunningProcesses_v3(device, count, infos);
}

NVML_API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned *count,
                                                           nvmlProcessInfo_v1_t *infos)
{
    struct nvml_process *list;
    unsigned found;
    NVML_NEED(count != NULL);
    NVML_TRY(snapshot(device, &list, &found));
    nvmlReturn_t result = fits(count, found, infos);
    for (unsigned i = 0; result == NVML_SUCCESS && i < found; i++)
        infos[i] = (nvmlProcessInfo_v1_t){.pid = list[i].pid, .usedGpuMemory = list[i].bytes};
    free(list);
    return result;
}

static nvmlReturn_t none(nvmlDevice_t device, unsigned *count)
{
    struct nvml_target target;
    NVML_TRY(nvml_open(device, NVML_ANY_DEVICE, &target));
    NVML_NEED(count != NULL);
    *count = 0;
    return NVML_SUCCESS;
}

#define EMPTY_LIST(name)                                                                                               \
    NVML_API nvmlReturn_t name(nvmlDevice_t device, unsigned *count, void *infos)                                      \
    {                                                                                                                  \
        (void)infos;                                                                                                   \
        return none(device, count);                                                                                    \
    }

EMPTY_LIST(nvmlDeviceGetGraphicsRunningProcesses)
EMPTY_LIST(nvmlDeviceGetGraphicsRunningProcesses_v2)
EMPTY_LIST(nvmlDeviceGetGraphicsRunningProcesses_v3)
EMPTY_LIST(nvmlDeviceGetMPSComputeRunningProcesses)
EMPTY_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2)
EMPTY_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3)

/* The values of mode are 0 for compute, 1 for graphics, 2 for MPS and 3 for all. */
NVML_API nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device, nvmlProcessDetailList_t *details)
{
    struct nvml_process *list;
    unsigned found;
    NVML_NEED(details != NULL);
    if (details->version != NVML_STRUCT_VERSION(nvmlProcessDetailList_t, 1))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    NVML_NEED(details->mode <= 3);
    NVML_TRY(snapshot(device, &list, &found));
    if (details->mode == 1 || details->mode == 2)
        found = 0;
    nvmlReturn_t result = fits(&details->numProcArrayEntries, found, details->procArray);
    for (unsigned i = 0; result == NVML_SUCCESS && i < found; i++)
        details->procArray[i] = (nvmlProcessDetail_t){.pid = list[i].pid, .usedGpuMemory = list[i].bytes,
                                                      .gpuInstanceId = list[i].gi, .computeInstanceId = list[i].ci};
    free(list);
    return result;
}
