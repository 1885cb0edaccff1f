/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Opens the queue of a CUDA context on a simulated GPU (its "channel"), submits work items to it and waits for them.
 */
#include "internal.h"
#include "queue.h"

#include <string.h>

/* Interval at which waiting threads check for dead processes. The queue of a dead process must stop, because others may
 * wait for its items. */
#define REAP_NS 10000000ull
#define LONGEST_SLEEP_NS 100000000ull

int sim_channel_open(int index)
{
    struct sim_state *state = sim_self.state;
    struct sim_gpu *gpu = &state->gpus[index];
    int found = -1;
    sim_lock();
    for (int pass = 0; pass < 2 && found < 0; pass++) {
        for (int c = 0; c < SIM_MAX_CHANNELS && found < 0; c++)
            if (!gpu->channels[c].used)
                found = c;
        if (found < 0)
            sim_reap();
    }
    if (found >= 0) {
        uint64_t now = sim_now();
        sim_advance(index, now);
        struct sim_channel *channel = &gpu->channels[found];
        int slot = sim_slot();
        /* The new sequence numbers begin after those of the channel's last user. So a thread that still waits for an
         * item of that user sees the item as done. */
        uint64_t next = channel->tail ? channel->tail : 1;
        memset(channel, 0, offsetof(struct sim_channel, ring));
        channel->slot = slot;
        channel->serial = state->procs[slot].serial;
        channel->head = channel->tail = next;
        channel->used = 1;
        if ((uint32_t)found >= gpu->channel_count)
            gpu->channel_count = (uint32_t)found + 1;
        if (state->procs[slot].use[index].contexts++ == 0)
            state->procs[slot].use[index].since = now;
    }
    sim_unlock();
    if (found < 0)
        sim_fail("GPU %d: all %d contexts of the simulated GPU are in use; destroy one or end a process", index, SIM_MAX_CHANNELS);
    return found;
}

void sim_channel_free(int index, int number)
{
    struct sim_gpu *gpu = &sim_self.state->gpus[index];
    struct sim_channel *channel = &gpu->channels[number];
    struct sim_usage *use = &sim_self.state->procs[channel->slot].use[index];
    channel->used = 0;
    channel->head = channel->tail;
    if (use->contexts > 0)
        use->contexts--;
    if (gpu->holder == number) {
        gpu->holder = SIM_HOLDER_GONE;
        gpu->switch_until = gpu->slice_end = 0;
    }
}

void sim_channel_close(int gpu, int channel)
{
    sim_lock();
    sim_advance(gpu, sim_now());
    sim_channel_free(gpu, channel);
    sim_unlock();
}

/* Returns a random duration, evenly spread over cost * (1 ± jitter), because a real kernel never takes exactly the same
 * time twice. */
static uint64_t with_jitter(struct sim_gpu *gpu, uint64_t cost)
{
    uint32_t permille = sim_self.state->jitter_permille;
    if (!permille || cost >= SIM_COST_FOREVER)
        return cost;
    gpu->random ^= gpu->random << 13;
    gpu->random ^= gpu->random >> 7;
    gpu->random ^= gpu->random << 17;
    double unit = (double)(gpu->random >> 11) / (double)(1ull << 53);
    return (uint64_t)((double)cost * (1.0 + permille / 1000.0 * (2.0 * unit - 1.0)));
}

/* Returns the earliest time at which item `seq` can be done: now plus the time that the item's stream still needs. */
static uint64_t not_before(struct sim_channel *channel, uint64_t seq, uint64_t now)
{
    uint64_t sum = 0;
    uint32_t stream = sim_entry(channel, seq)->stream;
    for (uint64_t i = channel->head; i <= seq && i < channel->tail; i++) {
        const struct sim_work *work = sim_entry(channel, i);
        if (work->done || work->stream != stream)
            continue;
        if (work->kind == SIM_WORK_COPY && work->started)
            sum += work->finish > now ? work->finish - now : 0;
        else if (work->kind == SIM_WORK_KERNEL || work->kind == SIM_WORK_COPY)
            sum += work->remaining;
        if (sum > LONGEST_SLEEP_NS)
            break;
    }
    if (sum < SIM_POLL_NS)
        sum = SIM_POLL_NS; /* The end of a wait for the host or other queues is unknown: check soon. */
    return now + (sum < LONGEST_SLEEP_NS ? sum : LONGEST_SLEEP_NS);
}

static void look(int gpu, uint64_t now)
{
    if (now - sim_self.state->last_reap > REAP_NS)
        sim_reap();
    sim_advance(gpu, now);
}

uint64_t sim_submit(int index, int number, const struct sim_work *work, struct sim_work *overwritten)
{
    struct sim_gpu *gpu = &sim_self.state->gpus[index];
    struct sim_channel *channel = &gpu->channels[number];
    for (;;) {
        sim_lock();
        uint64_t now = sim_now();
        sim_advance(index, now);
        if (gpu->lost) {
            sim_unlock();
            return 0;
        }
        if (channel->tail - channel->head < SIM_QUEUE)
            break;
        look(index, now);
        uint64_t when = not_before(channel, channel->head, now);
        sim_unlock();
        sim_sleep_until(when);
    }
    uint64_t seq = channel->tail;
    struct sim_work *slot = sim_entry(channel, seq);
    if (overwritten)
        *overwritten = *slot;
    *slot = *work;
    slot->seq = seq;
    channel->nonblocking |= work->stream & SIM_STREAM_NONBLOCKING;
    slot->done = slot->started = 0;
    slot->start = slot->finish = 0;
    if (work->kind == SIM_WORK_KERNEL)
        slot->remaining = with_jitter(gpu, work->remaining);
    channel->tail = seq + 1;
    sim_unlock();
    return seq;
}

bool sim_work_done(int index, int number, uint64_t seq, uint64_t *when)
{
    struct sim_channel *channel = &sim_self.state->gpus[index].channels[number];
    sim_lock();
    look(index, sim_now());
    struct sim_runset set;
    if (channel->head != channel->tail)
        sim_queue_scan(index, channel, sim_self.state->gpus[index].simulated, &set);
    bool done = sim_is_done(channel, seq);
    if (when)
        *when = done && sim_entry(channel, seq)->seq == seq ? sim_entry(channel, seq)->finish : 0;
    sim_unlock();
    return done;
}

bool sim_work_reached(int index, int number, uint64_t seq)
{
    struct sim_channel *channel = &sim_self.state->gpus[index].channels[number];
    struct sim_order order = {.count = 0};
    sim_lock();
    look(index, sim_now());
    for (uint64_t i = channel->head; i < seq; i++)
        if (!sim_entry(channel, i)->done)
            sim_unfinished(&order, sim_entry(channel, i)->stream);
    bool reached = sim_is_done(channel, seq) || sim_may_start(&order, sim_entry(channel, seq)->stream);
    sim_unlock();
    return reached;
}

void sim_work_release(int index, int number, uint64_t seq)
{
    struct sim_channel *channel = &sim_self.state->gpus[index].channels[number];
    sim_lock();
    uint64_t now = sim_now();
    sim_advance(index, now);
    if (!sim_is_done(channel, seq))
        sim_entry(channel, seq)->finish = now, sim_entry(channel, seq)->done = 1;
    sim_unlock();
}

bool sim_work_wait(int index, int number, uint64_t seq, uint64_t *when)
{
    struct sim_gpu *gpu = &sim_self.state->gpus[index];
    struct sim_channel *channel = &gpu->channels[number];
    while (!sim_work_done(index, number, seq, when)) {
        sim_lock();
        bool lost = gpu->lost || !channel->used;
        uint64_t until = sim_is_done(channel, seq) ? 0 : not_before(channel, seq, sim_now());
        sim_unlock();
        if (lost)
            return false;
        sim_sleep_until(until);
    }
    return true;
}

bool sim_channel_wait(int index, int number)
{
    struct sim_channel *channel = &sim_self.state->gpus[index].channels[number];
    sim_lock();
    uint64_t last = channel->tail - 1, head = channel->head;
    sim_unlock();
    /* Items may end in any order, so it is not enough to wait for the last one. */
    for (uint64_t seq = head; seq <= last; seq++)
        if (!sim_work_wait(index, number, seq, NULL))
            return false;
    return true;
}

bool sim_channel_idle(int index, int number)
{
    struct sim_channel *channel = &sim_self.state->gpus[index].channels[number];
    sim_lock();
    look(index, sim_now());
    bool idle = channel->head == channel->tail;
    sim_unlock();
    return idle;
}
