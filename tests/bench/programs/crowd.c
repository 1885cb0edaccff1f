/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Starts PROCESSES processes that use CUDA, each with LIBRARY preloaded (an empty LIBRARY means none). Half of them use
 * device 1, because one device cannot hold all contexts.
 *
 * crowd LIBRARY PROCESSES stay      each process has a context and an allocation; a few start at a time. Prints "ready"
 *                                   when all are ready, and ends them when its standard input ends.
 * crowd LIBRARY PROCESSES start     all processes start at once. Prints for all starts: number of failures, wall µs,
 *                                   processor µs, µs of the slowest start, µs asleep, µs running or ready to run (the
 *                                   last from schedstat).
 */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "work.h"

#define TOGETHER 4u

struct board {
    pthread_barrier_t start;
    _Atomic unsigned ready, failed;
    _Atomic uint64_t slowest, slept, ready_us;
};

static uint64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000u + (uint64_t)time.tv_nsec / 1000u;
}

static struct board *board_open(int descriptor)
{
    struct board *board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (board == MAP_FAILED)
        exit(3);
    return board;
}

/* Returns the µs for which this process has run or been ready to run. */
static uint64_t ready_us(void)
{
    unsigned long long ran = 0, waited = 0;
    FILE *file = fopen("/proc/self/schedstat", "r");
    if (file && fscanf(file, "%llu %llu", &ran, &waited) != 2)
        ran = waited = 0;
    if (file)
        fclose(file);
    return (ran + waited) / 1000;
}

static int member(struct board *board, bool stay, int device)
{
    static struct work work;
    CUdeviceptr pointer;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (!stay)
        pthread_barrier_wait(&board->start);
    uint64_t began = now(), before = ready_us();
    if (!work_route(&work, "link") || !work_start(&work, device) || work.driver.cuMemAlloc_v2(&pointer, 1 << 16))
        atomic_fetch_add(&board->failed, 1);
    uint64_t took = now() - began, slowest = atomic_load(&board->slowest);
    uint64_t ready = ready_us() - before;
    atomic_fetch_add(&board->ready_us, ready);
    atomic_fetch_add(&board->slept, took > ready ? took - ready : 0);
    while (took > slowest && !atomic_compare_exchange_weak(&board->slowest, &slowest, took))
        continue;
    atomic_fetch_add(&board->ready, 1);
    if (stay)
        for (;;)
            pause();
    return 0;
}

int main(int argc, char **argv)
{
    char number[16], which[16];
    if (argc == 5 && strcmp(argv[1], "--member") == 0)
        return member(board_open(atoi(argv[2])), strcmp(argv[3], "stay") == 0, atoi(argv[4]));
    if (argc != 4)
        return 2;
    unsigned processes = (unsigned)atoi(argv[2]);
    bool stay = strcmp(argv[3], "stay") == 0;
    int descriptor = memfd_create("board", 0);
    if (descriptor < 0 || ftruncate(descriptor, sizeof(struct board)) != 0)
        return 3;
    struct board *board = board_open(descriptor);
    pthread_barrierattr_t shared;
    pthread_barrierattr_init(&shared);
    pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&board->start, &shared, processes + 1);
    snprintf(number, sizeof number, "%d", descriptor);
    pid_t *members = calloc(processes + 1, sizeof *members);
    for (unsigned i = 0; members && i < processes; i++) {
        while (stay && i - atomic_load(&board->ready) >= TOGETHER)
            usleep(1000);
        members[i] = fork();
        if (members[i] == 0) {
            setenv("LD_PRELOAD", argv[1], 1);
            snprintf(which, sizeof which, "%u", i % 2);
            execl("/proc/self/exe", argv[0], "--member", number, argv[3], which, NULL);
            _exit(127);
        }
    }
    if (!stay) {
        struct rusage usage;
        pthread_barrier_wait(&board->start);
        uint64_t began = now();
        while (wait(NULL) > 0)
            continue;
        uint64_t wall = now() - began;
        getrusage(RUSAGE_CHILDREN, &usage);
        uint64_t processor = (uint64_t)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000000u +
                             (uint64_t)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
        printf("%u %llu %llu %llu %llu %llu\n", atomic_load(&board->failed) + (processes - atomic_load(&board->ready)),
               (unsigned long long)wall, (unsigned long long)processor, (unsigned long long)board->slowest,
               (unsigned long long)board->slept, (unsigned long long)board->ready_us);
        return 0;
    }
    while (atomic_load(&board->ready) < processes)
        usleep(10000);
    printf("%s\n", atomic_load(&board->failed) ? "failed" : "ready");
    fflush(stdout);
    while (getchar() != EOF)
        continue;
    for (unsigned i = 0; i < processes; i++)
        kill(members[i], SIGKILL);
    while (wait(NULL) > 0)
        continue;
    return 0;
}
