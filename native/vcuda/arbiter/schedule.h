/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Decides which tenant of one GPU has the turn. Pure: time is an argument and the caller handles the pages, so the same
 * object code runs in vgpu-arbiter and in the model of the tests.
 *
 * Without contention (at most one tenant wants the GPU, or all tenants have high priority) every gate is open.
 * Otherwise tenants take turns: one holder at a time, whose work is drained before the next turn begins, so that its
 * elapsed time is its own. The tenant that had least of its share is next. High priority goes first while it is within
 * its share.
 */
#ifndef VGPU_SCHEDULE_H
#define VGPU_SCHEDULE_H

#include <stdbool.h>
#include <stdint.h>

#define SCHEDULE_TENANTS 64

/* The caller's input for a tenant before each step: the first four fields from its limits file, the others from its
 * page. */
struct schedule_input {
    uint32_t share_ppm;
    bool force, high;
    bool unlimited; /* policy disable, or a share of 100 %: it always runs and reports nothing */
    uint64_t active_ns, waiting_ns, busy_until_ns, used_ns;
};

/* The fields that the caller writes into the tenant's gpu page. */
struct schedule_output {
    uint32_t gate, flags, rate_ppm, outstanding_max_us;
    uint64_t turn_start_ns, turn_end_ns;
    uint32_t turns;
};

struct schedule_tenant {
    bool present;
    struct schedule_input in;
    struct schedule_output out;
    bool active;      /* Wanted the GPU recently. */
    int64_t credit;   /* Device time that it may still claim; below 0: it had too much. */
    uint64_t waits_since; /* Since when a launch of it has been waiting; 0: none. */
    uint32_t gave_up; /* Consecutive turns that it gave up early. */
    uint64_t burst;   /* Mean device time of its last such turns. */
    uint64_t served;  /* End of its last turn. */
    uint64_t used_at; /* used_ns at the begin of its turn, or at the last charge of that turn. */
    bool late;        /* Its last turn was charged before its work was finished. */
    int64_t beyond;   /* The charge for work that was still running then. */
};

struct schedule {
    struct schedule_tenant tenant[SCHEDULE_TENANTS];
    enum { SCHEDULE_FREE, SCHEDULE_NOBODY, SCHEDULE_TURN, SCHEDULE_DRAIN } state;
    int holder; /* The tenant that has the turn or is being drained; -1: all that ran when turns began. */
    unsigned alone; /* 1 + the index of the only tenant that wants the GPU; 0: none, or several of high priority. */
    uint64_t turn_start, turn_end, drain_until, stepped;
};

/* Takes the inputs, decides, and writes the outputs. Returns the latest time for the next step. */
uint64_t schedule_step(struct schedule *schedule, uint64_t now);
/* Returns true if this tenant may run without a core limit, by the priority rule. `busy_others`: number of other
 * tenants that want the GPU now. all_high: all tenants of the GPU have high priority. */
bool schedule_unlimited(const struct schedule_input *tenant, unsigned busy_others, bool all_high, bool unknown_others);

#endif
