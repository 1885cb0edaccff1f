/* SPDX-License-Identifier: Apache-2.0 */
/*
 * capture: captures 200 launches into a graph, once with each call by which this driver can begin a capture. Prints for
 * each of them the number of nodes in the graph and the status of the capture's end.
 *   plain      cuStreamBeginCapture
 *   disturbed  cuStreamBeginCapture, then the end of a capture on another stream, which must fail and change nothing
 *   again      cuStreamBeginRecaptureToGraph (CUDA 13.3), into the graph of `plain`
 */
#include "gpu.h"

enum { LAUNCHES = 200, BEFORE = 100, STEPS = 5000 };

typedef CUresult (*recapture)(CUstream, int, CUgraph, void *, void *);

static CUfunction spin;
static CUdeviceptr starts, ends;
static CUstream stream, other;
static CUresult (*nodes_of)(CUgraph, void *, size_t *);

static void launch(int times)
{
    unsigned steps = STEPS;
    for (unsigned i = 0; i < (unsigned)times; i++) {
        void *parameters[] = {&starts, &ends, &i, &steps};
        MUST(CALL(cuLaunchKernel, spin, 8, 1, 1, 32, 1, 1, 0, stream, parameters, NULL));
    }
}

static void end(const char *name, uint64_t began, CUgraph *graph, const char *after)
{
    size_t nodes = 0;
    CUresult status = CALL(cuStreamEndCapture, stream, graph);
    if (status == CUDA_SUCCESS)
        MUST(nodes_of(*graph, NULL, &nodes));
    printf("\"%s\": {\"status\": %d, \"nodes\": %zu, \"milliseconds\": %.3f}%s", name, status, nodes,
           (double)(now_ns() - began) / 1e6, after);
}

int main(void)
{
    CUcontext context;
    CUmodule module;
    CUgraph graph, none;
    gpu_open();
    *(void **)&nodes_of = dlsym(gpu_library(), "cuGraphGetNodes");
    MUST(CALL(cuInit, 0));
    MUST(CALL(cuDevicePrimaryCtxRetain, &context, 0));
    MUST(CALL(cuCtxSetCurrent, context));
    MUST(gpu_module(&module, 100, NULL));
    MUST(CALL(cuModuleGetFunction, &spin, module, "vgpu_spin"));
    MUST(CALL(cuMemAlloc_v2, &starts, LAUNCHES * 8));
    MUST(CALL(cuMemAlloc_v2, &ends, LAUNCHES * 8));
    MUST(CALL(cuStreamCreate, &stream, STREAM_NON_BLOCKING));
    MUST(CALL(cuStreamCreate, &other, STREAM_NON_BLOCKING));
    /* The limiter, the part of a preloaded libvgpu that throttles launches, must measure the GPU time of these launches
     * during the capture. */
    launch(BEFORE);
    printf("{");
    uint64_t began = now_ns();
    MUST(CALL(cuStreamBeginCapture_v2, stream, CAPTURE_RELAXED));
    launch(LAUNCHES);
    end("plain", began, &graph, ", ");
    launch(BEFORE);
    MUST(CALL(cuStreamBeginCapture_v2, stream, CAPTURE_RELAXED));
    /* Two calls that must fail (wrong state, wrong argument) and must not affect the open capture. */
    if (CALL(cuStreamEndCapture, other, &none) == CUDA_SUCCESS || CALL(cuStreamEndCapture, other, NULL) == CUDA_SUCCESS)
        gpu_fail("a stream that captures nothing ended a capture", 0);
    began = now_ns();
    launch(LAUNCHES);
    end("disturbed", began, &none, "");
    recapture again = (recapture)dlsym(gpu_library(), "cuStreamBeginRecaptureToGraph");
    if (again) {
        printf(", ");
        launch(BEFORE);
        began = now_ns();
        MUST(again(stream, CAPTURE_RELAXED, graph, NULL, NULL));
        launch(LAUNCHES);
        end("again", began, &graph, "");
    }
    printf("}\n");
    fflush(stdout);
    _exit(0); /* Skips exit handlers, because another stage (`exit`) tests the end of a process. */
}
