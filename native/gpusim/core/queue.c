/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Decides which work items (kernels, copies, event records, waits) of a context's queue may start.
 *
 * Items of one stream run one after another. The legacy stream (CUDA's default stream 0) waits for all earlier items of
 * blocking streams, and later items of blocking streams wait for it. Streams made with the flag `non-blocking` ignore
 * the legacy stream.
 */
#include "queue.h"

#include "internal.h"

bool sim_may_start(const struct sim_order *order, uint32_t stream)
{
    if (stream == SIM_STREAM_LEGACY)
        return !order->blocking;
    if (!(stream & SIM_STREAM_NONBLOCKING) && order->legacy)
        return false;
    for (unsigned i = 0; i < order->count; i++)
        if (order->streams[i] == stream)
            return false;
    return order->count < SIM_ORDER_STREAMS;
}

void sim_unfinished(struct sim_order *order, uint32_t stream)
{
    if (stream == SIM_STREAM_LEGACY)
        order->legacy = true;
    if (!(stream & SIM_STREAM_NONBLOCKING))
        order->blocking = true;
    if (order->count < SIM_ORDER_STREAMS)
        order->streams[order->count++] = stream;
}

struct sim_work *sim_entry(struct sim_channel *channel, uint64_t seq)
{
    return &channel->ring[seq % SIM_QUEUE];
}

bool sim_is_done(struct sim_channel *channel, uint64_t seq)
{
    return seq < channel->head || (seq < channel->tail && sim_entry(channel, seq)->done);
}

static bool dependency_done(int gpu, const struct sim_work *work, uint64_t now)
{
    struct sim_gpu *other = &sim_self.state->gpus[work->dep_gpu];
    if (work->dep_gpu != gpu)
        sim_advance(work->dep_gpu, now);
    struct sim_channel *channel = &other->channels[work->dep_channel];
    return !channel->used || sim_is_done(channel, work->dep_seq);
}

static void finish(struct sim_work *work, uint64_t when)
{
    work->finish = when;
    work->done = 1;
}

/* Completes the item if it is due. Returns true if the item is done. */
static bool try_finish(int gpu, struct sim_work *work, uint64_t now, struct sim_runset *set)
{
    switch (work->kind) {
    case SIM_WORK_MARK:
        finish(work, now);
        break;
    case SIM_WORK_WAIT:
        if (dependency_done(gpu, work, now))
            finish(work, now);
        break;
    case SIM_WORK_COPY:
        if (!work->started) {
            work->started = 1;
            work->start = now;
            work->finish = now + work->remaining;
        }
        if (work->finish <= now)
            work->done = 1;
        else if (work->finish < set->next_copy)
            set->next_copy = work->finish;
        break;
    default:
        break;
    }
    return work->done;
}

static void add_kernel(struct sim_runset *set, struct sim_work *work, double *sms)
{
    double need = work->sms ? work->sms : 1;
    if (*sms <= 0 || set->count == sizeof set->work / sizeof set->work[0])
        return;
    set->work[set->count] = work;
    set->rate[set->count++] = need <= *sms ? 1.0 : *sms / need;
    *sms -= need;
}

bool sim_queue_scan(int gpu, struct sim_channel *channel, uint64_t now, struct sim_runset *set)
{
    struct sim_order order = {.count = 0};
    double sms = sim_self.state->gpus[gpu].sm_count;
    bool changed = false;
    set->count = 0;
    set->next_copy = UINT64_MAX;
    uint64_t end = channel->tail - channel->head > SIM_SCAN_WINDOW ? channel->head + SIM_SCAN_WINDOW : channel->tail;
    for (uint64_t seq = channel->head; seq < end; seq++) {
        struct sim_work *work = sim_entry(channel, seq);
        if (work->done)
            continue;
        bool ready = sim_may_start(&order, work->stream);
        if (ready && try_finish(gpu, work, now, set)) {
            changed = true;
            continue;
        }
        if (ready && work->kind == SIM_WORK_KERNEL)
            add_kernel(set, work, &sms);
        sim_unfinished(&order, work->stream);
        if (order.legacy && !channel->nonblocking)
            break; /* Items after an unfinished item of the legacy stream cannot start. */
    }
    while (channel->head < channel->tail && sim_entry(channel, channel->head)->done)
        channel->head++;
    return changed;
}
