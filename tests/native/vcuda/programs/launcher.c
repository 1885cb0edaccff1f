/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Keeps a GPU busy by one kind of launch call, for a time or until the program is killed.
 *
 *   launcher WAY SECONDS MICROSECONDS [DEVICE] [THREADS] [STREAMS]
 *
 * WAY names the launch call, MICROSECONDS is the duration of each kernel. If SECONDS is 0, the program runs until it is
 * killed. DEVICE is the number of the GPU (default 0), THREADS the number of threads that launch (default 1). Each
 * thread launches into its STREAMS streams in turn (default 1). The ways "wait" and "poll" wait for the stream after
 * each launch, "poll" without sleeping. Prints "ready" before the first launch. At the end each thread prints its number of launches and its longest launch call in
 * us.
 */
#include "driver/cuda_abi.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SHAPE unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned
CUresult cuInit(unsigned flags);
CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device);
CUresult cuCtxSetCurrent(CUcontext context);
CUresult cuCtxSynchronize(void);
CUresult cuModuleLoadData(CUmodule *module, const void *image);
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name);
CUresult cuLibraryLoadData(CUlibrary *library, const void *code, void *a, void *b, unsigned c, void *d, void *e, unsigned f);
CUresult cuLibraryGetKernel(void **kernel, CUlibrary library, const char *name);
CUresult cuStreamCreate(CUstream *stream, unsigned flags);
CUresult cuStreamQuery(CUstream stream);
CUresult cuStreamSynchronize(CUstream stream);
CUresult cuStreamBeginCapture_v2(CUstream stream, int mode);
CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph);
CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags);
CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count);
CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream);
CUresult cuGraphLaunch_ptsz(CUgraphExec exec, CUstream stream);
CUresult cuLaunchKernel(CUfunction function, SHAPE, CUstream stream, void **parameters, void **extra);
CUresult cuLaunchKernel_ptsz(CUfunction function, SHAPE, CUstream stream, void **parameters, void **extra);
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra);
CUresult cuLaunchKernelEx_ptsz(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra);
CUresult cuLaunchCooperativeKernel(CUfunction function, SHAPE, CUstream stream, void **parameters);
CUresult cuLaunchCooperativeKernel_ptsz(CUfunction function, SHAPE, CUstream stream, void **parameters);
CUresult cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *list, unsigned count, unsigned flags);
CUresult cuFuncSetBlockShape(CUfunction function, int x, int y, int z);
CUresult cuLaunch(CUfunction function);
CUresult cuLaunchGrid(CUfunction function, int width, int height);
CUresult cuLaunchGridAsync(CUfunction function, int width, int height, CUstream stream);

static const char *way;
static double seconds;
static unsigned streams = 1;
static CUcontext context;
static CUfunction function;
static CUgraphExec exec;

#define MUST(call) \
    do { \
        CUresult status_ = (call); \
        if (status_ != 0) { \
            fprintf(stderr, "launcher: %s: %d\n", #call, status_); \
            exit(3); \
        } \
    } while (0)

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static int is(const char *name)
{
    return strcmp(way, name) == 0;
}

static CUresult launch(CUstream stream)
{
    CUlaunchConfig config = {64, 1, 1, 64, 1, 1, 0, stream, NULL, 0};
    CUDA_LAUNCH_PARAMS one = {function, 64, 1, 1, 64, 1, 1, 0, stream, NULL};
    if (is("kernel") || is("library") || is("null-stream") || is("two-streams") || is("sync") || is("wait") || is("poll"))
        return cuLaunchKernel(function, 64, 1, 1, 64, 1, 1, 0, is("null-stream") ? NULL : stream, NULL, NULL);
    if (is("kernel-ptsz"))
        return cuLaunchKernel_ptsz(function, 64, 1, 1, 64, 1, 1, 0, NULL, NULL, NULL);
    if (is("ex"))
        return cuLaunchKernelEx(&config, function, NULL, NULL);
    config.hStream = NULL;
    if (is("ex-ptsz"))
        return cuLaunchKernelEx_ptsz(&config, function, NULL, NULL);
    if (is("cooperative"))
        return cuLaunchCooperativeKernel(function, 64, 1, 1, 64, 1, 1, 0, stream, NULL);
    if (is("cooperative-ptsz"))
        return cuLaunchCooperativeKernel_ptsz(function, 64, 1, 1, 64, 1, 1, 0, NULL, NULL);
    if (is("multi-device"))
        return cuLaunchCooperativeKernelMultiDevice(&one, 1, 0);
    if (is("graph"))
        return cuGraphLaunch(exec, stream);
    if (is("graph-ptsz"))
        return cuGraphLaunch_ptsz(exec, NULL);
    if (is("old"))
        return cuLaunch(function);
    if (is("old-grid"))
        return cuLaunchGrid(function, 8, 8);
    if (is("old-grid-async"))
        return cuLaunchGridAsync(function, 8, 8, stream);
    fprintf(stderr, "launcher: unknown way %s\n", way);
    exit(2);
}

static void *work(void *unused)
{
    CUstream stream[64], current;
    unsigned long count = 0;
    double longest = 0, end = now() + seconds;
    (void)unused;
    MUST(cuCtxSetCurrent(context));
    for (unsigned i = 0; i < streams; i++)
        MUST(cuStreamCreate(&stream[i], 1));
    for (double start = now(); seconds <= 0 || start < end; count++) {
        current = stream[count % streams];
        MUST(launch(current));
        if (is("wait") || (is("sync") && count % 2))
            MUST(cuStreamSynchronize(current));
        while (is("poll") && cuStreamQuery(current) == CUDA_ERROR_NOT_READY)
            continue;
        if (is("sync") && count % 16 == 0)
            MUST(cuCtxSetCurrent(context)); /* The context is current already, so this call must change nothing. */
        double stop = now();
        /* Ignore the first second, in which the limiter learns the kernel's cost. */
        if (stop > end - seconds + 1 && stop - start > longest)
            longest = stop - start;
        start = stop;
    }
    printf("%lu %.0f\n", count, longest * 1e6);
    return NULL;
}

int main(int argc, char **argv)
{
    char image[200];
    CUmodule module;
    CUlibrary library;
    CUgraph graph;
    CUstream stream;
    pthread_t threads[16];
    if (argc < 4)
        return 2;
    way = argv[1];
    seconds = atof(argv[2]);
    int count = argc > 5 ? atoi(argv[5]) : 1;
    streams = is("two-streams") ? 2 : argc > 6 ? (unsigned)atoi(argv[6]) : 1;
    if (streams < 1 || streams > 64)
        return 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    /* For the simulated driver: how long the kernel `work` takes. */
    snprintf(image, sizeof image, ".gpusim kernel work %s\n", argv[3]);
    MUST(cuInit(0));
    MUST(cuCtxCreate_v2(&context, 0, argc > 4 ? atoi(argv[4]) : 0));
    if (is("library")) { /* Passes a CUkernel where a CUfunction is expected. */
        MUST(cuLibraryLoadData(&library, image, NULL, NULL, 0, NULL, NULL, 0));
        MUST(cuLibraryGetKernel((void **)&function, library, "work"));
    } else {
        MUST(cuModuleLoadData(&module, image));
        MUST(cuModuleGetFunction(&function, module, "work"));
    }
    if (strncmp(way, "old", 3) == 0)
        MUST(cuFuncSetBlockShape(function, 64, 1, 1));
    if (strncmp(way, "graph", 5) == 0) {
        MUST(cuStreamCreate(&stream, 1));
        /* If the library made an unsafe call during a capture in global mode, the capture would fail. If it recorded an
         * event, the event would become a node of the graph. */
        MUST(cuStreamBeginCapture_v2(stream, 0));
        for (int i = 0; i < 10; i++)
            MUST(cuLaunchKernel(function, 64, 1, 1, 64, 1, 1, 0, stream, NULL, NULL));
        MUST(cuStreamEndCapture(stream, &graph));
        size_t nodes = 0;
        MUST(cuGraphGetNodes(graph, NULL, &nodes));
        if (nodes != 10) {
            fprintf(stderr, "launcher: the graph has %zu nodes, expected 10\n", nodes);
            return 4;
        }
        MUST(cuGraphInstantiateWithFlags(&exec, graph, 0));
    }
    puts("ready");
    for (int i = 1; i < count && i < 16; i++)
        pthread_create(&threads[i], NULL, work, NULL);
    work(NULL);
    for (int i = 1; i < count && i < 16; i++)
        pthread_join(threads[i], NULL);
    if (seconds > 0)
        MUST(cuCtxSynchronize());
    return 0;
}
