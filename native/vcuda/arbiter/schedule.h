/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whose turn it is on one GPU. Pure: time is an argument, pages are the caller's business; the same object code runs in
 * vgpu-arbiter and in the model of the tests.
 *
 * Without contention (nobody or one wants the GPU, or all tenants are of high priority) every gate is open. Otherwise
 * those who want it take turns: one holder at a time, drained before the next begins, so that each one's elapsed time
 * is its own. Who has had least of its share comes next; high priority first, as long as it is within its share.
 */
#ifndef VGPU_SCHEDULE_H
#define VGPU_SCHEDULE_H

#include <stdbool.h>
#include <stdint.h>

#define SCHEDULE_TENANTS 64

/* What the caller knows of a tenant before each step: the first four from its limits file, the others from its page. */
struct schedule_input {
    uint32_t share_ppm;
    bool force, high;
    bool unlimited; /* policy disable, or a share of all: it runs when it likes and reports nothing */
    uint64_t active_ns, waiting_ns, busy_until_ns, used_ns;
};

/* What the caller writes into the tenant's gpu page. */
struct schedule_output {
    uint32_t gate, flags, rate_ppm, outstanding_max_us;
    uint64_t turn_start_ns, turn_end_ns;
    uint32_t turns;
};

struct schedule_tenant {
    bool present;
    struct schedule_input in;
    struct schedule_output out;
    bool active;      /* wanted the GPU lately */
    int64_t credit;   /* device time that it is owed (below 0: had too much) */
    uint64_t waits_since; /* a launch of it has been waiting from then on; 0: none */
    uint32_t gave_up; /* turns in a row that it gave up, */
    uint64_t burst;   /* and what it took in them: the mean of the last ones */
    uint64_t served;  /* end of its last turn */
    uint64_t used_at; /* used_ns when its turn began, or when that was last charged */
    bool late;        /* its last turn was charged before its work was done */
    int64_t beyond;   /* what it was charged then for what was still to run */
};

struct schedule {
    struct schedule_tenant tenant[SCHEDULE_TENANTS];
    enum { SCHEDULE_FREE, SCHEDULE_NOBODY, SCHEDULE_TURN, SCHEDULE_DRAIN } state;
    int holder; /* of the turn, or the one that is being drained; -1: those that ran when turns began */
    unsigned alone; /* 1 + who wants the GPU while nobody else does; 0: nobody, or several of high priority */
    uint64_t turn_start, turn_end, drain_until, stepped;
};

/* Takes the inputs, decides, writes the outputs. Answers when to step again at the latest. */
uint64_t schedule_step(struct schedule *schedule, uint64_t now);
/* The truth table of the priority rule: may this tenant run without a core limit? `busy_others`: other tenants that want
 * the GPU now; all_high: of all tenants of the GPU. */
bool schedule_unlimited(const struct schedule_input *tenant, unsigned busy_others, bool all_high, bool unknown_others);

#endif
