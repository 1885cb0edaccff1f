/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Replaces the NVML lists of processes on a GPU. The replaced lists show only the container's processes, with their
 * pids in the caller's namespace and with their charges. The processes are read from the ledger (the file with the
 * container's charges), because some drivers list no processes in a container, and others list the host's pids. The
 * driver is still called, with a count of 0, so that its errors are returned. All processes of a container are shown as
 * compute processes, so the lists of graphics and MPS processes are empty.
 */
#include "nvml_shown.h"

#include <stdlib.h>

int nvml_own_processes(enum control control, nvmlDevice_t handle, struct own_process **list)
{
    struct part parts[VGPU_MAX_DEVICES];
    static const int slots = (int)VGPU_LEDGER_SLOTS;
    int count = nvml_parts(control, handle, parts), total = 0;
    *list = NULL;
    if (count <= 0)
        return count;
    struct ledger_process *found = calloc((size_t)slots, sizeof *found);
    *list = calloc((size_t)(slots * count), sizeof **list);
    if (!found || !*list) {
        free(found);
        free(*list);
        *list = NULL;
        return -1;
    }
    for (int i = 0; i < count; i++) {
        int here = ledger_processes(parts[i].uuid, found, slots);
        for (int at = 0; at < here && at < slots; at++)
            (*list)[total++] = (struct own_process){found[at].pid, parts[i].gi, parts[i].ci, found[at].bytes};
    }
    free(found);
    return total;
}

/* Implements NVML's rule for lists. On entry *count is the capacity of the list; the function sets it to the number of
 * processes and returns the status. If the list does not fit, none of it is written. */
static nvmlReturn_t fits(unsigned *count, unsigned found, const void *room)
{
    unsigned had = *count;
    *count = found;
    if (found > had)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    return found == 0 || room ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

/* If the driver reports an error, returns it from the hook. The driver is called with a count of 0, so
 * INSUFFICIENT_SIZE does not count as an error. */
#define ASK_DRIVER(call) \
    do { \
        nvmlReturn_t driver = call; \
        if (driver != NVML_SUCCESS && driver != NVML_ERROR_INSUFFICIENT_SIZE) \
            return driver; \
    } while (0)

#define FILL_1(p) (nvmlProcessInfo_v1_t){.pid = p.pid, .usedGpuMemory = p.bytes}
#define FILL_2(p) \
    (nvmlProcessInfo_t){.pid = p.pid, .usedGpuMemory = p.bytes, .gpuInstanceId = p.gi, .computeInstanceId = p.ci}

#define LIST(symbol, type, fill, has_any) \
    EXPORT nvmlReturn_t symbol(nvmlDevice_t device, unsigned int *count, type *processes) \
    { \
        ENTER_NVML(symbol, (device, count, processes)); \
        if (!count) \
            return REAL(symbol)(device, NULL, processes); \
        unsigned none = 0; \
        ASK_DRIVER(REAL(symbol)(device, &none, NULL)); \
        struct own_process *own = NULL; \
        int found = has_any ? nvml_own_processes(control, device, &own) : 0; \
        nvmlReturn_t status = fits(count, found > 0 ? (unsigned)found : 0, processes); \
        for (int i = 0; status == NVML_SUCCESS && i < found; i++) \
            processes[i] = fill(own[i]); \
        free(own); \
        return status; \
    }

LIST(nvmlDeviceGetComputeRunningProcesses, nvmlProcessInfo_v1_t, FILL_1, true)
LIST(nvmlDeviceGetComputeRunningProcesses_v2, nvmlProcessInfo_t, FILL_2, true)
LIST(nvmlDeviceGetComputeRunningProcesses_v3, nvmlProcessInfo_t, FILL_2, true)
LIST(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcessInfo_v1_t, FILL_1, false)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_t, FILL_2, false)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_t, FILL_2, false)
LIST(nvmlDeviceGetMPSComputeRunningProcesses, nvmlProcessInfo_v1_t, FILL_1, false)
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlProcessInfo_t, FILL_2, false)
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, nvmlProcessInfo_t, FILL_2, false)

EXPORT nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device, nvmlProcessDetailList_t *list)
{
    ENTER_NVML(nvmlDeviceGetRunningProcessDetailList, (device, list));
    if (!list)
        return REAL(nvmlDeviceGetRunningProcessDetailList)(device, list);
    /* A later version of the structure has entries of another size, so it is not supported. */
    if (list->version != NVML_STRUCT_VERSION(nvmlProcessDetailList_t, 1))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    nvmlProcessDetailList_t empty = {.version = list->version, .mode = list->mode};
    ASK_DRIVER(REAL(nvmlDeviceGetRunningProcessDetailList)(device, &empty));
    struct own_process *own = NULL;
    bool compute = list->mode != NVML_PROCESS_MODE_GRAPHICS && list->mode != NVML_PROCESS_MODE_MPS;
    int found = compute ? nvml_own_processes(control, device, &own) : 0;
    nvmlReturn_t status = fits(&list->numProcArrayEntries, found > 0 ? (unsigned)found : 0, list->procArray);
    for (int i = 0; status == NVML_SUCCESS && i < found; i++)
        list->procArray[i] = (nvmlProcessDetail_t){.pid = own[i].pid,
                                                   .usedGpuMemory = own[i].bytes,
                                                   .gpuInstanceId = own[i].gi,
                                                   .computeInstanceId = own[i].ci};
    free(own);
    return status;
}
