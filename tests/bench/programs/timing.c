/* SPDX-License-Identifier: Apache-2.0 */
/*
 * timing CALL COUNT REPEATS          nanoseconds of a call: the median of REPEATS blocks of COUNT calls each
 * timing CALL COUNT REPEATS clock    … with one reading of the time stamp counter before each call
 * timing CALL COUNT REPEATS OFFSET   … with nothing in the place of the driver's function at OFFSET of libcuda.so.1
 *
 * Short blocks, for whatever else runs on the machine ends some of them late and leaves the median alone. Blocks of less
 * than a quarter of the limiter's segment hold no fence more often than not.
 *
 * Over a function that does nothing a hook shows its own cost. Over a real one a part of that hides behind the driver's
 * own waiting, and a reading of the counter costs more than by itself, for it waits for what the driver has written.
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

/* Whoever has the address of the driver's function at `offset` now has that of nothing(). How many did. */
static unsigned put_nothing(unsigned long offset)
{
    unsigned long low, high, at, libcuda = 0;
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
            /* Its variables: in its own file's pages, or in the nameless ones behind them. */
            bool ours = strstr(name[0] ? name : before, "/libvgpu.so") != NULL;
            if (name[0])
                memcpy(before, name, sizeof before);
            if (pass == 0 || !ours || mode[1] != 'w')
                continue;
            for (uintptr_t *word = (uintptr_t *)low; word < (uintptr_t *)high; word++)
                if (*word == libcuda + offset) {
                    *word = (uintptr_t)nothing;
                    found++;
                }
        }
    }
    if (maps)
        fclose(maps);
    return found;
}

int main(int argc, char **argv)
{
    static struct work work;
    static double each[100000];
    if (argc != 4 && argc != 5)
        return 2;
    unsigned count = (unsigned)atoi(argv[2]), repeats = (unsigned)atoi(argv[3]);
    bool clock = argc == 5 && strcmp(argv[4], "clock") == 0, launch = strcmp(argv[1], "launch") == 0;
    if (repeats == 0 || repeats > sizeof each / sizeof *each || !work_route(&work, "link") || !work_nvml() || !work_start(&work, 0))
        return 3;
    for (int i = 0; i < 200; i++) /* what a kernel costs is known then */
        if (!work_before(&work, argv[1]) || !work_call(&work, argv[1]))
            return 4;
    work.driver.cuCtxSynchronize();
    if (argc == 5 && !clock && put_nothing(strtoul(argv[4], NULL, 0)) != 1) {
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
        if (launch && r % 20 == 19) /* a full queue would be measured otherwise */
            work.driver.cuCtxSynchronize();
    }
    qsort(each, repeats, sizeof *each, by_size);
    printf("%.2f\n", each[repeats / 2]);
    return 0;
}
