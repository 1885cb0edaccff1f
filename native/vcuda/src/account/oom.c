/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Implements the setting ACTIVE_OOM_KILLER. It decides what happens to a container that exceeds its limit because the
 * limit was lowered. When the setting is off, new allocations are refused until enough memory is freed. When it is on,
 * the process that uses most of the device kills itself at its next driver call, then the next largest process, until
 * usage fits the limit.
 *
 * No process kills another process, because a pid may have been reused. Such a kill is not needed either, because all
 * processes compute the same result from the same figures, and the largest process kills itself. The sum covers live
 * processes only. A process that is being killed still counts, because otherwise a second process could be killed where
 * one is enough.
 */
#include "account.h"

#include "events.h"

#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

static void end_self(const char *uuid, uint64_t own, uint64_t total, uint64_t limit)
{
    vgpu_log_line(LOG_ERROR, "this process is killed: the container holds %llu bytes of %s, over its limit of %llu, and this process %llu of them, the most",
                  (unsigned long long)total, uuid, (unsigned long long)limit, (unsigned long long)own);
    kill(getpid(), SIGKILL);
    /* Only pid 1 of a container reaches this line: the kernel drops a SIGKILL that pid 1 sends to itself. */
    syscall(SYS_exit_group, 128 + SIGKILL);
}

/* Returns true if the container exceeds the limit of one share on a device. (A share is the part of the GPUs that the
 * container got at once, with a limits file of its own.) If this process is the largest, the function kills it and does
 * not return. */
static bool over(unsigned share, const char *uuid)
{
    bool known, largest;
    uint64_t own, total;
    uint64_t limit = limits_shares() == 1 ? limits_memory(uuid, -1, &known) : limits_share_memory(share, uuid, &known);
    if (!known || limit == UINT64_MAX || !ledger_shares(share, uuid, &own, &total, &largest) || total <= limit)
        return false;
    /* First make the pools release the memory that they keep for later allocations. That may be enough. */
    EVENT(reclaim, true);
    if (!ledger_shares(share, uuid, &own, &total, &largest) || total <= limit)
        return false;
    if (largest)
        end_self(uuid, own, total, limit);
    return true;
}

bool oom_check(void)
{
    char uuids[VGPU_MAX_DEVICES][VGPU_UUID_SIZE];
    bool any = false;
    /* Limits from the environment do not change while a process runs. Only the limit in a limits file can be lowered
     * below current usage. */
    for (int i = limits_devices(uuids) - 1; i >= 0; i--)
        for (unsigned share = 0; share < limits_shares(); share++)
            any = over(share, uuids[i]) || any;
    return any;
}
