/* SPDX-License-Identifier: Apache-2.0 */
/* Four processes of the slice at once, each taking all that it can get: together they get the limit, to the byte. */
#include "probe.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define RACERS 4
#define PATIENCE_MS 60000

/* false: not all came within a minute. */
static bool wait_for(_Atomic int *counter, int wanted)
{
    for (int waited = 0; waited < PATIENCE_MS; waited++) {
        if (atomic_load(counter) >= wanted)
            return true;
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    }
    return false;
}

static void race(struct board *board, int racer, CUdevice device, const char *uuid, uint64_t limit)
{
    char reason[200];
    CUcontext context;
    struct nvml_figures figures;
    const struct cuda *cuda = cuda_open(reason, sizeof reason);
    CUresult status = cuda ? cuda->ctx_create(&context, 0, device) : CUDA_ERROR_NO_DEVICE;
    board->status[racer] = status;
    atomic_fetch_add(&board->ready, 1);
    if (status == CUDA_SUCCESS && wait_for(&board->go, 1)) {
        if (nvml_figures(uuid, &figures))
            board->own[racer] = figures.own; /* the context alone */
        for (uint64_t piece = limit / 16; piece; piece /= 2) {
            CUdeviceptr pointer;
            for (int times = 0; times < 64 && cuda->mem_alloc(&pointer, piece) == CUDA_SUCCESS; times++)
                board->granted[racer] += piece;
        }
    }
    atomic_fetch_add(&board->done, 1);
    wait_for(&board->go, 2); /* the others must meet what this one holds */
    _exit(0);
}

static bool measure(const struct slice *slice, struct board *board, CUdevice device, const char *uuid, uint64_t limit)
{
    int pids[RACERS], failed = 0, contextless = 0;
    uint64_t granted = 0, contexts = 0;
    board->ready = board->done = board->go = 0;
    memset(board->granted, 0, sizeof board->granted);
    memset(board->own, 0, sizeof board->own);
    for (int i = 0; i < RACERS; i++) {
        pids[i] = fork();
        if (pids[i] == 0)
            race(board, i, device, uuid, limit);
    }
    bool all = wait_for(&board->ready, RACERS);
    atomic_store(&board->go, 1);
    all = all && wait_for(&board->done, RACERS);
    uint64_t outside = nvml_processes(uuid, pids, RACERS);
    atomic_store(&board->go, 2);
    for (int i = 0; i < RACERS; i++) {
        if (!all)
            kill(pids[i], SIGKILL);
        waitpid(pids[i], NULL, 0);
        granted += board->granted[i];
        contexts += board->own[i];
        /* In a small slice the last context may not fit beside the others: that is the limit too. */
        failed += board->status[i] != CUDA_SUCCESS && board->status[i] != CUDA_ERROR_OUT_OF_MEMORY;
        contextless += board->status[i] == CUDA_ERROR_OUT_OF_MEMORY;
    }
    bool counted = (slice->flags & VGPU_LIMITS_COUNT_CONTEXT) != 0;
    uint64_t found = counted && outside ? outside : granted + (counted ? contexts : 0);
    bool known = !counted || outside || contexts; /* without NVML the contexts' bytes are not known here */
    bool held = all && !failed && contextless < RACERS && (known ? found == limit : found <= limit);
    result_set(&board->result, held ? HELD : VIOLATED, limit, found, "bytes",
               "%s: four processes were granted %llu bytes%s%s", uuid, (unsigned long long)granted,
               !all ? "; not all came to an end" : failed ? "; one got no context" : contextless ? "; not all contexts fit" : "",
               !known ? "; what their contexts take is not shown here" : outside ? ", as NVML shows them" : "");
    return held;
}

void check_four_processes(const struct slice *slice, struct board *board)
{
    struct {
        char uuid[VGPU_UUID_SIZE];
        uint64_t limit;
    } devices[VGPU_MAX_DEVICES];
    int count = 0;
    /* The devices are listed by a child: a process that has called cuInit must not fork users of CUDA. */
    pid_t lister = fork();
    if (lister == 0) {
        list_devices(slice, board);
        _exit(0);
    }
    waitpid(lister, NULL, 0);
    for (int i = 0; i < board->report.device_count; i++) {
        const struct vgpu_limits_device *limit = slice_device(slice, board->report.devices[i].uuid);
        memcpy(devices[count].uuid, board->report.devices[i].uuid, VGPU_UUID_SIZE);
        devices[count].limit = limit ? limit->memory_bytes : 0;
        count++;
    }
    if (!count)
        result_set(&board->result, NOT_RUN, 0, 0, "bytes", "the driver shows no GPU");
    for (int i = 0; i < count; i++) {
        if (!devices[i].limit) {
            result_set(&board->result, VIOLATED, 0, board->report.devices[i].total_cuda, "bytes", "there is no limit: %s",
                       slice->found ? "the device is not in the limits file" : slice->reason);
            return;
        }
        if (!measure(slice, board, i, devices[i].uuid, devices[i].limit))
            return;
    }
}
