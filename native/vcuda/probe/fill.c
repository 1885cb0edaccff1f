/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two checks of the memory limit. One process alone, or four processes at once, fill a slice, the container's part of a
 * GPU's memory. Together they must get exactly the limit.
 *
 * With oversubscription a slice may be larger than the card's free memory and cannot be filled. Then the check is
 * repeated with a limit that can be reached: half the memory that the card gave, set by CUDA_DEVICE_MEMORY_LIMIT.
 */
#include "probe.h"

#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define RACERS 4
#define PATIENCE_MS 60000

bool wait_for(_Atomic int *counter, int wanted)
{
    for (int waited = 0; waited < PATIENCE_MS; waited++) {
        if (atomic_load(counter) >= wanted)
            return true;
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    }
    return false;
}

bool contexts_count(const struct fill *fill)
{
    return (fill->slice->flags & VGPU_LIMITS_COUNT_CONTEXT) != 0;
}

/* Allocates until not even one byte is granted. Halves the size of the request at each refusal. */
uint64_t take_all(const struct fill *fill, const struct cuda *cuda, uint64_t first)
{
    uint64_t granted = 0;
    size_t left = 0, total;
    for (uint64_t piece = first; piece; piece /= 2) {
        CUdeviceptr pointer;
        for (int times = 0; times < 128 && cuda->mem_alloc(&pointer, piece) == CUDA_SUCCESS; times++)
            granted += piece;
    }
    /* If one byte is refused while the slice has free bytes, the card was full. The slice's free bytes come from NVML,
     * because cuMemGetInfo shows at most the card's free bytes. */
    struct nvml_figures figures;
    bool unfilled = nvml_figures(fill->uuid, &figures) && figures.used < figures.total;
    if (unfilled || (cuda->mem_info(&left, &total) == CUDA_SUCCESS && left > 0))
        atomic_store(&fill->board->card_full, 1);
    return granted;
}

/* --- one process ------------------------------------------------------------------------------------ */

static void fill_alone(const struct fill *fill)
{
    struct result *result = &fill->board->result;
    char reason[200];
    CUcontext context;
    CUdeviceptr pointer;
    struct nvml_figures figures;
    size_t free_bytes = 0, total = 0;
    const struct cuda *cuda = cuda_open(reason, sizeof reason);
    CUresult status = cuda ? cuda->ctx_create(&context, 0, fill->device) : CUDA_ERROR_NO_DEVICE;
    if (status == CUDA_SUCCESS)
        status = cuda->mem_info(&free_bytes, &total);
    if (status != CUDA_SUCCESS) {
        result_set(result, VIOLATED, fill->limit, 0, "bytes", "%s: no context can be created: the driver returns %d", fill->uuid, status);
        return;
    }
    uint64_t granted = take_all(fill, cuda, free_bytes ? free_bytes : 1);
    CUresult past = cuda->mem_alloc(&pointer, 1);
    /* NVML's figure of this process includes the context. In a slice the library returns it, not the driver. */
    bool nvml = contexts_count(fill) && nvml_figures(fill->uuid, &figures) && figures.own >= granted;
    uint64_t found = nvml ? figures.own : granted + (contexts_count(fill) && total > free_bytes ? total - free_bytes : 0);
    result_set(result, found == fill->limit && past == CUDA_ERROR_OUT_OF_MEMORY ? PASSED : VIOLATED, fill->limit, found, "bytes",
               "%s: %llu bytes granted, one more byte returns %d; the found bytes are %s", fill->uuid, (unsigned long long)granted,
               past, nvml ? "NVML's figure of this process" : "the granted bytes and those in use before");
    nanosleep(&(struct timespec){hold_ms / 1000, (long)(hold_ms % 1000) * 1000000}, NULL);
}

static void measure_alone(const struct fill *fill)
{
    pid_t child = fork();
    if (child == 0) {
        fill_alone(fill);
        _exit(0);
    }
    waitpid(child, NULL, 0);
}

/* --- four processes ----------------------------------------------------------------------------------- */

#define ROUNDS 200
#define PAIRS 500

/* Waits until all processes of the check have arrived here, so that they start at the same microsecond. Returns false
 * if one is missing for a minute. */
static bool meet(struct board *board, int *meeting)
{
    int wanted = ++*meeting * atomic_load(&board->members);
    time_t until = time(NULL) + PATIENCE_MS / 1000;
    atomic_fetch_add(&board->arrived, 1);
    for (unsigned spins = 1; atomic_load(&board->arrived) < wanted; spins++)
        if (spins % 1000 == 0) {
            if (time(NULL) > until)
                return false;
            sched_yield();
        }
    return true;
}

/*
 * In each round all processes request memory that only one of them can get. Then each process allocates and frees
 * without waiting for the others. If the library changed its accounts without a lock, it would lose updates, and later
 * grants would no longer match the limit.
 */
static void rounds(const struct fill *fill, const struct cuda *cuda)
{
    struct board *board = fill->board;
    size_t free_bytes = 0, total;
    CUdeviceptr pointer;
    int meeting = 0;
    if (!meet(board, &meeting))
        return;
    cuda->mem_info(&free_bytes, &total);
    size_t piece = free_bytes / 3 * 2 + 1;
    for (int round = 0; round < ROUNDS && meet(board, &meeting); round++) {
        bool got = cuda->mem_alloc(&pointer, piece) == CUDA_SUCCESS;
        if (got && atomic_fetch_add(&board->winners, 1) > 0)
            atomic_store(&board->beaten, 1);
        if (!meet(board, &meeting))
            return;
        if (got) {
            atomic_fetch_sub(&board->winners, 1);
            cuda->mem_free(pointer);
        }
    }
    if (meet(board, &meeting))
        for (int pair = 0; pair < PAIRS; pair++)
            if (cuda->mem_alloc(&pointer, 4096) == CUDA_SUCCESS)
                cuda->mem_free(pointer);
    meet(board, &meeting);
}

static void race(const struct fill *fill, int racer)
{
    struct board *board = fill->board;
    char reason[200];
    CUcontext context;
    struct nvml_figures figures;
    const struct cuda *cuda = cuda_open(reason, sizeof reason);
    CUresult status = cuda ? cuda->ctx_create(&context, 0, fill->device) : CUDA_ERROR_NO_DEVICE;
    board->status[racer] = status;
    atomic_fetch_add(&board->ready, 1);
    if (status == CUDA_SUCCESS && wait_for(&board->go, 1)) {
        if (nvml_figures(fill->uuid, &figures))
            board->own[racer] = figures.own; /* At this point only the context is charged. */
        rounds(fill, cuda);
        board->granted[racer] = take_all(fill, cuda, fill->limit / 16 ? fill->limit / 16 : 1);
        if (nvml_figures(fill->uuid, &figures))
            board->full[racer] = figures.own;
    }
    atomic_fetch_add(&board->done, 1);
    wait_for(&board->go, 2); /* The other processes must make their requests while this process keeps its memory. */
    _exit(0);
}

static void measure_four(const struct fill *fill)
{
    struct board *board = fill->board;
    int pids[RACERS], failed = 0, contextless = 0;
    uint64_t granted = 0, contexts = 0, full = 0;
    board->ready = board->done = board->go = 0;
    board->arrived = board->winners = board->beaten = 0;
    memset(board->granted, 0, sizeof board->granted);
    memset(board->own, 0, sizeof board->own);
    memset(board->full, 0, sizeof board->full);
    for (int i = 0; i < RACERS; i++) {
        pids[i] = fork();
        if (pids[i] == 0)
            race(fill, i);
    }
    bool all = wait_for(&board->ready, RACERS);
    int members = 0;
    for (int i = 0; i < RACERS; i++)
        members += board->status[i] == CUDA_SUCCESS;
    atomic_store(&board->members, members);
    atomic_store(&board->go, 1);
    all = all && wait_for(&board->done, RACERS);
    atomic_store(&board->go, 2);
    for (int i = 0; i < RACERS; i++) {
        if (!all)
            kill(pids[i], SIGKILL);
        waitpid(pids[i], NULL, 0);
        granted += board->granted[i];
        contexts += board->own[i];
        full += board->full[i];
        /* In a small slice the last context may not fit. This is no failure: the limit refused it. */
        failed += board->status[i] != CUDA_SUCCESS && board->status[i] != CUDA_ERROR_OUT_OF_MEMORY;
        contextless += board->status[i] == CUDA_ERROR_OUT_OF_MEMORY;
    }
    uint64_t found = granted + (contexts_count(fill) ? contexts : 0);
    bool known = !contexts_count(fill) || contexts; /* Without NVML the bytes of the contexts are unknown. */
    bool beaten = atomic_load(&board->beaten) != 0;
    /* Real drivers round up requests. The rounding is charged too, so less is granted. */
    bool rounded = found < fill->limit && full == fill->limit && fill->limit - found < fill->limit / 8;
    bool exact = found == fill->limit || rounded;
    bool held = all && !failed && !beaten && contextless < RACERS && (known ? exact : found <= fill->limit);
    result_set(&board->result, held ? PASSED : VIOLATED, fill->limit, found, "bytes",
               "%s: four processes were granted %llu bytes%s%s", fill->uuid, (unsigned long long)granted,
               !all          ? "; not all of them ended"
               : failed      ? "; one got no context"
               : beaten      ? "; two at once got memory that only one can have"
               : contextless ? "; not all contexts fit"
                             : "",
               !known     ? "; the size of their contexts is not shown here"
               : rounded  ? " with their contexts and the driver's rounding"
               : contexts ? " with their contexts"
                          : "");
}

/* --- on every device ------------------------------------------------------------------------------------ */

static void lowered(struct fill *fill, void (*measure)(const struct fill *fill))
{
    struct board *board = fill->board;
    struct result *result = &board->result;
    char text[32], detail[sizeof result->detail];
    uint64_t sold = fill->limit, whole = result->found;
    fill->limit = whole / 2 / MIB * MIB;
    snprintf(text, sizeof text, "%llu", (unsigned long long)fill->limit);
    setenv("CUDA_DEVICE_MEMORY_LIMIT", text, 1);
    board->card_full = 0;
    measure(fill);
    unsetenv("CUDA_DEVICE_MEMORY_LIMIT");
    snprintf(detail, sizeof detail, "%.120s; the card gave %llu of the slice's %llu bytes, so the check lowered the limit",
             result->detail, (unsigned long long)whole, (unsigned long long)sold);
    memcpy(result->detail, detail, sizeof detail);
    if (result->verdict != PASSED && board->card_full)
        result->verdict = NOT_RUN; /* Other containers took the remaining memory, so nothing is proved. */
}

void on_every_device(const struct slice *slice, struct board *board, void (*measure)(const struct fill *fill))
{
    static struct report report;
    /* A child lists the devices, because a process that has called cuInit must not fork users of CUDA. */
    pid_t lister = fork();
    if (lister == 0) {
        list_devices(slice, board);
        _exit(0);
    }
    waitpid(lister, NULL, 0);
    report = board->report;
    if (!report.device_count)
        result_set(&board->result, NOT_RUN, 0, 0, "bytes", "the driver shows no GPU");
    for (int i = 0; i < report.device_count; i++) {
        const struct device_row *row = &report.devices[i];
        const struct vgpu_limits_device *limit = slice_device(slice, row->uuid);
        if (!limit || !limit->memory_bytes) {
            result_set(&board->result, VIOLATED, 0, row->total_cuda, "bytes", "the slice has no limit: %s",
                       slice->found ? "the limits file has no memory limit of this device" : slice->reason);
            return;
        }
        struct fill fill = {slice, board, i, row->uuid, limit->memory_bytes};
        board->card_full = 0;
        measure(&fill);
        if (board->card_full && (slice->flags & VGPU_LIMITS_OVERSUBSCRIBE) && board->result.found < fill.limit)
            lowered(&fill, measure);
        if (board->result.verdict != PASSED)
            return;
    }
}

void check_limit_exact(const struct slice *slice, struct board *board)
{
    on_every_device(slice, board, measure_alone);
}

void check_four_processes(const struct slice *slice, struct board *board)
{
    on_every_device(slice, board, measure_four);
}
