/* SPDX-License-Identifier: Apache-2.0 */
/*
 * killer LIBRARY TRIALS MODE LIMIT SEED
 *
 * Kills processes of a container, each with LIBRARY preloaded, at random moments, and checks that no memory of their
 * slice is lost and that the other processes make progress. Four processes allocate and free without pause. In every
 * trial a random one of them gets SIGKILL at a random moment. MODE is one of
 *   alone    the victim is not replaced: the three others must continue, and one of them must be able to allocate
 *            exactly the rest of the slice
 *   replaced a new process starts at once; it and the three others must continue. Every 16th trial checks the slice
 *   early    the victim is a process that has just been started and is killed inside its start
 * This process has no library and reads the real usage from the driver. It prints ten numbers:
 *   trials; stalled (a survivor made no progress in 4 s of running or sleeping); leaked (the slice had bytes missing);
 *   over (usage was above the limit);
 *   slow (a survivor made no progress for 100 ms); own (like slow, but without the time of waiting for a processor);
 *   longest stall in µs; longest time in µs until a survivor could allocate the rest of the slice;
 *   holders (victims that died while they had the lock of the ledger, the slice's file of charged memory);
 *   naps (the largest number of short sleeps of a survivor until a living process had the lock. A busy machine does not
 *   change this number, because a process without a processor takes no naps)
 * A stalled survivor or a leak ends the run, because later trials would mean nothing.
 */
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "vgpu_abi.h"
#include "work.h"

/* The ledger is the container's file of charged memory. PATIENCE_US is below the five seconds after which a process
 * gives up waiting for the ledger's lock. */
enum { WORKERS = 4, BLOCKS = 8, PATIENCE_US = 4000000, SLOW_US = 100000 };
enum order { RUN, HOLD, TAKE, GIVE };

struct worker {
    /* Number of allocations and frees that have returned. */
    _Atomic uint64_t done;
    /* The order that the parent process gives to this worker. */
    _Atomic uint32_t order;
    /* The last order that the worker has carried out. */
    _Atomic uint32_t state;
    /* Bytes to allocate with the order TAKE. */
    _Atomic uint64_t bytes;
    /* Result of TAKE. */
    _Atomic int32_t status;
};
static struct worker *board;

nvmlReturn_t nvmlInit_v2(void);
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device);
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *processes);

static uint64_t seed;
static uint64_t chance(uint64_t below)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return seed % below;
}

static uint64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000u + (uint64_t)time.tv_nsec / 1000u;
}

/* --- workers --------------------------------------------------------------------------------------------- */

static int work_on(struct worker *self, size_t piece)
{
    static struct work work;
    CUdeviceptr held[BLOCKS] = {0}, all = 0;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (!work_route(&work, "link") || !work_start(&work, 0))
        return 9;
    for (unsigned i = 0;; i++) {
        uint32_t order = atomic_load(&self->order);
        if (order == RUN) {
            CUdeviceptr *one = &held[i % BLOCKS];
            if (*one)
                work.driver.cuMemFree_v2(*one);
            *one = 0;
            if (work.driver.cuMemAlloc_v2(one, piece - i % 777) != CUDA_SUCCESS)
                *one = 0;
            atomic_fetch_add(&self->done, 1);
            atomic_store(&self->state, RUN);
            continue;
        }
        if (order == TAKE && !all) {
            self->status = work.driver.cuMemAlloc_v2(&all, self->bytes);
            if (self->status != CUDA_SUCCESS)
                all = 0;
        } else if (order == GIVE && all) {
            work.driver.cuMemFree_v2(all);
            all = 0;
        }
        atomic_store(&self->state, order);
        while (atomic_load(&self->order) == order)
            usleep(50);
    }
}

static pid_t start(char **argv, int descriptor, unsigned which, size_t piece)
{
    char number[16], index[16], bytes[32];
    snprintf(number, sizeof number, "%d", descriptor);
    snprintf(index, sizeof index, "%u", which);
    snprintf(bytes, sizeof bytes, "%zu", piece);
    atomic_store(&board[which].order, RUN);
    pid_t child = fork();
    if (child == 0) {
        setenv("LD_PRELOAD", argv[1], 1);
        execl("/proc/self/exe", argv[0], "--worker", number, index, bytes, NULL);
        _exit(127);
    }
    return child;
}

/* --- parent process ---------------------------------------------------------------------------------------- */

static uint64_t on_card(nvmlDevice_t device)
{
    static nvmlProcessInfo_t list[64];
    unsigned count = 64;
    uint64_t sum = 0;
    if (nvmlDeviceGetComputeRunningProcesses_v3(device, &count, list) != NVML_SUCCESS)
        exit(4);
    for (unsigned i = 0; i < count; i++)
        sum += list[i].usedGpuMemory;
    return sum;
}

/* Returns the µs for which a process was ready to run but had no processor. */
static uint64_t unscheduled(pid_t pid)
{
    char path[64];
    unsigned long long ran, waited = 0;
    snprintf(path, sizeof path, "/proc/%d/schedstat", pid);
    FILE *file = fopen(path, "r");
    if (file && fscanf(file, "%llu %llu", &ran, &waited) != 2)
        waited = 0;
    if (file)
        fclose(file);
    return waited / 1000;
}

/* Returns the number of voluntary context switches of a process. */
static uint64_t naps(pid_t pid)
{
    char path[64], line[128];
    unsigned long long count = 0;
    snprintf(path, sizeof path, "/proc/%d/status", pid);
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "voluntary_ctxt_switches: %llu", &count) == 1)
            break;
    if (file)
        fclose(file);
    return count;
}

static const struct vgpu_ledger *ledger; /* NULL if there is no ledger (the naive library) */
static int ledger_file = -1;

static void ledger_open(void)
{
    const char *path = getenv("CUDA_DEVICE_MEMORY_SHARED_CACHE");
    ledger_file = open(path ? path : "", O_RDWR | O_CLOEXEC);
    void *map = mmap(NULL, VGPU_LEDGER_FILE_SIZE, PROT_READ, MAP_SHARED, ledger_file, 0);
    ledger = map == MAP_FAILED ? NULL : map;
}

/* Returns the lock's word if its holder is dead (the kernel dropped the byte lock of the holder's slot), else 0. */
static uint64_t dead_word(void)
{
    uint64_t word = ledger ? __atomic_load_n(&ledger->lock, __ATOMIC_ACQUIRE) : 0, slot = (word & 0xffffffffu) - 1;
    if (word == 0 || slot >= VGPU_LEDGER_SLOTS)
        return 0;
    struct flock byte = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)(VGPU_LEDGER_ALIVE_BASE + slot), .l_len = 1};
    bool dead = fcntl(ledger_file, F_OFD_GETLK, &byte) == 0 && byte.l_type == F_UNLCK;
    return dead && __atomic_load_n(&ledger->lock, __ATOMIC_ACQUIRE) == word ? word : 0;
}

/* Gives this process real-time priority, so that it sees a change of the lock at once on a busy machine. */
static void at_once(bool yes)
{
    sched_setscheduler(0, yes ? SCHED_FIFO | SCHED_RESET_ON_FORK : SCHED_OTHER, &(struct sched_param){.sched_priority = yes});
}

/* Returns the µs from `began` until worker `which` completed two more operations. `idle`: µs for which the worker had
 * been without a processor at `began`. Sets *stalled if the worker had a processor and made no progress. */
static uint64_t goes_on(unsigned which, uint64_t before, uint64_t began, uint64_t idle, pid_t pid, bool *stalled)
{
    *stalled = false;
    while (atomic_load(&board[which].done) < before + 2 && !*stalled) {
        uint64_t took = now() - began;
        if (took >= PATIENCE_US)
            *stalled = took - (unscheduled(pid) - idle) >= PATIENCE_US || took >= 30 * (uint64_t)PATIENCE_US;
        usleep(20);
    }
    return now() - began;
}

static bool reach(unsigned which, enum order order)
{
    uint64_t began = now();
    atomic_store(&board[which].order, order);
    while (atomic_load(&board[which].state) != order)
        if (now() - began > 5 * (uint64_t)PATIENCE_US)
            return false;
        else
            usleep(20);
    return true;
}

struct result {
    unsigned trials, stalled, leaked, over, slow, own, holders, naps;
    uint64_t stall, wait;
};

/* Lets a survivor allocate the rest of the slice. The usage must then be exactly the limit, or memory was lost. */
static void count_slice(nvmlDevice_t device, unsigned dead, uint64_t limit, struct result *result)
{
    unsigned taker = (dead + 1 + (unsigned)chance(WORKERS - 1)) % WORKERS;
    for (unsigned i = 0; i < WORKERS; i++)
        if (i != dead && !reach(i, HOLD)) {
            result->stalled++;
            return;
        }
    uint64_t held = on_card(device), began = now();
    result->over += held > limit;
    if (held >= limit) {
        result->leaked += held > limit;
    } else {
        board[taker].bytes = limit - held;
        if (!reach(taker, TAKE)) {
            result->stalled++;
            return;
        }
        uint64_t waited = now() - began;
        result->wait = waited > result->wait ? waited : result->wait;
        result->stalled += waited >= PATIENCE_US;
        result->leaked += board[taker].status != CUDA_SUCCESS || on_card(device) != limit;
        if (board[taker].status == CUDA_SUCCESS && !reach(taker, GIVE))
            result->stalled++;
    }
    for (unsigned i = 0; i < WORKERS; i++)
        if (i != dead)
            atomic_store(&board[i].order, RUN);
}

static bool trial(char **argv, int descriptor, nvmlDevice_t device, pid_t pids[WORKERS], uint64_t limit, size_t piece,
                  unsigned number, struct result *result)
{
    bool replaced = strcmp(argv[3], "replaced") == 0, early = strcmp(argv[3], "early") == 0;
    unsigned victim = (unsigned)chance(WORKERS);
    uint64_t before[WORKERS], idle[WORKERS], napped[WORKERS], started = atomic_load(&board[victim].done);
    bool stalled;
    if (early) {
        kill(pids[victim], SIGKILL);
        waitpid(pids[victim], NULL, 0);
        pids[victim] = start(argv, descriptor, victim, piece);
        usleep((useconds_t)chance(12000));
    } else {
        /* Wait until the new worker has started to work. */
        goes_on(victim, started, now(), unscheduled(pids[victim]), pids[victim], &stalled);
        usleep((useconds_t)chance(2000));
    }
    at_once(true);
    kill(pids[victim], SIGKILL);
    waitpid(pids[victim], NULL, 0);
    uint64_t began = now();
    for (unsigned i = 0; i < WORKERS; i++) {
        before[i] = atomic_load(&board[i].done);
        idle[i] = unscheduled(pids[i]);
        napped[i] = naps(pids[i]);
    }
    uint64_t word = dead_word();
    if (replaced)
        pids[victim] = start(argv, descriptor, victim, piece);
    if (word) {
        result->holders++;
        while (__atomic_load_n(&ledger->lock, __ATOMIC_ACQUIRE) == word && now() - began < 30 * (uint64_t)PATIENCE_US)
            usleep(now() - began < SLOW_US ? 5 : 500); /* The survivor may still have to wait for a processor. */
        for (unsigned i = 0; i < WORKERS; i++) {
            uint32_t took = i == victim ? 0 : (uint32_t)(naps(pids[i]) - napped[i]);
            result->naps = took > result->naps ? took : result->naps;
        }
    }
    at_once(false);
    for (unsigned i = 0; i < WORKERS; i++) {
        if (i == victim)
            continue;
        uint64_t took = goes_on(i, before[i], began, idle[i], pids[i], &stalled);
        result->stall = took > result->stall ? took : result->stall;
        result->stalled += stalled;
        if (took >= SLOW_US) {
            uint64_t ready = unscheduled(pids[i]) - idle[i];
            result->slow++;
            result->own += took - (ready < took ? ready : took) >= SLOW_US;
        }
    }
    result->trials++;
    if (result->stalled)
        return false;
    if (!replaced || number % 16 == 0) {
        if (replaced) {
            kill(pids[victim], SIGKILL);
            waitpid(pids[victim], NULL, 0);
        }
        count_slice(device, victim, limit, result);
        pids[victim] = start(argv, descriptor, victim, piece);
    }
    return !result->stalled && !result->leaked && !result->over;
}

int main(int argc, char **argv)
{
    nvmlDevice_t device;
    pid_t pids[WORKERS];
    struct result result = {0};
    if (argc == 5 && strcmp(argv[1], "--worker") == 0) {
        board = mmap(NULL, WORKERS * sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED, atoi(argv[2]), 0);
        return board == MAP_FAILED ? 3 : work_on(&board[atoi(argv[3])], strtoull(argv[4], NULL, 0));
    }
    if (argc != 6)
        return 2;
    unsigned trials = (unsigned)atoi(argv[2]);
    uint64_t limit = strtoull(argv[4], NULL, 0);
    seed = strtoull(argv[5], NULL, 0) * 2 + 88172645463325253ull;
    int descriptor = memfd_create("board", 0);
    if (descriptor < 0 || ftruncate(descriptor, WORKERS * sizeof *board) != 0 || nvmlInit_v2() ||
        nvmlDeviceGetHandleByIndex_v2(0, &device))
        return 3;
    board = mmap(NULL, WORKERS * sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    ledger_open();
    /* The workers together may request more than the limit, so some requests are always refused. */
    size_t piece = limit / (WORKERS * BLOCKS) * 5 / 4;
    for (unsigned i = 0; i < WORKERS; i++)
        pids[i] = start(argv, descriptor, i, piece);
    for (unsigned i = 0; i < WORKERS; i++) {
        uint64_t began = now();
        while (atomic_load(&board[i].done) < 2 && now() - began < 5 * (uint64_t)PATIENCE_US)
            usleep(1000);
    }
    for (unsigned i = 0; i < trials && trial(argv, descriptor, device, pids, limit, piece, i, &result); i++)
        continue;
    for (unsigned i = 0; i < WORKERS; i++) {
        kill(pids[i], SIGKILL);
        waitpid(pids[i], NULL, 0);
    }
    printf("%u %u %u %u %u %u %llu %llu %u %u\n", result.trials, result.stalled, result.leaked, result.over, result.slow, result.own,
           (unsigned long long)result.stall, (unsigned long long)result.wait, result.holders, result.naps);
    return 0;
}
