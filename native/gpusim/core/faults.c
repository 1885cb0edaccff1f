/* SPDX-License-Identifier: Apache-2.0 */
/* Injects faults of the hardware into the simulated host: Xid messages (the driver's error reports), ECC errors, and GPUs that fall off the bus. */
#include "internal.h"

#include <stdatomic.h>

void sim_event_add(int gpu, enum sim_event_kind kind, uint64_t data)
{
    struct sim_state *state = sim_self.state;
    struct sim_event *event = &state->events[state->event_count % SIM_EVENTS];
    *event = (struct sim_event){.number = state->event_count + 1, .time = sim_now(), .gpu = (uint32_t)gpu,
                                .kind = kind, .data = data};
    state->event_count++;
    atomic_fetch_add(&state->event_seq, 1);
    sim_futex_wake(&state->event_seq, INT32_MAX);
}

void sim_gpu_lose(int gpu)
{
    sim_advance(gpu, sim_now());
    sim_self.state->gpus[gpu].lost = 1;
    sim_event_add(gpu, SIM_EVENT_XID, 79); /* Xid 79 means that the GPU has fallen off the bus. */
}

void sim_gpu_recover(int gpu)
{
    struct sim_gpu *g = &sim_self.state->gpus[gpu];
    sim_advance(gpu, sim_now());
    /* Contexts of a lost GPU stay broken, so their queued work must not run after the recovery. */
    for (uint32_t c = 0; g->lost && c < g->channel_count; c++)
        g->channels[c].head = g->channels[c].tail;
    g->lost = 0;
}

void sim_event_wait(uint32_t seen, unsigned timeout_ms)
{
    /* This wait takes real time. On a virtual clock the timeout would move the time (mode `auto`) or might never come
     * (mode `manual`). */
    if (atomic_load(&sim_self.state->event_seq) == seen)
        sim_futex_wait(&sim_self.state->event_seq, seen, (uint64_t)timeout_ms * 1000000u);
}
