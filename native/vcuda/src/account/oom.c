/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ACTIVE_OOM_KILLER: what happens to a container that is found over its limit, because the limit was lowered under it.
 * Without it new allocations are refused until enough was freed. With it the process that holds the most of the device
 * kills itself at its next call of the driver, then the next one, until the rest fits.
 *
 * No process kills another: a pid may have come to mean another process, and the one that holds the most finds the same
 * by the same figures. It sums up the living alone; a dying process still counts, so that not two die where one is enough.
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
    /* Pid 1 of a container is still here: the kernel drops what it sends to itself. */
    syscall(SYS_exit_group, 128 + SIGKILL);
}

/* Of one share's part of a device. */
static bool over(unsigned share, const char *uuid)
{
    bool known, largest;
    uint64_t own, total;
    uint64_t limit = limits_shares() == 1 ? limits_memory(uuid, -1, &known) : limits_share_memory(share, uuid, &known);
    if (!known || limit == UINT64_MAX || !ledger_shares(share, uuid, &own, &total, &largest) || total <= limit)
        return false;
    EVENT(reclaim, true); /* what pools keep for later is given back first */
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
    /* The environment's limits do not change while a process runs: only a file's can fall below what is held. */
    for (int i = limits_devices(uuids) - 1; i >= 0; i--)
        for (unsigned share = 0; share < limits_shares(); share++)
            any = over(share, uuids[i]) || any;
    return any;
}
