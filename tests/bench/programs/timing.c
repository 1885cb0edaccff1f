/* SPDX-License-Identifier: Apache-2.0 */
/* timing ROUTE CALL COUNT REPEATS: nanoseconds of a call, least and median of the repeats of COUNT calls each. */
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

int main(int argc, char **argv)
{
    static struct work work;
    static double each[1000];
    if (argc != 5)
        return 2;
    unsigned count = (unsigned)atoi(argv[3]), repeats = (unsigned)atoi(argv[4]);
    if (repeats == 0 || repeats > 1000 || !work_route(&work, argv[1]) || !work_nvml() || !work_start(&work, 0))
        return 3;
    bool launch = strcmp(argv[2], "launch") == 0;
    if (!work_before(&work, argv[2]))
        return 4;
    for (unsigned r = 0; r < repeats; r++) {
        uint64_t began = now();
        for (unsigned i = 0; i < count; i++)
            if (!work_call(&work, argv[2]))
                return 5;
        each[r] = (double)(now() - began) / count;
        if (launch) /* a full queue would be measured otherwise */
            work.driver.cuCtxSynchronize();
    }
    qsort(each, repeats, sizeof *each, by_size);
    printf("%.2f %.2f\n", each[0], each[repeats / 2]);
    return 0;
}
