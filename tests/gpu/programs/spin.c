/* SPDX-License-Identifier: Apache-2.0 */
/*
 * spin SECONDS MICROSECONDS STEPS DEPTH STAMPS [GRAPH [SPREAD]]
 *
 * Launches the kernel vgpu_spin (kernels.h) without a pause for SECONDS, with at most DEPTH launches waiting. Each
 * launch executes STEPS steps on all multiprocessors; MICROSECONDS is its duration on the simulated driver. With GRAPH
 * it launches graphs of GRAPH kernels. With SPREAD a launch has up to SPREAD times the steps; each octave (range from a
 * number to twice that number) is equally frequent. The program prints "ready" and begins when it reads a line from
 * standard input. It writes the stamps of every launch, the GPU's clock %globaltimer at its start and end, to the file
 * STAMPS: u64 count, starts, ends. It ends with one line of JSON.
 *
 * With STEPS 0 it measures how many steps take MICROSECONDS, prints the number and ends.
 */
#include "gpu.h"

enum { MOST = 1 << 20, THREADS = 128, EVENTS = 4 };

static CUfunction spin, mark;
static CUdeviceptr starts, ends, counter;
static unsigned sms;
static CUstream stream;

static CUresult launch(unsigned index, unsigned steps)
{
    void *parameters[] = {&starts, &ends, &index, &steps};
    return cu.cuLaunchKernel(spin, sms, 1, 1, THREADS, 1, 1, 0, stream, parameters, NULL);
}

static unsigned mixed(unsigned steps, double spread)
{
    static uint64_t state = 88172645463325252ull;
    unsigned octaves = 0;
    while ((double)(2u << octaves) <= spread)
        octaves++;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    unsigned low = steps << (octaves ? state % octaves : 0);
    return low + (unsigned)(state >> 32) % low;
}

static CUresult launch_mark(void)
{
    void *parameters[] = {&starts, &counter};
    return cu.cuLaunchKernel(mark, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL);
}

static void clear(void)
{
    MUST(CALL(cuMemsetD8_v2, starts, 0xff, (size_t)MOST * 8));
    MUST(CALL(cuMemsetD8_v2, ends, 0, (size_t)MOST * 8));
    MUST(CALL(cuMemsetD8_v2, counter, 0, 8));
    MUST(CALL(cuCtxSynchronize));
}

static uint64_t *fetch(CUdeviceptr from, size_t count)
{
    uint64_t *stamps = calloc(count ? count : 1, 8);
    if (!stamps)
        gpu_fail("no host memory for stamps", (long)count);
    if (count)
        MUST(CALL(cuMemcpyDtoH_v2, stamps, from, count * 8));
    return stamps;
}

static int ascending(const void *left, const void *right)
{
    uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return a < b ? -1 : a > b;
}

/* Returns the median ns of 32 launches by the GPU's clock, or 0 without stamps (the simulated driver stores none). */
static uint64_t duration_of(unsigned steps)
{
    enum { LAUNCHES = 32 };
    clear();
    for (unsigned i = 0; i < LAUNCHES; i++)
        MUST(launch(i, steps));
    MUST(CALL(cuStreamSynchronize, stream));
    uint64_t *from = fetch(starts, LAUNCHES), *to = fetch(ends, LAUNCHES);
    for (unsigned i = 0; i < LAUNCHES; i++)
        to[i] = to[i] > from[i] ? to[i] - from[i] : 0;
    qsort(to, LAUNCHES, 8, ascending);
    uint64_t middle = to[LAUNCHES / 2];
    free(from);
    free(to);
    return middle;
}

static int calibrate(double wanted_us)
{
    /* Warm up for half a second: an idle GPU runs at a fraction of its clock. */
    uint64_t until = now_ns() + 500000000ull, took = 0;
    unsigned steps = 20000;
    while (now_ns() < until)
        took = duration_of(steps);
    for (int i = 0; i < 4 && took; i++) {
        double next = steps * wanted_us * 1000 / (double)took;
        steps = next < 1 ? 1 : next > 2e9 ? 2000000000u : (unsigned)next;
        took = duration_of(steps);
    }
    printf("{\"steps\": %u, \"nanoseconds\": %llu, \"sms\": %u}\n", steps, (unsigned long long)took, sms);
    return 0;
}

static void write_stamps(const char *path, uint64_t count, const uint64_t *from, const uint64_t *to)
{
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(&count, 8, 1, file) != 1 || fwrite(from, 8, count, file) != count ||
        fwrite(to, 8, count, file) != count || fclose(file) != 0)
        gpu_fail("the stamps cannot be written", 0);
}

static CUgraphExec graph_of(unsigned kernels, unsigned steps)
{
    CUgraph graph = NULL;
    CUgraphExec exec = NULL;
    MUST(CALL(cuStreamBeginCapture_v2, stream, CAPTURE_RELAXED));
    MUST(launch_mark());
    for (unsigned i = 0; i < kernels; i++)
        MUST(launch(MOST - 1 - i, steps)); /* Stamp indices that no other launch uses. */
    MUST(launch_mark());
    MUST(CALL(cuStreamEndCapture, stream, &graph));
    MUST(CALL(cuGraphInstantiateWithFlags, &exec, graph, 0));
    return exec;
}

int main(int argc, char **argv)
{
    if (argc < 6)
        gpu_fail("usage: spin SECONDS MICROSECONDS STEPS DEPTH STAMPS [GRAPH [SPREAD]]", argc);
    double seconds = atof(argv[1]), microseconds = atof(argv[2]);
    unsigned steps = (unsigned)strtoul(argv[3], NULL, 10), depth = (unsigned)atoi(argv[4]);
    unsigned kernels = argc > 6 ? (unsigned)atoi(argv[6]) : 0, batch = depth / EVENTS ? depth / EVENTS : 1;
    double spread = argc > 7 ? atof(argv[7]) : 1;
    CUcontext context;
    CUmodule module;
    CUevent event[EVENTS];
    CUgraphExec exec = NULL;
    int header = -1, count = 0;
    char line[64];

    gpu_open();
    MUST(CALL(cuInit, 0));
    MUST(CALL(cuDevicePrimaryCtxRetain, &context, 0));
    MUST(CALL(cuCtxSetCurrent, context));
    MUST(CALL(cuDeviceGetAttribute, &count, ATTRIBUTE_SM_COUNT, 0));
    sms = (unsigned)count;
    simulated_spread = spread;
    MUST(gpu_module(&module, microseconds, &header));
    MUST(CALL(cuModuleGetFunction, &spin, module, "vgpu_spin"));
    MUST(CALL(cuModuleGetFunction, &mark, module, "vgpu_mark"));
    MUST(CALL(cuStreamCreate, &stream, STREAM_NON_BLOCKING));
    MUST(CALL(cuMemAlloc_v2, &starts, (size_t)MOST * 8));
    MUST(CALL(cuMemAlloc_v2, &ends, (size_t)MOST * 8));
    MUST(CALL(cuMemAlloc_v2, &counter, 8));
    for (int i = 0; i < EVENTS; i++)
        MUST(CALL(cuEventCreate, &event[i], EVENT_DISABLE_TIMING));
    if (!steps)
        return calibrate(microseconds);
    clear();
    MUST(launch(MOST - 1, steps)); /* Loads lazily loaded code before the measurement. */
    MUST(CALL(cuStreamSynchronize, stream));
    if (kernels)
        exec = graph_of(kernels, steps);
    clear();
    printf("ready\n");
    fflush(stdout);
    if (!fgets(line, sizeof line, stdin))
        return 4;

    uint64_t began = now_ns(), until = began + (uint64_t)(seconds * 1e9), longest = 0, inside = 0, after = began;
    unsigned most = kernels ? MOST / 2 - kernels : MOST - 1, made = 0;
    while (after < until && made < most) {
        uint64_t before = now_ns();
        MUST(kernels ? cu.cuGraphLaunch(exec, stream) : launch(made, spread > 1 ? mixed(steps, spread) : steps));
        after = now_ns();
        inside += after - before;
        longest = after - before > longest ? after - before : longest;
        if (++made % batch == 0) {
            unsigned turn = made / batch;
            MUST(CALL(cuEventRecord, event[turn % EVENTS], stream));
            if (turn >= EVENTS)
                MUST(CALL(cuEventSynchronize, event[(turn + 1) % EVENTS]));
            after = now_ns();
        }
    }
    uint64_t issued = now_ns();
    MUST(CALL(cuStreamSynchronize, stream));
    uint64_t done = now_ns();
    if (kernels) {
        uint64_t *ring = fetch(starts, (size_t)made * 2), *from = calloc(made + 1, 8), *to = calloc(made + 1, 8);
        for (unsigned i = 0; from && to && i < made; i++) {
            from[i] = ring[2 * i];
            to[i] = ring[2 * i + 1];
        }
        write_stamps(argv[5], made, from, to);
    } else {
        write_stamps(argv[5], made, fetch(starts, made), fetch(ends, made));
    }
    printf("{\"launches\": %u, \"began_ns\": %llu, \"issue_ns\": %llu, \"drain_ns\": %llu, \"longest_launch_ns\": %llu, "
           "\"in_launch_ns\": %llu, \"sms\": %u, \"ptx_header\": %d}\n",
           made, (unsigned long long)began, (unsigned long long)(issued - began), (unsigned long long)(done - issued),
           (unsigned long long)longest, (unsigned long long)inside, sms, header);
    return 0;
}
