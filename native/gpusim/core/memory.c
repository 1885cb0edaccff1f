/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Accounts the physical memory of the simulated GPUs. Each process has three counters for a GPU: bytes of
 * allocations, contexts and modules. These counters are always right. sim_gpu.used caches the sum over all processes. A process can die after it changed
 * a counter and before it changed the sum, so the sum is computed again after each death.
 */
#include "internal.h"

#include <inttypes.h>

uint64_t sim_usage_bytes(const struct sim_usage *use)
{
    return use->memory + use->context + use->module;
}

void sim_repair(void)
{
    struct sim_state *state = sim_self.state;
    state->repairs++;
    sim_reap();
    for (uint32_t gpu = 0; gpu < state->gpu_count; gpu++) {
        uint64_t sum = sim_shared_orphans((int)gpu, false);
        for (uint32_t slot = 0; slot < state->proc_high; slot++)
            if (state->procs[slot].role != SIM_ROLE_NONE)
                sum += sim_usage_bytes(&state->procs[slot].use[gpu]);
        state->gpus[gpu].used = sum;
    }
}

static uint64_t *counter(struct sim_usage *use, enum sim_kind kind)
{
    return kind == SIM_CONTEXT ? &use->context : kind == SIM_MODULE ? &use->module : &use->memory;
}

static uint64_t charged(const struct sim_state *state, uint64_t bytes)
{
    uint64_t unit = state->granularity;
    if (unit <= 1)
        return bytes;
    return bytes > UINT64_MAX - unit ? UINT64_MAX : (bytes + unit - 1) / unit * unit;
}

/* Returns the index of the GPU instance in which this process runs on that GPU, or -1. */
static int instance(int gpu)
{
    uint32_t in = sim_self.state->procs[sim_self.slot].use[gpu].instance;
    return in ? (int)((in - 1) >> 8) : -1;
}

void sim_use_instance(int gpu, int gi, int ci)
{
    sim_lock();
    sim_self.state->procs[sim_self.slot].use[gpu].instance = ((uint32_t)gi << 8 | (uint32_t)ci) + 1;
    sim_unlock();
}

uint64_t sim_instance_used(int gpu, int gi)
{
    const struct sim_state *state = sim_self.state;
    uint64_t bytes = 0;
    for (uint32_t slot = 0; slot < state->proc_high; slot++) {
        const struct sim_usage *use = &state->procs[slot].use[gpu];
        if (state->procs[slot].role != SIM_ROLE_NONE && use->instance && (int)((use->instance - 1) >> 8) == gi)
            bytes += sim_usage_bytes(use);
    }
    return bytes;
}

uint64_t sim_instance_total(int gpu, int gi)
{
    const struct sim_gpu *g = &sim_self.state->gpus[gpu];
    const struct sim_model *model = sim_model_find(g->model);
    for (uint32_t i = 0; i < model->mig_count; i++)
        if (model->mig[i].id == g->gi[gi].profile_id)
            return (uint64_t)model->mig[i].memory_mib << 20;
    return 0;
}

static bool fits(int index, uint64_t bytes)
{
    const struct sim_gpu *gpu = &sim_self.state->gpus[index];
    int gi = instance(index);
    uint64_t limit = gi < 0 ? gpu->total - gpu->reserved_bytes : sim_instance_total(index, gi);
    uint64_t used = gi < 0 ? gpu->used : sim_instance_used(index, gi);
    return used <= limit && bytes <= limit - used;
}

static bool may_have(int index, enum sim_kind kind, uint64_t bytes)
{
    return fits(index, bytes) && (kind == SIM_MANAGED || sim_group_allows(index, bytes));
}

enum sim_status sim_charge(int index, enum sim_kind kind, uint64_t bytes)
{
    struct sim_state *state = sim_self.state;
    struct sim_gpu *gpu = &state->gpus[index];
    enum sim_status status = SIM_OK;
    bytes = charged(state, bytes);
    sim_lock();
    if (gpu->lost) {
        status = SIM_ERR_LOST;
    } else if (!may_have(index, kind, bytes)) {
        sim_reap(); /* Free the memory of killed processes, then try again. */
        if (!may_have(index, kind, bytes))
            status = SIM_ERR_MEMORY;
    }
    if (status == SIM_OK) {
        struct sim_usage *use = &state->procs[sim_self.slot].use[index];
        *counter(use, kind) += bytes;
        if (kind == SIM_MANAGED)
            use->managed += bytes;
        else if (sim_group_skips(index))
            use->uncounted += bytes;
        gpu->used += bytes;
        uint64_t now = sim_usage_bytes(use);
        if (now > use->peak)
            use->peak = now;
    }
    sim_unlock();
    return status;
}

void sim_uncharge(int index, enum sim_kind kind, uint64_t bytes)
{
    struct sim_state *state = sim_self.state;
    struct sim_gpu *gpu = &state->gpus[index];
    bytes = charged(state, bytes);
    sim_lock();
    struct sim_usage *use = &state->procs[sim_self.slot].use[index];
    uint64_t *held = counter(use, kind);
    if (bytes > *held)
        bytes = *held; /* A counter that wraps below zero would make the GPU appear full. */
    *held -= bytes;
    /* Nobody recorded which of the process's bytes were charged to a group. So bytes that were charged to no group are
     * assumed to be freed first. */
    uint64_t *outside = kind == SIM_MANAGED ? &use->managed : &use->uncounted;
    *outside -= bytes < *outside ? bytes : *outside;
    gpu->used -= bytes;
    sim_unlock();
}

void sim_memory_info(int index, uint64_t *free_bytes, uint64_t *total_bytes)
{
    struct sim_gpu *gpu = &sim_self.state->gpus[index];
    sim_lock();
    sim_reap();
    int gi = instance(index);
    uint64_t limit = gi < 0 ? gpu->total - gpu->reserved_bytes : sim_instance_total(index, gi);
    uint64_t used = gi < 0 ? gpu->used : sim_instance_used(index, gi);
    uint64_t in_group, cap = sim_group_cap(index, &in_group);
    *total_bytes = cap < limit ? cap : limit;
    *free_bytes = used < limit ? limit - used : 0;
    if (cap < limit && *free_bytes > (in_group < cap ? cap - in_group : 0))
        *free_bytes = in_group < cap ? cap - in_group : 0;
    sim_unlock();
}
