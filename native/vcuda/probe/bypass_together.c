/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tries concurrently all bypasses that cannot be prevented. The node's watcher must then name the process of each of
 * them. The watcher compares the memory that the driver shows for each process with the process's slot in the ledger,
 * the container's file of charged memory. Even in an empty slice it finds a process without a slot, or with more memory
 * than its slot records. So the slice is not filled first, and other containers on the card lose less memory.
 */
#include "bypass.h"

#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define PREFIX "bypass-"

static const struct way {
    const char *name;
    way_round attempt;
    void (*holder)(const struct fill *fill);
    enum verdict if_granted;
} ways[] = {
#define WAY_ROW(way, name, attempt, holder, if_granted) {name, attempt, holder, if_granted},
    BYPASSES(WAY_ROW)
};

static const struct way *way_of(const char *name)
{
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++)
        if (strcmp(ways[i].name, name) == 0)
            return &ways[i];
    return NULL;
}

bool may_be_open(const char *name)
{
    const struct way *way = way_of(name);
    return way && way->if_granted == OPEN;
}

/* Allocates memory as an ordinary program does, and then calls the bypass's holder function, which falsifies the
 * ledger. Allocates more than any watcher tolerates, even a watcher that does not count contexts. */
static enum attempt hold_and(const struct way *way, const struct fill *fill)
{
    char reason[200];
    CUcontext context;
    CUdeviceptr pointer;
    size_t free_bytes = 0, total = 0;
    const struct cuda *cuda = cuda_open(reason, sizeof reason);
    if (!cuda)
        return cuda_handle() ? REFUSED : UNABLE;
    if (cuda->ctx_create(&context, 0, fill->device) != CUDA_SUCCESS || cuda->mem_info(&free_bytes, &total) != CUDA_SUCCESS)
        return UNABLE; /* A refusal may come from a full card, so it proves nothing. */
    size_t bytes = contexts_count(fill) && free_bytes > 8 * BEYOND ? 4 * BEYOND : free_bytes / 2;
    if (cuda->mem_alloc(&pointer, bytes) != CUDA_SUCCESS)
        return UNABLE;
    way->holder(fill);
    if (fill->board->status[1] < 0)
        return UNABLE;
    if (ledger_own_bytes() >= (int64_t)bytes)
        return REFUSED;
    hold_what_was_got();
    return GRANTED;
}

static void begin(const struct way *way, const struct fill *fill)
{
    prctl(PR_SET_NAME, way->name + strlen(PREFIX), 0, 0, 0);
    alarm(ATTEMPT_S);
    become_the_tenant();
    _exit((int)(way->attempt ? way->attempt(fill) : hold_and(way, fill)));
}

void go_together(const struct slice *slice, struct board *board, const char *const names[], int count, struct result results[])
{
    pid_t pids[MOST_TOGETHER];
    const struct device_row *row = &board->report.devices[0];
    const struct vgpu_limits_device *limit = board->report.device_count ? slice_device(slice, row->uuid) : NULL;
    struct fill fill = {slice, board, 0, row->uuid, limit ? limit->memory_bytes : 0};
    bool in_use = ledger_in_use();
    slice_is_empty = true;
    fflush(stdout);
    for (int i = 0; i < count; i++) {
        const struct way *way = way_of(names[i]);
        /* Bypasses that write into the ledger may also change the charges of other processes. */
        bool spoils = way->holder != NULL || way->attempt == boast_in_the_ledger;
        pids[i] = limit && !(spoils && in_use) ? fork() : -1;
        if (pids[i] == 0)
            begin(way, &fill);
    }
    for (int i = 0; i < count; i++) {
        int status = 0;
        /* A process that was killed by a signal also counts as UNABLE: the node's policy may be to kill it. */
        enum attempt attempt = UNABLE;
        if (pids[i] > 0 && waitpid(pids[i], &status, 0) == pids[i] && WIFEXITED(status))
            attempt = (enum attempt)WEXITSTATUS(status);
        result_set(&results[i], attempt == GRANTED ? OPEN : attempt == UNABLE ? NOT_RUN : PASSED, 0, attempt == GRANTED ? BEYOND : 0,
                   "bytes", "%s: tried with other bypasses: %s", limit ? row->uuid : "no GPU",
                   attempt == GRANTED   ? "the granted memory is charged to no process, or exceeds the node's limits"
                   : attempt == REFUSED ? "the memory was refused or charged"
                   : attempt == CLOSED  ? "the kernel refuses what the bypass needs"
                                        : "the bypass cannot be tried now");
    }
}
