/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Decides which tenant (container) of one GPU has the turn to use it. The code reads neither the clock nor the shared
 * files (pages) of the tenants: the caller passes the time and the pages' values. So the same object code runs in
 * vgpu-arbiter and in the model of the tests.
 *
 * A gate is a tenant's permission to run. If only one tenant wants the GPU, its gate is open, so it may run at any
 * time. If all tenants have high priority, all gates are open. Otherwise tenants take turns. One tenant holds the turn,
 * and its work is finished before the next turn begins, so that the elapsed time can be charged to the holder. The next
 * turn goes to the tenant that is furthest behind its share. A tenant of high priority goes first until it has used up
 * its share.
 */
#ifndef VGPU_SCHEDULE_H
#define VGPU_SCHEDULE_H

#include <stdbool.h>
#include <stdint.h>

#define SCHEDULE_TENANTS 64

/* The caller sets these fields for each tenant before each step: the first four from the tenant's limits file, the
 * others from its tenant page. */
struct schedule_input {
    uint32_t share_ppm;
    bool force, high;
    bool unlimited; /* The policy is `disable` or the share is 100 %. Such a tenant always runs and reports nothing. */
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
    bool active;      /* active: the tenant launched or waited recently, or its work is still running. */
    /* credit: device time that the tenant may still claim; below 0 if it has had more than its share. */
    int64_t credit;
    /* waits_since: time since which a launch of the tenant has been waiting; 0 if no launch waits. */
    uint64_t waits_since;
    uint32_t gave_up; /* gave_up: number of consecutive turns that the tenant gave up early. */
    uint64_t burst;   /* burst: mean device time of these turns. */
    uint64_t served;  /* served: end of the tenant's last turn. */
    uint64_t used_at; /* used_at: value of in.used_ns when the turn began or was last charged. */
    bool late;        /* late: the tenant was charged for its last turn before the work of that turn was finished. */
    int64_t beyond;   /* beyond: the charge for the work that was then still running. */
};

struct schedule {
    struct schedule_tenant tenant[SCHEDULE_TENANTS];
    enum { SCHEDULE_FREE, SCHEDULE_NOBODY, SCHEDULE_TURN, SCHEDULE_DRAIN } state;
    /* holder: the tenant that has the turn, or whose queued work must finish before the next turn; -1 if there is none.
     * In the state SCHEDULE_DRAIN, -1 means that the queued work of all tenants must finish. */
    int holder;
    unsigned alone; /* alone: 1 + the index of the only active tenant; 0 if no tenant or more than one is active. */
    uint64_t turn_start, turn_end, drain_until, stepped;
};

/* Reads each tenant's `in`, decides who may run, and writes each tenant's `out`. The next step must follow at the
 * returned time or earlier. */
uint64_t schedule_step(struct schedule *schedule, uint64_t now);
/* Returns true if the priority rule lets this tenant run without a limit of compute time. busy_others: number of other
 * active tenants. all_high: all tenants of the GPU have high priority. unknown_others: a tenant without a limit exists,
 * and such a tenant does not report whether it is busy. */
bool schedule_unlimited(const struct schedule_input *tenant, unsigned busy_others, bool all_high, bool unknown_others);

#endif
