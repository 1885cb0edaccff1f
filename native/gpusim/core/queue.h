/* SPDX-License-Identifier: Apache-2.0 */
/* Between the engine (engine.c) and the queues of contexts (queue.c). */
#ifndef GPUSIM_QUEUE_H
#define GPUSIM_QUEUE_H

#include "sim.h"

#define SIM_HOLDER_NONE (-1) /* nobody has held the GPU yet: the first context is loaded for nothing */
#define SIM_HOLDER_GONE (-2) /* the last holder's context is gone: the next one still has to be loaded */
#define SIM_SCAN_WINDOW 128  /* a context looks this far ahead for kernels that can run concurrently */
#define SIM_POLL_NS 20000ull

struct sim_runset {
    unsigned count;
    struct sim_work *work[32];
    double rate[32];    /* 0 < rate <= 1 */
    uint64_t next_copy; /* when the first running copy ends */
};

/* What is unfinished before an item, as far as order between streams goes. */
#define SIM_ORDER_STREAMS 64
struct sim_order {
    uint32_t streams[SIM_ORDER_STREAMS]; /* that have an unfinished item */
    unsigned count;
    bool blocking, legacy; /* an unfinished item of a blocking stream; of the legacy stream */
};
bool sim_may_start(const struct sim_order *order, uint32_t stream);
void sim_unfinished(struct sim_order *order, uint32_t stream);

struct sim_work *sim_entry(struct sim_channel *channel, uint64_t seq);
bool sim_is_done(struct sim_channel *channel, uint64_t seq);

/* Completes what is due in the channel at `now`, starts copies, and lists the kernels that could run. True if anything
 * was completed. Lock held. */
bool sim_queue_scan(int gpu, struct sim_channel *channel, uint64_t now, struct sim_runset *set);

#endif
