/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calls the library's inline functions that run in each launch, without a driver or a clock. They keep the cost table,
 * which contains the measured GPU time of each kernel. They also divide the launches into segments; a segment ends at a
 * pause in which the stream may have been idle.
 *   costs entries BASE STEP COUNT GX GY  prints how many entries of the cost table COUNT kernels occupy; the kernels'
 *                                        handles start at BASE, at distance STEP; GX and GY are the grid sizes
 *   costs looks NS...                    launches kernels that take NS each, in one segment; prints for each launch
 *                                        whether the clock is read
 *   costs pauses GAP TICKS...            makes launches at these clock readings, after a launch at BEGAN. "-" is a
 *                                        launch that does not read the clock. Prints for each reading whether
 *                                        the launch continues the segment: 0 after a pause, else 1
 *   costs decides BALANCE RATE COST WAITED  makes one launch with this budget; prints 0 if it starts at once, else 1;
 *                                        the wait in ns; and the budget after the wait
 *   costs learns NS:HOST...              launches one kernel, each launch measured alone; NS is the time between the
 *                                        events, and the GPU may have been idle for HOST of it. Prints 1 if the kernel
 *                                        is known afterwards, else 0, and the learned cost in ns
 *   costs settles GOES_ON PREDICTED KNOWN EXCLUSIVE TOOK HOST COUNTED  settles a segment; prints the charge. GOES_ON,
 *                                        KNOWN and EXCLUSIVE are 0 or 1, and the others ns. GOES_ON: the segment went on
 *                                        because too many fences were open. HOST is the time from the begin event to
 *                                        the end of the segment on the host. COUNTED is the part of TOOK, from the
 *                                        begin, that is already charged to another stream
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "compute/limiter.h"

#define BEGAN 0xffff0000u /* The counter starts just before its 32 bits wrap around. */

static unsigned entries(char **word)
{
    static bool taken[COST_ENTRIES];
    uintptr_t function = strtoull(word[0], NULL, 0), step = strtoull(word[1], NULL, 0);
    unsigned found = 0;
    for (unsigned i = 0, count = (unsigned)atoi(word[2]); i < count; i++, function += step) {
        uint64_t item = cost_index(cost_key((const void *)function, (unsigned)atoi(word[3]), (unsigned)atoi(word[4]), 1, 256));
        found += !taken[item];
        taken[item] = true;
    }
    return found;
}

#define NOW (5 * MS)

static void decides(char **word)
{
    struct vgpu_tenant_device bucket = {.balance_ns = strtoll(word[0], NULL, 0), .accrued_ns = NOW};
    struct pace_view view = {.now = NOW, .waited = strtoull(word[3], NULL, 0), .gate = VGPU_GATE_NONE,
                             .rate_ppm = (uint32_t)strtoul(word[1], NULL, 0), .outstanding_max = PACE_OUTSTANDING_NS,
                             .balance = bucket.balance_ns};
    uint64_t until = NOW;
    printf("%d\n", (int)pace_decide(&view, strtoull(word[2], NULL, 0), &until));
    bucket_accrue(&bucket, until, view.rate_ppm, true);
    printf("%llu\n%lld\n", (unsigned long long)(until - NOW), (long long)bucket_balance(&bucket));
}

static void learns(char **word, int count)
{
    static struct costs costs;
    struct settler settler = {0};
    uint64_t at = 10 * MS, ns;
    bool known;
    for (int i = 0; i < count; i++) {
        struct segment segment;
        segment_start(&segment);
        unsigned item = cost_find(&costs, 7, &ns, &segment.known);
        segment_add(&segment, item, ns);
        segment.exclusive_ns = UINT64_MAX;
        char *host;
        uint64_t took = strtoull(word[i], &host, 0);
        segment.host_ns = strtoull(host + 1, NULL, 0);
        segment_settle(&costs, &settler, &segment, at, at + took);
        at += took + MS;
    }
    cost_find(&costs, 7, &ns, &known);
    printf("%d\n%llu\n", known, (unsigned long long)ns);
}

static void settles(char **word)
{
    static struct costs costs;
    struct settler settler = {.frontier = 10 * MS + strtoull(word[6], NULL, 0)};
    struct segment segment;
    segment_start(&segment);
    segment_add(&segment, 1, strtoull(word[1], NULL, 0));
    if (atoi(word[0]))
        segment_prolong(&segment);
    segment.known = atoi(word[2]);
    segment.exclusive_ns = atoi(word[3]) ? UINT64_MAX : 0;
    segment.host_ns = strtoull(word[5], NULL, 0);
    printf("%llu\n",
           (unsigned long long)segment_settle(&costs, &settler, &segment, 10 * MS, 10 * MS + strtoull(word[4], NULL, 0)));
}

static void crowd(unsigned count, unsigned rounds, uint64_t took)
{
    static struct costs costs;
    struct settler settler = {0};
    uint64_t at = 10 * MS, sum = 0, most = 0;
    for (unsigned round = 0; round < rounds; round++)
        for (unsigned i = 0; i < count; i++, at += took + MS) {
            struct segment segment;
            uint64_t ns;
            segment_start(&segment);
            unsigned item = cost_find(&costs, cost_key((const void *)(0x55d1c0a01000 + (uintptr_t)i * 0x40), 1, 1, 1, 256), &ns,
                                      &segment.known);
            segment_add(&segment, item, ns);
            segment.exclusive_ns = UINT64_MAX;
            segment_settle(&costs, &settler, &segment, at, at + took);
            if (round + 1 < rounds)
                continue;
            sum += ns;
            most = ns > most ? ns : most;
        }
    printf("%llu\n%llu\n", (unsigned long long)(sum / count), (unsigned long long)most);
}

static unsigned keys(char **word, int count)
{
    uint32_t known[64];
    unsigned found = 0;
    for (int i = 0; i + 3 < count && found < 64; i += 4) {
        unsigned shape[4], j = 0;
        for (int part = 0; part < 4; part++)
            shape[part] = (unsigned)atoi(word[i + part]);
        known[found] = cost_key((const void *)0x55d1c0a01000, shape[0], shape[1], shape[2], shape[3]);
        while (known[j] != known[found])
            j++;
        found += j == found;
    }
    return found;
}

int main(int argc, char **argv)
{
    static struct thread_state thread;
    if (argc == 7 && !strcmp(argv[1], "entries"))
        printf("%u\n", entries(argv + 2));
    else if (argc > 2 && !strcmp(argv[1], "looks"))
        for (int i = 2; i < argc; i++)
            printf("%d\n", segment_looks((uint64_t)i - 2, strtoull(argv[i], NULL, 0)));
    else if (argc > 3 && !strcmp(argv[1], "pauses")) {
        limiter_set_gap(&thread, (uint32_t)strtoul(argv[2], NULL, 0));
        thread.ticks = BEGAN - thread.behind;
        for (int i = 3; i < argc; i++)
            if (!strcmp(argv[i], "-"))
                limiter_unlooked(&thread);
            else
                printf("%d\n", limiter_looked(&thread, BEGAN + (uint32_t)strtoul(argv[i], NULL, 0)));
    } else if (argc == 6 && !strcmp(argv[1], "decides"))
        decides(argv + 2);
    else if (argc > 2 && !strcmp(argv[1], "learns"))
        learns(argv + 2, argc - 2);
    else if (argc == 9 && !strcmp(argv[1], "settles"))
        settles(argv + 2);
    else if (argc == 5 && !strcmp(argv[1], "crowd"))
        crowd((unsigned)atoi(argv[2]), (unsigned)atoi(argv[3]), strtoull(argv[4], NULL, 0));
    else if (argc > 5 && !strcmp(argv[1], "keys"))
        printf("%u\n", keys(argv + 2, argc - 2));
    else
        return 2;
    return 0;
}
