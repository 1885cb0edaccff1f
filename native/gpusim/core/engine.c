/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs the queued work of a GPU: a discrete-event simulation in the shared state. Each caller that reads the state
 * first advances the simulation (sim_advance). No thread and no daemon does this. The state is final up to the time
 * `simulated`; later times are not simulated yet.
 *
 * Only one context's kernels run at a time. The GPU switches to another context when the time slice is over and another
 * context has kernels, or when the running context has none; a switch costs switch_ns. Kernels of several streams of
 * one context share the SMs in queue order; a kernel that gets only a part of its SMs runs proportionally slower.
 * Copies run concurrently with kernels. Only this file counts, logs and samples the run times.
 */
#include "internal.h"
#include "queue.h"

#include <string.h>

uint64_t sim_slice_ns(int gpu)
{
    /* Factors for NVML's time slices `default`, `short`, `medium`, `long`. The driver's figures are not public; these
     * ratios are an assumption of the simulation. */
    static const unsigned scale[] = {1, 1, 2, 4};
    return sim_self.state->slice_ns * scale[sim_self.state->gpus[gpu].time_slice & 3];
}

void sim_engine_reset(int index, uint64_t now, uint64_t seed)
{
    struct sim_gpu *gpu = &sim_self.state->gpus[index];
    gpu->simulated = now;
    gpu->random = seed * 2862933555777941757u + 3037000493u;
    gpu->random |= 1;
    gpu->holder = SIM_HOLDER_NONE;
    gpu->slice_end = gpu->switch_until = 0;
    gpu->busy_ns = gpu->switch_ns = gpu->switches = 0;
    gpu->sample_next = now + SIM_SAMPLE_NS;
    gpu->sample_busy = gpu->sample_count = gpu->log_count = 0;
}

static void log_interval(struct sim_gpu *gpu, int channel, enum sim_run kind, uint64_t start, uint64_t end)
{
    const struct sim_channel *c = &gpu->channels[channel];
    if (gpu->log_count > 0) {
        struct sim_interval *last = &gpu->log[(gpu->log_count - 1) % SIM_LOG];
        if (last->end == start && last->kind == kind && last->channel == channel && last->serial == c->serial) {
            last->end = end;
            return;
        }
    }
    gpu->log[gpu->log_count % SIM_LOG] = (struct sim_interval){
        .start = start, .end = end, .serial = c->serial, .pid = sim_self.state->procs[c->slot].pid,
        .kind = (uint16_t)kind, .channel = (uint16_t)channel};
    gpu->log_count++;
}

static void take_sample(struct sim_gpu *gpu, uint64_t time, int channel)
{
    struct sim_sample *sample = &gpu->samples[gpu->sample_count % SIM_SAMPLES];
    uint32_t util = (uint32_t)(gpu->sample_busy * 10000 / SIM_SAMPLE_NS);
    *sample = (struct sim_sample){.time = time, .slot = -1, .sm_util = util > 10000 ? 10000 : util};
    sample->mem_util = sample->sm_util / 2;
    if (channel >= 0) {
        sample->slot = gpu->channels[channel].slot;
        sample->serial = gpu->channels[channel].serial;
        sample->pid = sim_self.state->procs[sample->slot].pid;
    }
    gpu->sample_count++;
    gpu->sample_busy = 0;
    gpu->sample_next = time + SIM_SAMPLE_NS;
}

/* Advances an idle GPU: writes empty utilization samples, at most as many as the ring can show, and skips the rest. */
static void pass_idle(struct sim_gpu *gpu, uint64_t now)
{
    if (now > gpu->sample_next + (SIM_SAMPLES + 1) * SIM_SAMPLE_NS) {
        take_sample(gpu, gpu->sample_next, -1);
        uint64_t skipped = (now - gpu->sample_next) / SIM_SAMPLE_NS - SIM_SAMPLES;
        gpu->sample_next += skipped * SIM_SAMPLE_NS;
        gpu->sample_count += skipped;
    }
    while (gpu->sample_next <= now)
        take_sample(gpu, gpu->sample_next, -1);
    gpu->simulated = now;
}

/* Completes the items that take no time and starts copies, in every channel (the queue of a context). Repeats this
 * while a finished item of one channel lets items of another start. Returns the time at which the first copy ends;
 * *busy receives the number of channels with unfinished work. */
static uint64_t settle(int index, uint64_t now, unsigned *busy)
{
    struct sim_gpu *gpu = &sim_self.state->gpus[index];
    uint64_t next = UINT64_MAX;
    bool changed = true;
    for (int round = 0; changed && round < 4; round++) {
        changed = false;
        next = UINT64_MAX;
        *busy = 0;
        for (uint32_t c = 0; c < gpu->channel_count; c++) {
            struct sim_channel *channel = &gpu->channels[c];
            if (!channel->used || channel->head == channel->tail)
                continue;
            struct sim_runset set;
            changed = sim_queue_scan(index, channel, now, &set) || changed;
            *busy += channel->head != channel->tail;
            if (set.next_copy < next)
                next = set.next_copy;
        }
    }
    return next;
}

static bool runnable(int index, int channel, uint64_t now, struct sim_runset *set)
{
    struct sim_channel *c = &sim_self.state->gpus[index].channels[channel];
    set->count = 0;
    if (!c->used || c->head == c->tail)
        return false;
    sim_queue_scan(index, c, now, set);
    return set->count > 0;
}

/* Chooses the channel that runs next and fills its set of kernels. Returns -1 if no channel has a kernel to run. */
static int choose(int index, uint64_t now, struct sim_runset *set)
{
    struct sim_gpu *gpu = &sim_self.state->gpus[index];
    int count = (int)gpu->channel_count, holder = gpu->holder;
    bool has_work = holder >= 0 && runnable(index, holder, now, set);
    if (has_work && now < gpu->slice_end)
        return holder;
    for (int step = 1; step <= count; step++) {
        int other = (holder < 0 ? step - 1 : (holder + step) % count);
        if (other == holder)
            continue;
        struct sim_runset candidate;
        if (!runnable(index, other, now, &candidate))
            continue;
        *set = candidate;
        gpu->switch_until = holder == SIM_HOLDER_NONE ? now : now + sim_self.state->switch_ns;
        gpu->switches += holder != SIM_HOLDER_NONE;
        gpu->slice_end = gpu->switch_until + sim_slice_ns(index);
        gpu->holder = other;
        return other;
    }
    if (has_work) /* If no other channel has work, this channel gets a new time slice without a switch. */
        gpu->slice_end = now + sim_slice_ns(index);
    return has_work ? holder : -1;
}

static uint64_t run(struct sim_gpu *gpu, int channel, const struct sim_runset *set, uint64_t now, uint64_t until)
{
    struct sim_channel *c = &gpu->channels[channel];
    for (unsigned i = 0; i < set->count; i++) {
        double end = (double)set->work[i]->remaining / set->rate[i];
        if (end < (double)(until - now))
            until = now + (uint64_t)end + ((double)(uint64_t)end < end);
    }
    uint64_t ran = until - now;
    struct sim_usage *use = &sim_self.state->procs[c->slot].use[gpu - sim_self.state->gpus];
    for (unsigned i = 0; i < set->count; i++) {
        struct sim_work *work = set->work[i];
        uint64_t progress = (uint64_t)((double)ran * set->rate[i] + 0.5);
        if (!work->started) {
            work->started = 1;
            work->start = now;
        }
        if (progress < work->remaining) {
            work->remaining -= progress;
            continue;
        }
        work->remaining = 0;
        work->finish = until;
        work->done = 1;
        use->kernels++;
    }
    gpu->busy_ns += ran;
    gpu->sample_busy += ran;
    c->busy_ns += ran;
    use->busy_ns += ran;
    if (ran > 0)
        log_interval(gpu, channel, SIM_RUN_KERNEL, now, until);
    return until;
}

void sim_advance(int index, uint64_t now)
{
    /* Bitmap of the GPUs that this thread is advancing. A wait for another GPU's item advances that GPU too; the bitmap
     * prevents endless recursion if two GPUs wait for each other. */
    static __thread uint32_t busy;
    struct sim_gpu *gpu = &sim_self.state->gpus[index];
    if (now <= gpu->simulated || busy & 1u << index)
        return;
    if (gpu->lost) {
        gpu->simulated = now;
        return;
    }
    busy |= 1u << index;
    while (gpu->simulated < now) {
        uint64_t time = gpu->simulated, until = now;
        unsigned contexts = 0;
        struct sim_runset set;
        uint64_t copy = settle(index, time, &contexts);
        if (contexts == 0) {
            pass_idle(gpu, now);
            break;
        }
        if (copy < until)
            until = copy;
        if (gpu->sample_next < until)
            until = gpu->sample_next;
        int channel = choose(index, time, &set);
        if (channel >= 0 && time < gpu->switch_until) {
            if (gpu->switch_until < until)
                until = gpu->switch_until;
            gpu->switch_ns += until - time;
            log_interval(gpu, channel, SIM_RUN_SWITCH, time, until);
        } else if (channel >= 0) {
            if (contexts > 1 && gpu->slice_end < until)
                until = gpu->slice_end;
            until = run(gpu, channel, &set, time, until);
            if (until > gpu->slice_end) /* If only one channel has work, one step may take several time slices. */
                gpu->slice_end += (until - gpu->slice_end + sim_slice_ns(index) - 1) / sim_slice_ns(index) *
                                  sim_slice_ns(index);
        } else {
            /* Only copies are left, or items that wait for the host or another GPU. The end of such a wait is unknown,
             * so the engine takes short steps: a 64th of the remaining time, at least SIM_POLL_NS. So a long gap does
             * not take too many steps. */
            uint64_t step = (now - time) / 64 > SIM_POLL_NS ? (now - time) / 64 : SIM_POLL_NS;
            if (time + step < until)
                until = time + step;
        }
        gpu->simulated = until;
        if (until == gpu->sample_next)
            take_sample(gpu, until, channel);
    }
    unsigned contexts;
    settle(index, gpu->simulated, &contexts);
    busy &= ~(1u << index);
}
