/* SPDX-License-Identifier: Apache-2.0 */
/* Implements NVML's accounting mode: while it is on, the usage of each process that had a context on the GPU stays
 * available after the process has ended. */
#include "nvml_internal.h"

#include <string.h>

#define BUFFER_SIZE SIM_PAST

static nvmlReturn_t open_accounting(nvmlDevice_t device, struct nvml_target *target)
{
    NVML_TRY(nvml_open(device, NVML_WHOLE_GPU, target));
    return target->model->brand == NVML_BRAND_GEFORCE ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetAccountingMode(nvmlDevice_t device, unsigned *mode)
{
    struct nvml_target target;
    NVML_TRY(open_accounting(device, &target));
    NVML_NEED(mode != NULL);
    sim_lock();
    *mode = target.gpu->accounting;
    sim_unlock();
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceSetAccountingMode(nvmlDevice_t device, unsigned mode)
{
    struct nvml_target target;
    NVML_TRY(open_accounting(device, &target));
    NVML_NEED(mode <= NVML_FEATURE_ENABLED);
    NVML_TRY(nvml_root());
    sim_lock();
    target.gpu->accounting = mode;
    sim_unlock();
    return NVML_SUCCESS;
}

NVML_GETTER(nvmlDeviceGetAccountingBufferSize, unsigned, open_accounting(device, &target), true, BUFFER_SIZE)

/* Record of a living or ended process. A pid may be used again, so a living process with this pid comes before an ended
 * one. */
struct record {
    struct sim_usage use;
    unsigned pid;
    uint64_t end; /* The end is 0 while the process runs. */
};

static bool take(struct record *record, unsigned pid, const struct sim_usage *use, uint64_t end)
{
    if (pid == 0 || (use->kernels == 0 && use->peak == 0))
        return false;
    *record = (struct record){.use = *use, .pid = pid, .end = end};
    return true;
}

/* Calls visit for living processes, then for ended processes, newest first, until visit returns true. The caller must
 * hold the lock. */
static bool each(const struct nvml_target *target, bool (*visit)(const struct record *, void *), void *argument)
{
    const struct sim_state *state = sim_state();
    struct record record;
    for (unsigned slot = 0; slot < state->proc_high; slot++) {
        const struct sim_proc *proc = &state->procs[slot];
        if (proc->role != SIM_ROLE_NONE &&
            take(&record, (unsigned)sim_proc_pid((int)slot), &proc->use[target->number], 0) && visit(&record, argument))
            return true;
    }
    uint64_t kept = state->past_count < SIM_PAST ? state->past_count : SIM_PAST;
    for (uint64_t i = 0; i < kept; i++) {
        const struct sim_past *past = &state->past[(state->past_count - 1 - i) % SIM_PAST];
        if (past->gpu == target->number && take(&record, (unsigned)past->pid, &past->use, past->end) &&
            visit(&record, argument))
            return true;
    }
    return false;
}

struct pid_list {
    unsigned *pids;
    unsigned room, count;
};

static bool collect(const struct record *record, void *argument)
{
    struct pid_list *list = argument;
    if (list->count < list->room)
        list->pids[list->count] = record->pid;
    list->count++;
    return false;
}

NVML_API nvmlReturn_t nvmlDeviceGetAccountingPids(nvmlDevice_t device, unsigned *count, unsigned *pids)
{
    struct nvml_target target;
    NVML_TRY(open_accounting(device, &target));
    NVML_NEED(count != NULL && (pids != NULL || *count == 0));
    struct pid_list list = {.pids = pids, .room = *count};
    nvmlReturn_t result = NVML_ERROR_NOT_SUPPORTED;
    sim_lock();
    if (target.gpu->accounting) {
        sim_reap();
        each(&target, collect, &list);
        result = list.count > list.room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
    }
    sim_unlock();
    *count = result == NVML_ERROR_NOT_SUPPORTED ? 0 : list.count;
    return result;
}

static bool match(const struct record *record, void *argument)
{
    struct record *wanted = argument;
    if (record->pid != wanted->pid)
        return false;
    *wanted = *record;
    return true;
}

/* The field `time` is 0 while the process runs, and afterwards its run time in milliseconds. Utilization is the average
 * over the process's life. */
NVML_API nvmlReturn_t nvmlDeviceGetAccountingStats(nvmlDevice_t device, unsigned pid, nvmlAccountingStats_t *stats)
{
    struct nvml_target target;
    struct record record = {.pid = pid};
    NVML_TRY(open_accounting(device, &target));
    NVML_NEED(stats != NULL);
    sim_lock();
    bool on = target.gpu->accounting != 0, found = false;
    uint64_t now = sim_now();
    if (on) {
        sim_reap();
        sim_advance(target.number, now);
        found = each(&target, match, &record);
    }
    sim_unlock();
    if (!on)
        return NVML_ERROR_NOT_SUPPORTED;
    if (!found)
        return NVML_ERROR_NOT_FOUND;
    uint64_t life = (record.end ? record.end : now) - record.use.since;
    *stats = (nvmlAccountingStats_t){
        .gpuUtilization = life ? (unsigned)(record.use.busy_ns * 100 / life) : 0,
        .memoryUtilization = life ? (unsigned)(record.use.busy_ns * 50 / life) : 0,
        .maxMemoryUsage = record.use.peak,
        .time = record.end ? life / 1000000 : 0,
        .startTime = sim_wall_us(record.use.since),
        .isRunning = record.end == 0,
    };
    return NVML_SUCCESS;
}
