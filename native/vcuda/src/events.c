/* SPDX-License-Identifier: Apache-2.0 */
/* The tables of functions for each event. A package (folder of the sources) raises an event to call functions of packages
 * above it. The functions of the event's table are called in the order of the table. */
#include "events.h"

#include "account/account.h"
#include "compute/limiter.h"
#include "context/context.h"
#include "memory/memory.h"

const struct events vgpu_events = {
    /* Pools come first, because memory that a pool releases may be in use by graphs or by handles that other processes
     * have open. Also, pools_settle clears the flag vgpu_pools_dirty, which ipc_settle and vmm_settle may set again. */
    .reclaim = {pools_settle, graph_memory_settle, ipc_settle, vmm_settle},
    .charge_moved = {unaccounted_settle},
    .context_changed = {limiter_forget_thread},
    .context_leaving =
        {
            /* Runs first, because it reads timing events of the context, so the context must still exist. */
            fence_context_leaving,
            /* Takes the context out of the table of charged contexts, if this library charged it. */
            context_leaving,
            /* Gives the memory of a primary context's green contexts (parts of the GPU) to the primary context. */
            green_context_leaving,
            /* Removes the context's blocks from the tables of charges, because another thread may get the same
             * addresses at once. */
            memory_context_leaving,
        },
    .context_left =
        {
            devices_context_left,
            limiter_context_left,
            /* Uncharges the blocks, or puts them back into the tables if the driver did not end the context. */
            memory_context_left,
            green_context_left,
            /* Releases unused memory, then uncharges the context or puts it back into its table. */
            context_left,
            /* Runs last, because it compares the remaining charge with the driver's figures. */
            unaccounted_context_left,
        },
    .waited = {pools_waited, fence_waited, unaccounted_waited},
    /* These are in the order of the packages, lowest first. No function depends on another. */
    .reset =
        {
            driver_reset, blocks_reset, devices_reset, ledger_reset, limits_reset, host_memory_reset, shareable_reset,
            context_locks_reset, context_reset, unaccounted_reset,
            pools_reset, graph_memory_reset, vmm_reset, ipc_reset, external_reset,
            limiter_reset, fence_reset, tenant_reset,
        },
    .context_met = green_context_met,
};
