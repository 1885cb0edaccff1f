/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Measures how long a driver call takes with the library, or how much longer it takes than the driver's own function. A
 * fence is a timing event that the library puts into a stream to measure GPU time.
 *
 * timing CALL COUNT REPEATS          prints nanoseconds of a call: the median of REPEATS blocks of COUNT calls each
 * timing CALL COUNT REPEATS clock    reads the time stamp counter once before each call
 * timing CALL COUNT REPEATS OFFSET   replaces the driver's function at OFFSET of libcuda.so.1 by an empty function
 * timing CALL COUNT REPEATS beside OFFSET OFFSET
 *     alternates in one process between 20 blocks of calls through the library and 20 blocks of calls of the driver's
 *     own functions at OFFSET; each such pair is a turn. Prints the median and the quartiles of the differences. The
 *     functions are, for info: cuMemGetInfo_v2 (and 0); pair: cuMemAlloc_v2, cuMemFree_v2; launch: cuLaunchKernel,
 *     cuEventRecord. For launch it also prints nanoseconds of a fence and launches per fence. A block contains
 *     a fence if it called cuEventRecord.
 *
 * Blocks are short, so other programs on the machine delay only some of them, and the median stays the same. A segment
 * is the launches between two fences. If a block is shorter than a quarter of a segment, it rarely contains a fence.
 *
 * If the hooked function is empty, the measured cost of the hook is its full cost. If the driver's function is called,
 * a part of that cost overlaps with the driver's waiting. A read of the time stamp counter then costs more, because the
 * read waits for the driver's writes.
 *
 * Two processes cannot be compared, because the addresses of their memory and the length of the simulated queue change
 * the driver's cost by more than the library's cost. So all turns run in one process. The queue is emptied after the
 * blocks of each kind, so no segment of the library contains launches that bypassed it.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "work.h"

static uint64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static int by_size(const void *left, const void *right)
{
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

static CUresult nothing(void)
{
    return CUDA_SUCCESS;
}

static unsigned long libcuda; /* load address of libcuda.so.1, set by put() */

/* Replaces the address of the driver's function at `offset` by `instead` in the library's variables. Returns the number
 * of replaced pointers. */
static unsigned put(unsigned long offset, CUresult (*instead)(void))
{
    unsigned long low, high, at;
    char line[512], mode[8], name[256], before[256] = "";
    unsigned found = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    for (int pass = 0; maps && pass < 2; pass++) {
        rewind(maps);
        while (fgets(line, sizeof line, maps)) {
            name[0] = 0;
            if (sscanf(line, "%lx-%lx %7s %lx %*s %*s %255s", &low, &high, mode, &at, name) < 4)
                continue;
            if (pass == 0 && strstr(name, "/libcuda.so.1") && at == 0)
                libcuda = low;
            /* The library's variables lie in the mapping of its file or in the anonymous mapping behind it. */
            bool ours = strstr(name[0] ? name : before, "/libvgpu.so") != NULL;
            if (name[0])
                memcpy(before, name, sizeof before);
            if (pass == 0 || !ours || mode[1] != 'w')
                continue;
            for (uintptr_t *word = (uintptr_t *)low; word < (uintptr_t *)high; word++)
                if (*word == libcuda + offset) {
                    *word = (uintptr_t)instead;
                    found++;
                }
        }
    }
    if (maps)
        fclose(maps);
    return found;
}

/* --- turns: blocks of calls through the library, then blocks of calls of the driver's own functions --------------- */

#define TURN 20u

static unsigned fences;
static CUresult (*record)(void *event, CUstream stream);

static CUresult counted(void *event, CUstream stream)
{
    fences++;
    return record(event, stream);
}

static double median(double *values, unsigned count)
{
    qsort(values, count, sizeof *values, by_size);
    return values[count / 2];
}

static int by_turns(struct work *work, const char *call, unsigned count, unsigned repeats, unsigned long first,
                    unsigned long second)
{
    static double over[50000], open[50000], fenced[100000];
    struct work own = *work;
    unsigned turns = 0, found = 0, all = 0;
    bool launch = call[0] == 'l';
    /* For the call launch, replaces the driver's cuEventRecord by counted(), which counts the fences. For other calls
     * nothing is replaced, because no function is at offset 1. */
    if (put(launch ? second : 1, (CUresult(*)(void))(void (*)(void))counted) > 1)
        return 5;
    if (launch) {
        *(uintptr_t *)&own.driver.cuLaunchKernel = libcuda + first;
        *(uintptr_t *)&record = libcuda + second;
    } else if (call[0] == 'p') {
        *(uintptr_t *)&own.driver.cuMemAlloc_v2 = libcuda + first;
        *(uintptr_t *)&own.driver.cuMemFree_v2 = libcuda + second;
    } else {
        *(uintptr_t *)&own.driver.cuMemGetInfo_v2 = libcuda + first;
    }
    for (unsigned attempt = 1; attempt * 2 * TURN <= repeats; attempt++) {
        double plain[2][TURN] = {{0}};
        unsigned had[2] = {0};
        for (unsigned side = 0; side < 2; side++) {
            struct work *who = side ? &own : work;
            for (unsigned block = 0; block <= TURN; block++) {
                unsigned before = fences;
                uint64_t began = now();
                for (unsigned i = 0; i < count; i++)
                    if (!work_call(who, call))
                        return 6;
                double took = (double)(now() - began) / count;
                if (block == 0) /* Warm-up: the queue was empty before the first block. */
                    continue;
                all += side == 0 ? count : 0;
                if (fences == before)
                    plain[side][had[side]++] = took;
                else if (fences == before + 1)
                    fenced[found++] = took;
            }
            work->driver.cuCtxSynchronize();
        }
        /* Too few blocks were without a fence: the process paused too often, and the library adds a fence after each
         * pause. So this turn does not count. */
        if (had[0] < TURN / 4 || had[1] < TURN / 4)
            continue;
        open[turns] = median(plain[0], had[0]);
        over[turns] = open[turns] - median(plain[1], had[1]);
        turns++;
    }
    if (turns == 0)
        return 7;
    /* A fence costs the difference between the medians of blocks with and without one; medians ignore rare wake-ups. */
    double of_a_fence = found ? (median(fenced, found) - median(open, turns)) * count : 0;
    double middle = median(over, turns);
    printf("%.2f %.2f %.2f %.1f %u\n", middle, over[turns / 4], over[3 * turns / 4], of_a_fence, found ? all / found : 0);
    return 0;
}

int main(int argc, char **argv)
{
    static struct work work;
    static double each[100000];
    bool turns = argc == 7 && strcmp(argv[4], "beside") == 0;
    if (argc != 4 && argc != 5 && !turns)
        return 2;
    unsigned count = (unsigned)atoi(argv[2]), repeats = (unsigned)atoi(argv[3]);
    bool clock = argc == 5 && strcmp(argv[4], "clock") == 0, launch = strcmp(argv[1], "launch") == 0;
    if (repeats == 0 || repeats > sizeof each / sizeof *each || !work_route(&work, "link") || !work_nvml() || !work_start(&work, 0))
        return 3;
    for (int i = 0; i < 200; i++) /* Warm-up: the library learns the cost of a kernel. */
        if (!work_before(&work, argv[1]) || !work_call(&work, argv[1]))
            return 4;
    work.driver.cuCtxSynchronize();
    if (turns)
        return by_turns(&work, argv[1], count, repeats, strtoul(argv[5], NULL, 0), strtoul(argv[6], NULL, 0));
    if (argc == 5 && !clock && put(strtoul(argv[4], NULL, 0), nothing) != 1) {
        if (getenv("LD_PRELOAD"))
            return 5;
        work.driver.cuLaunchKernel = (__typeof__(work.driver.cuLaunchKernel))(void (*)(void))nothing;
    }
    for (unsigned r = 0; r < repeats; r++) {
        uint64_t began = now();
        for (unsigned i = 0; i < count; i++) {
            if (clock)
                __asm__ volatile("rdtsc" : : : "rax", "rdx");
            if (!work_call(&work, argv[1]))
                return 6;
        }
        each[r] = (double)(now() - began) / count;
        if (launch && r % 20 == 19) /* Without this the measurement would include waiting for a full queue. */
            work.driver.cuCtxSynchronize();
    }
    qsort(each, repeats, sizeof *each, by_size);
    printf("%.2f\n", each[repeats / 2]);
    return 0;
}
