/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a context or a module costs is known to the driver alone. It is measured, never guessed: the difference of the
 * bytes that NVML shows for this very process before and after. Where NVML does not show this process (containers of
 * some drivers see no process at all), the difference of the card's used bytes stands in for the first context of a
 * container, which is exact if nobody else on the card allocates within that time.
 */
#include "vgpu.h"

#include <stdlib.h>
#include <unistd.h>

/* Bytes of this process on the card, 0 if it is not in the list. */
static uint64_t own_bytes(nvmlDevice_t handle)
{
    __typeof__(&nvmlDeviceGetComputeRunningProcesses_v3) list = REAL(nvmlDeviceGetComputeRunningProcesses_v3);
    if (!list)
        list = REAL(nvmlDeviceGetComputeRunningProcesses_v2);
    if (!list)
        return 0;
    unsigned room = 64;
    for (int attempt = 0; attempt < 4; attempt++) {
        nvmlProcessInfo_t *processes = calloc(room, sizeof *processes);
        unsigned count = room;
        if (!processes)
            return 0;
        nvmlReturn_t status = list(handle, &count, processes);
        uint64_t bytes = 0;
        if (status == NVML_SUCCESS)
            for (unsigned i = 0; i < count; i++)
                if (processes[i].pid == (unsigned)getpid() && processes[i].usedGpuMemory != NVML_VALUE_NOT_AVAILABLE)
                    bytes += processes[i].usedGpuMemory;
        free(processes);
        if (status != NVML_ERROR_INSUFFICIENT_SIZE)
            return bytes;
        room = count + 64;
    }
    return 0;
}

static uint64_t card_bytes(nvmlDevice_t handle)
{
    nvmlMemory_t memory;
    if (!REAL_HAS(nvmlDeviceGetMemoryInfo) || REAL(nvmlDeviceGetMemoryInfo)(handle, &memory) != NVML_SUCCESS)
        return 0;
    return memory.used;
}

void measure_begin(struct measure *measure, const struct device *device)
{
    *measure = (struct measure){.device = device};
    measure->nvml = nvml_load() && REAL_HAS(nvmlDeviceGetHandleByUUID) &&
                    REAL(nvmlDeviceGetHandleByUUID)(device->uuid, &measure->handle) == NVML_SUCCESS;
    if (!measure->nvml)
        return;
    measure->charged = ledger_own(device->ledger, ACCOUNT_USED);
    measure->own = own_bytes(measure->handle);
    measure->card = card_bytes(measure->handle);
}

bool measure_end(const struct measure *measure, bool alone, uint64_t *bytes)
{
    if (!measure->nvml)
        return false;
    uint64_t own = own_bytes(measure->handle), card = card_bytes(measure->handle);
    /* Other threads of this process may have allocated meanwhile: that is charged already. */
    int64_t elsewhere = (int64_t)(ledger_own(measure->device->ledger, ACCOUNT_USED) - measure->charged);
    int64_t grown = (int64_t)(own - measure->own) - elsewhere;
    /* Not having grown at all: the list shows another pid namespace, or this process is not in it. */
    if (own > 0 && grown > 0) {
        *bytes = (uint64_t)grown;
        return true;
    }
    if (alone && card > measure->card) {
        *bytes = card - measure->card;
        return true;
    }
    return false;
}
