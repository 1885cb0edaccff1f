/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A process that keeps a simulated GPU busy, for tests of utilization. It calls the simulated host directly, not
 * through CUDA. The host's clock must be manual: it moves only by the command `advance`.
 *   busy_gpu hold GPU BYTES KERNEL_MS    creates a context, allocates BYTES and launches one kernel (-1: endless);
 *                                        prints `ready` and waits until standard input ends
 *   busy_gpu advance MS                  moves the host's clock forward by MS milliseconds
 */
#include "sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int fail(const char *what)
{
    fprintf(stderr, "busy_gpu: %s: %s\n", what, sim_error());
    return 1;
}

static int hold(int gpu, unsigned long long bytes, long kernel_ms)
{
    if (sim_attach(SIM_ROLE_CUDA) != SIM_OK)
        return fail("attach");
    if (sim_charge(gpu, SIM_CONTEXT, sim_state()->gpus[gpu].context_bytes) != SIM_OK)
        return fail("context");
    if (bytes > 0 && sim_charge(gpu, SIM_MEMORY, bytes) != SIM_OK)
        return fail("memory");
    int channel = sim_channel_open(gpu);
    if (channel < 0)
        return fail("channel");
    struct sim_work kernel = {.kind = SIM_WORK_KERNEL, .sms = 1,
                              .remaining = kernel_ms < 0 ? SIM_COST_FOREVER : (uint64_t)kernel_ms * 1000000};
    if (kernel_ms != 0 && sim_submit(gpu, channel, &kernel, NULL) == 0)
        return fail("kernel");
    puts("ready");
    fflush(stdout);
    while (getchar() != EOF)
        ;
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 5 && strcmp(argv[1], "hold") == 0)
        return hold(atoi(argv[2]), strtoull(argv[3], NULL, 10), atol(argv[4]));
    if (argc == 3 && strcmp(argv[1], "advance") == 0) {
        if (sim_attach(SIM_ROLE_TOOL) != SIM_OK)
            return fail("attach");
        sim_clock_advance((uint64_t)atol(argv[2]) * 1000000);
        return 0;
    }
    fputs("usage: busy_gpu hold GPU BYTES KERNEL_MS | advance MS\n", stderr);
    return 2;
}
