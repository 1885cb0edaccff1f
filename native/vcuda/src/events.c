/* SPDX-License-Identifier: Apache-2.0 */
/* Who is called when a lower package reports something, in the order in which it must run. */
#include "events.h"

#include "account/account.h"
#include "compute/limiter.h"
#include "context/context.h"
#include "memory/memory.h"

const struct events vgpu_events = {
    /* Pools first: what they give back may be what graphs, and handles that others have open, wait for. */
    .reclaim = {pools_settle, graph_memory_settle, ipc_settle, vmm_settle},
    .charge_moved = {unaccounted_settle},
    .context_changed = {limiter_forget_thread},
    .context_leaving =
        {
            fence_context_leaving,  /* needs the context still to be entered */
            context_leaving,        /* out of the table of contexts: is it one of ours? */
            green_context_leaving,  /* of a primary context its green ones, whose memory becomes its own */
            memory_context_leaving, /* out of the tables: another thread may get the same addresses at once */
        },
    .context_left =
        {
            devices_context_left,
            limiter_context_left,
            memory_context_left, /* uncharged, or back in the tables */
            green_context_left,
            context_left,         /* reclaims, then uncharges the context itself or puts it back */
            unaccounted_context_left, /* compares what is left of the charge, so it comes last */
        },
    .waited = {pools_waited, fence_waited, unaccounted_waited},
    /* From the ground up; none of them asks another. */
    .reset =
        {
            driver_reset, blocks_reset, devices_reset, ledger_reset, limits_reset, host_memory_reset,
            context_locks_reset, context_reset, unaccounted_reset,
            pools_reset, graph_memory_reset, vmm_reset, ipc_reset, external_reset,
            limiter_reset, fence_reset, tenant_reset,
        },
    .context_met = green_context_met,
};
