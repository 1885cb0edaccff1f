/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Measures how much GPU memory a context needs, because only the driver knows that. The size is the difference of the
 * bytes that NVML shows for this process before and after the creation. With some drivers NVML shows no process in a
 * container. Then the difference of the card's used bytes is taken. Other containers allocate and free meanwhile, so
 * this difference is checked against the size of further, short-lived contexts. A size that was found in this way is
 * replaced as soon as a lower size is found.
 */
#include "context.h"

#include "events.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Returns the bytes of this process on the card; 0 if NVML does not list it. */
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

#define UNKNOWN UINT64_MAX

static uint64_t card_bytes(nvmlDevice_t handle)
{
    nvmlMemory_t memory;
    if (!REAL_HAS(nvmlDeviceGetMemoryInfo) || REAL(nvmlDeviceGetMemoryInfo)(handle, &memory) != NVML_SUCCESS)
        return UNKNOWN;
    return memory.used;
}

/* --- readings of NVML's figures together with the charge ---------------------------------------------- */

static uint64_t on_card(int device)
{
    return ledger_own(device, ACCOUNT_USED) - host_memory_held(device) - shareable_released(device);
}

/* Reads NVML's figures and the charge while no thread is in flight (inside an allocation). If a thread stays in flight,
 * sets `quiet` to false. */
static void read_both(struct measure *measure, bool card)
{
    int device = measure->device->ledger;
    measure->quiet = gate_shut(device);
    /* Although no hook allocates or frees now, the driver can shrink a pool when a stream is synchronised, and end a
     * free that was queued in a stream. So the figures are read again if the charge has changed. */
    for (int again = 0; again < 8; again++) {
        EVENT(reclaim, false);
        measure->frees = gate_frees(device);
        measure->charged = on_card(device);
        measure->own = own_bytes(measure->handle);
        measure->card = card ? card_bytes(measure->handle) : UNKNOWN;
        EVENT(reclaim, false);
        measure->frees = measure->frees || gate_frees(device);
        if (measure->charged == on_card(device) || gate_forced(device))
            break;
    }
    measure->forced = gate_forced(device);
    measure->quiet = measure->quiet && !measure->forced;
    gate_open(device);
}

static bool find(struct measure *measure, const struct device *device)
{
    *measure = (struct measure){.device = device};
    measure->nvml = nvml_load() && REAL_HAS(nvmlDeviceGetHandleByUUID) &&
                    REAL(nvmlDeviceGetHandleByUUID)(device->uuid, &measure->handle) == NVML_SUCCESS;
    return measure->nvml;
}

void measure_now(struct measure *measure, const struct device *device)
{
    if (find(measure, device))
        read_both(measure, false);
}

void measure_begin(struct measure *measure, const struct device *device)
{
    if (!find(measure, device))
        return;
    measure->passing = context_passing(device->ledger);
    read_both(measure, true);
}

enum measured measure_end(const struct measure *measure, uint64_t *bytes)
{
    struct measure now = *measure;
    if (!measure->nvml)
        return MEASURED_NOT;
    read_both(&now, true);
    if (!measure->quiet || !now.quiet || measure->frees || now.frees ||
        !context_alone(measure->device->ledger, measure->passing))
        return MEASURED_NOT;
    /* Other threads of this process may have allocated memory meanwhile. Those bytes are charged already, so they are
     * subtracted. */
    int64_t elsewhere = (int64_t)(now.charged - measure->charged);
    int64_t grown = (int64_t)(now.own - measure->own) - elsewhere;
    /* If this process's figure did not grow, NVML shows pids of another pid namespace or does not show this process. */
    if (now.own > 0 && grown > 0) {
        *bytes = (uint64_t)grown;
        return MEASURED_OWN;
    }
    grown = (int64_t)(now.card - measure->card) - elsewhere;
    if (now.card != UNKNOWN && measure->card != UNKNOWN && grown > 0) {
        *bytes = (uint64_t)grown;
        return MEASURED_CARD;
    }
    return MEASURED_NOT;
}

/* Measures by how much a second, short-lived context reduces the free memory that the driver reports in the first
 * context. */
static bool second_context(CUcontext context, CUdevice ordinal, int64_t *bytes)
{
    size_t before = 0, after = 0, total;
    CUcontext second, popped;
    bool known = false;
    if (REAL(cuCtxPushCurrent_v2)(context) != CUDA_SUCCESS)
        return false;
    if (REAL(cuMemGetInfo_v2)(&before, &total) == CUDA_SUCCESS && REAL(cuCtxCreate_v2)(&second, 0, ordinal) == CUDA_SUCCESS) {
        known = REAL(cuMemGetInfo_v2)(&after, &total) == CUDA_SUCCESS;
        REAL(cuCtxDestroy_v2)(second);
    }
    REAL(cuCtxPopCurrent_v2)(&popped);
    *bytes = (int64_t)before - (int64_t)after;
    return known;
}

#define AGREEING 3
#define SAMPLES 15

/* Takes several samples of the size of a context. Allocations and frees of other containers increase some samples and
 * decrease others, so the median is used. *unanimous is true if the first three samples were equal. */
static bool middle(CUcontext context, CUdevice ordinal, int64_t *size, bool *unanimous)
{
    int64_t sample[SAMPLES];
    int count = 0;
    *unanimous = true;
    while (count < SAMPLES && !(*unanimous && count == AGREEING)) {
        int64_t bytes;
        if (!second_context(context, ordinal, &bytes))
            break;
        *unanimous = *unanimous && (count == 0 || sample[0] == bytes);
        int at = count++;
        for (; at > 0 && sample[at - 1] > bytes; at--)
            sample[at] = sample[at - 1];
        sample[at] = bytes;
    }
    *unanimous = *unanimous && count == AGREEING;
    *size = count ? sample[count / 2] : 0;
    return *size > 0;
}

uint64_t measure_by_second(CUcontext context, CUdevice ordinal, uint64_t card)
{
    int64_t size;
    bool unanimous;
    if (!REAL_HAS(cuMemGetInfo_v2) || !REAL_HAS(cuCtxCreate_v2) || !REAL_HAS(cuCtxDestroy_v2) ||
        !REAL_HAS(cuCtxPushCurrent_v2) || !REAL_HAS(cuCtxPopCurrent_v2) || !middle(context, ordinal, &size, &unanimous))
        return card;
    /* `card` is the size of this first context of the process by the card's figures (0: unknown), `size` that of a
     * second one, made to compare. A first context costs at least as much as a second one, and at most twice as much.
     * Outside this range, or if the samples differ, `card` is wrong: other containers allocated or freed. */
    return unanimous && card >= (uint64_t)size && card <= 2 * (uint64_t)size ? card : (uint64_t)size;
}
