/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calls the functions of programs/driver_newer.c, a simulated driver that is newer than the library. Usage: newer WAY
 * WHAT
 *
 *   WAY    how the program looks these functions up: link, proc (cuGetProcAddress), handle, next or default (dlsym)
 *   WHAT   cig: captures 200 launches by cuStreamBeginCaptureToCig, which captures for graphics (CUDA in Graphics)
 *          recapture: captures 200 launches by cuStreamBeginRecaptureToGraph, which captures into an existing graph
 *          cig-per-thread, recapture-per-thread: like these two, but by the functions for per-thread default streams
 *          (suffix _ptsz); each of the four prints the number of captured nodes
 *          memory: allocates 64 MiB three times by a version of cuMemAlloc newer than the library, then 1 MiB by the usual
 *          version; prints a line after each allocation and waits for an input line
 */
#include "driver/cuda_abi.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define SHAPE unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned
#define SIZE (64u << 20)
CUresult cuInit(unsigned flags);
CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device);
CUresult cuModuleLoadData(CUmodule *module, const void *image);
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name);
CUresult cuStreamCreate(CUstream *stream, unsigned flags);
CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph);
CUresult cuStreamEndCapture_ptsz(CUstream stream, CUgraph *graph);
CUresult cuGraphCreate(CUgraph *graph, unsigned flags);
CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count);
CUresult cuLaunchKernel(CUfunction function, SHAPE, CUstream stream, void **parameters, void **extra);
CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes);
CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags, int *status);

#define FUNCTIONS(FN) \
    FN(cuMemAlloc_v9, "cuMemAlloc", 19000, 0, (CUdeviceptr *, size_t, int, int, int, int, double, double, int, int)) \
    FN(cuStreamBeginCaptureToCig, "cuStreamBeginCaptureToCig", 13010, 0, (CUstream, void *)) \
    FN(cuStreamBeginCaptureToCig_ptsz, "cuStreamBeginCaptureToCig", 13010, 2, (CUstream, void *)) \
    FN(cuStreamEndCaptureToCig, "cuStreamEndCaptureToCig", 13010, 0, (CUstream)) \
    FN(cuStreamEndCaptureToCig_ptsz, "cuStreamEndCaptureToCig", 13010, 2, (CUstream)) \
    FN(cuStreamBeginRecaptureToGraph, "cuStreamBeginRecaptureToGraph", 13030, 0, (CUstream, int, CUgraph, void *, void *)) \
    FN(cuStreamBeginRecaptureToGraph_ptsz, "cuStreamBeginRecaptureToGraph", 13030, 2, (CUstream, int, CUgraph, void *, void *))

#define FN(symbol, name, version, flags, parameters) CUresult symbol parameters;
FUNCTIONS(FN)
#undef FN
#define FN(symbol, name, version, flags, parameters) static CUresult(*my_##symbol) parameters;
FUNCTIONS(FN)
#undef FN

static void must(const char *name, CUresult status)
{
    if (status == CUDA_SUCCESS)
        return;
    fprintf(stderr, "newer: %s: %d\n", name, (int)status);
    _exit(3);
}
#define MUST(call) must(#call, call)

static void *look_up(const char *way, const char *symbol, const char *name, int version, int flags)
{
    void *function = NULL;
    if (strcmp(way, "handle") == 0)
        return dlsym(dlopen("libcuda.so.1", RTLD_LAZY), symbol);
    if (strcmp(way, "next") == 0)
        return dlsym(RTLD_NEXT, symbol);
    if (strcmp(way, "default") == 0)
        return dlsym(RTLD_DEFAULT, symbol);
    MUST(cuGetProcAddress_v2(name, &function, version, (cuuint64_t)flags, NULL));
    return function;
}

static void find(const char *way)
{
#define FN(symbol, name, version, flags, parameters) \
    if (strcmp(way, "link") == 0) \
        my_##symbol = symbol; \
    else \
        *(void **)&my_##symbol = look_up(way, #symbol, name, version, flags); \
    must(#symbol, my_##symbol ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND);
    FUNCTIONS(FN)
#undef FN
}

static void step(int number)
{
    char line[16];
    printf("%d\n", number);
    fflush(stdout);
    if (!fgets(line, sizeof line, stdin))
        _exit(4);
}

static void memory(void)
{
    CUdeviceptr pointer;
    for (int i = 0; i < 3; i++) {
        MUST(my_cuMemAlloc_v9(&pointer, SIZE, 2, 3, 4, 5, 0.5, 0.25, 7, 8));
        step(i);
    }
    MUST(cuMemAlloc_v2(&pointer, 1 << 20));
    step(3);
}

static void launch(CUstream stream)
{
    CUmodule module;
    CUfunction function;
    /* For the simulated driver: the kernel `k` takes 20 ms. */
    MUST(cuModuleLoadData(&module, ".gpusim kernel k 20000\n"));
    MUST(cuModuleGetFunction(&function, module, "k"));
    for (int i = 0; i < 200; i++)
        MUST(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, NULL, NULL));
}

static void capture(const char *what)
{
    int per_thread = strstr(what, "-per-thread") != NULL;
    size_t count = 0;
    CUstream stream;
    CUgraph graph;
    MUST(cuStreamCreate(&stream, 1));
    MUST(cuGraphCreate(&graph, 0));
    if (strncmp(what, "cig", 3) == 0) {
        MUST((per_thread ? my_cuStreamBeginCaptureToCig_ptsz : my_cuStreamBeginCaptureToCig)(stream, &count));
        launch(stream);
        MUST((per_thread ? my_cuStreamEndCaptureToCig_ptsz : my_cuStreamEndCaptureToCig)(stream));
    } else {
        MUST((per_thread ? my_cuStreamBeginRecaptureToGraph_ptsz : my_cuStreamBeginRecaptureToGraph)(stream, 2, graph, NULL, NULL));
        launch(stream);
        MUST((per_thread ? cuStreamEndCapture_ptsz : cuStreamEndCapture)(stream, &graph));
        MUST(cuGraphGetNodes(graph, NULL, &count));
    }
    printf("%zu nodes\n", count);
}

int main(int argc, char **argv)
{
    CUcontext context;
    if (argc != 3)
        return 2;
    MUST(cuInit(0));
    find(argv[1]);
    MUST(cuCtxCreate_v2(&context, 0, 0));
    if (strcmp(argv[2], "memory") == 0)
        memory();
    else
        capture(argv[2]);
    return 0;
}
