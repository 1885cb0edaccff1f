/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Captures launches into graphs while the library limits launches. Usage: captures HOW LAUNCHES. Prints the number of
 * nodes of each captured graph. HOW is one of:
 *
 *   hooked       the capture begins with the hooked cuStreamBeginCapture_v2
 *   unseen       the capture begins with the driver's own function, bypassing the hooks
 *   recaptured   like unseen, but several captures, with uncaptured launches between them
 *   unmatched    like hooked; before and during the capture the program also tries to end captures that never began
 *   meanwhile    like unseen, in global mode; another thread launches meanwhile, and the library queries that thread's
 *                events
 *   newer        cuStreamBeginRecaptureToGraph (CUDA 13.3) captures into an existing graph
 */
#include "driver/cuda_abi.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SHAPE unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned
CUresult cuInit(unsigned flags);
CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device);
CUresult cuCtxSetCurrent(CUcontext context);
CUresult cuModuleLoadData(CUmodule *module, const void *image);
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name);
CUresult cuStreamSynchronize(CUstream stream);
CUresult cuStreamBeginCapture_v2(CUstream stream, int mode);
CUresult cuLaunchKernel(CUfunction function, SHAPE, CUstream stream, void **parameters, void **extra);
void *unhooked(const char *name); /* This function is defined in unhooked.c. */
CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph);
CUresult cuStreamCreate(CUstream *stream, unsigned flags);
CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count);

#define MUST(call) \
    do { \
        CUresult status_ = (call); \
        if (status_ != 0) { \
            fprintf(stderr, "captures: line %d: %s: %d\n", __LINE__, #call, status_); \
            exit(3); \
        } \
    } while (0)

static CUcontext context;
static CUfunction function;
static CUstream stream;
static int launches;
static atomic_int stop, running;

static void launch(CUstream into, int count)
{
    while (count--)
        MUST(cuLaunchKernel(function, 64, 1, 1, 64, 1, 1, 0, into, NULL, NULL));
}

static size_t captured(CUresult (*begin)(CUstream stream, int mode))
{
    CUgraph graph = NULL;
    size_t count = 0;
    MUST(begin(stream, 0));
    launch(stream, launches);
    usleep(2000); /* In this pause the library's controller thread runs, which queries timing events. */
    launch(stream, 1);
    MUST(cuStreamEndCapture(stream, &graph));
    MUST(cuGraphGetNodes(graph, NULL, &count));
    return count;
}

static CUresult begin_again(CUstream into, int mode)
{
    CUresult (*again)(CUstream, int, CUgraph, void *, void *);
    CUgraph graph;
    *(void **)&again = unhooked("cuStreamBeginRecaptureToGraph");
    MUST(cuStreamBeginCapture_v2(into, mode));
    launch(into, launches + 1);
    MUST(cuStreamEndCapture(into, &graph));
    return again(into, mode, graph, NULL, NULL);
}

static void *meanwhile(void *unused)
{
    CUstream own;
    (void)unused;
    MUST(cuCtxSetCurrent(context));
    MUST(cuStreamCreate(&own, 1));
    while (!atomic_load(&stop)) {
        launch(own, 20);
        atomic_store(&running, 1);
    }
    return NULL;
}

/* Tries to end a capture that never began. The call must return the driver's error and change nothing. */
static void end_unmatched(void)
{
    CUstream other;
    CUgraph graph;
    MUST(cuStreamCreate(&other, 1));
    for (int i = 0; i < 3; i++)
        if (!cuStreamEndCapture(other, &graph) || !cuStreamEndCapture((CUstream)&other, &graph))
            exit(5);
}

static CUresult begin_unmatched(CUstream into, int mode)
{
    CUresult status = cuStreamBeginCapture_v2(into, mode);
    end_unmatched();
    return status;
}

int main(int argc, char **argv)
{
    const char *how = argc > 2 ? argv[1] : "";
    CUmodule module;
    CUresult (*begin)(CUstream, int) = cuStreamBeginCapture_v2;
    launches = argc > 2 ? atoi(argv[2]) - 1 : 0;
    MUST(cuInit(0));
    MUST(cuCtxCreate_v2(&context, 0, 0));
    /* For the simulated driver: the kernel `work` takes 50 us. */
    MUST(cuModuleLoadData(&module, ".gpusim kernel work 50\n"));
    MUST(cuModuleGetFunction(&function, module, "work"));
    MUST(cuStreamCreate(&stream, 1));
    if (!strcmp(how, "unseen") || !strcmp(how, "recaptured") || !strcmp(how, "meanwhile"))
        *(void **)&begin = unhooked("cuStreamBeginCapture_v2");
    else if (!strcmp(how, "newer"))
        begin = begin_again;
    else if (!strcmp(how, "unmatched"))
        begin = begin_unmatched;
    launch(stream, 3);
    MUST(cuStreamSynchronize(stream));
    usleep(50000); /* In this pause the limiter refills the budget of GPU time that the first launches used. */
    pthread_t thread;
    if (!strcmp(how, "meanwhile")) {
        pthread_create(&thread, NULL, meanwhile, NULL);
        while (!atomic_load(&running))
            usleep(100);
    }
    for (int round = 0; round < (strcmp(how, "recaptured") ? 1 : 5); round++) {
        printf("%zu\n", captured(begin));
        if (!strcmp(how, "recaptured"))
            launch(stream, 10);
    }
    atomic_store(&stop, 1);
    if (!strcmp(how, "meanwhile"))
        pthread_join(thread, NULL);
    return 0;
}
