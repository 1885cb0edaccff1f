/* SPDX-License-Identifier: Apache-2.0 */
/* Interface between the engine, which simulates a GPU's time (engine.c), and the queues of the contexts (queue.c). A
 * channel is the queue of a context. A GPU's "holder" is the context whose kernels run now. */
#ifndef GPUSIM_QUEUE_H
#define GPUSIM_QUEUE_H

#include "sim.h"

/* Value of the holder before any context ran. The switch to the first context then costs no time. */
#define SIM_HOLDER_NONE (-1)
/* Value of the holder after the context that ran last was destroyed. The switch to the next context still costs
 * time. */
#define SIM_HOLDER_GONE (-2)
/* Number of queued items, from the oldest, among which the engine looks for kernels that can run concurrently. */
#define SIM_SCAN_WINDOW 128
#define SIM_POLL_NS 20000ull

struct sim_runset {
    unsigned count;
    struct sim_work *work[32];
    /* Speed of each kernel as a fraction of its full speed, 0 < rate <= 1. */
    double rate[32];
    /* Time at which the first running copy ends. */
    uint64_t next_copy;
};

/* Summary of the unfinished items in front of an item. It decides whether the item's stream may start the item now. */
#define SIM_ORDER_STREAMS 64
struct sim_order {
    /* Streams with an unfinished item. */
    uint32_t streams[SIM_ORDER_STREAMS];
    unsigned count;
    /* blocking: some blocking stream (the legacy stream included) has an unfinished item. legacy: the legacy stream has
     * one. */
    bool blocking, legacy;
};
bool sim_may_start(const struct sim_order *order, uint32_t stream);
void sim_unfinished(struct sim_order *order, uint32_t stream);

struct sim_work *sim_entry(struct sim_channel *channel, uint64_t seq);
bool sim_is_done(struct sim_channel *channel, uint64_t seq);

/* Completes the channel's items that are due at `now`, starts the copies whose turn in their stream has come, and lists
 * in *set the kernels that may run. Returns true if any item was completed. The caller must hold the lock. */
bool sim_queue_scan(int gpu, struct sim_channel *channel, uint64_t now, struct sim_runset *set);

#endif
