/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calls most parts of the simulated libcuda from several threads, so that sanitizers find errors in it. It uses every
 * kind of memory, copies, streams, events, graphs, callbacks, modules and virtual memory management, and creates and
 * destroys contexts. It is linked with libcuda and checks each result.
 */
#include "cuda_abi.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CALL(expression)                                                             \
    do {                                                                             \
        int result_ = (expression);                                                  \
        if (result_) {                                                               \
            fprintf(stderr, "%s:%d: %s: %d\n", __FILE__, __LINE__, #expression, result_); \
            exit(1);                                                                 \
        }                                                                            \
    } while (0)

CUresult cuInit(unsigned);
CUresult cuCtxCreate_v2(CUcontext *, unsigned, CUdevice);
CUresult cuCtxDestroy_v2(CUcontext);
CUresult cuCtxSetCurrent(CUcontext);
CUresult cuCtxSynchronize(void);
CUresult cuMemAlloc_v2(CUdeviceptr *, size_t);
CUresult cuMemFree_v2(CUdeviceptr);
CUresult cuMemAllocManaged(CUdeviceptr *, size_t, unsigned);
CUresult cuMemAllocAsync(CUdeviceptr *, size_t, CUstream);
CUresult cuMemFreeAsync(CUdeviceptr, CUstream);
CUresult cuMemAllocHost_v2(void **, size_t);
CUresult cuMemFreeHost(void *);
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr, const void *, size_t, CUstream);
CUresult cuMemcpyDtoH_v2(void *, CUdeviceptr, size_t);
CUresult cuMemsetD32_v2(CUdeviceptr, unsigned, size_t);
CUresult cuStreamCreate(CUstream *, unsigned);
CUresult cuStreamDestroy_v2(CUstream);
CUresult cuStreamSynchronize(CUstream);
CUresult cuStreamBeginCapture_v2(CUstream, int);
CUresult cuStreamEndCapture(CUstream, CUgraph *);
CUresult cuEventCreate(CUevent *, unsigned);
CUresult cuEventRecord(CUevent, CUstream);
CUresult cuEventSynchronize(CUevent);
CUresult cuEventDestroy_v2(CUevent);
CUresult cuModuleLoadData(CUmodule *, const void *);
CUresult cuModuleUnload(CUmodule);
CUresult cuModuleGetFunction(CUfunction *, CUmodule, const char *);
CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream,
                        void **, void **);
CUresult cuLaunchHostFunc(CUstream, CUhostFn, void *);
CUresult cuGraphInstantiateWithFlags(CUgraphExec *, CUgraph, unsigned long long);
CUresult cuGraphLaunch(CUgraphExec, CUstream);
CUresult cuGraphExecDestroy(CUgraphExec);
CUresult cuGraphDestroy(CUgraph);
CUresult cuMemCreate(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long);
CUresult cuMemAddressReserve(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
CUresult cuMemMap(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long);
CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t);
CUresult cuMemUnmap(CUdeviceptr, size_t);
CUresult cuMemRelease(CUmemGenericAllocationHandle);
CUresult cuMemAddressFree(CUdeviceptr, size_t);
CUresult cuArrayCreate_v2(CUarray *, const CUDA_ARRAY_DESCRIPTOR *);
CUresult cuArrayDestroy(CUarray);

#define ROUNDS 40
#define BLOCKS 24

static CUcontext context;
static CUfunction kernel;

static void count_up(void *data)
{
    ++*(int *)data;
}

static void memory_round(unsigned *seed, CUstream stream)
{
    CUdeviceptr blocks[BLOCKS];
    unsigned char host[512], back[512];
    for (int i = 0; i < BLOCKS; i++) {
        size_t bytes = 1 + rand_r(seed) % (i % 3 ? 5000 : 5000000);
        if (i % 5 == 4)
            CALL(cuMemAllocAsync(&blocks[i], bytes, stream));
        else if (i % 5 == 3)
            CALL(cuMemAllocManaged(&blocks[i], bytes, 1));
        else
            CALL(cuMemAlloc_v2(&blocks[i], bytes));
        size_t n = bytes < sizeof host ? bytes : sizeof host;
        for (size_t k = 0; k < n; k++)
            host[k] = (unsigned char)rand_r(seed);
        CALL(cuMemcpyHtoDAsync_v2(blocks[i], host, n, stream));
        CALL(cuMemcpyDtoH_v2(back, blocks[i], n));
        if (memcmp(host, back, n) != 0) {
            fprintf(stderr, "block %d of %zu bytes lost its data\n", i, bytes);
            exit(1);
        }
    }
    for (int i = BLOCKS - 1; i >= 0; i--) {
        if (i % 2)
            CALL(cuMemFree_v2(blocks[i]));
        else
            CALL(cuMemFreeAsync(blocks[i], stream));
    }
}

static void vmm_round(void)
{
    enum { SIZE = 2 << 20 };
    CUmemAllocationProp prop = {.type = 1, .location = {1, 0}};
    CUmemAccessDesc access = {.location = {1, 0}, .flags = 3};
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at;
    CALL(cuMemCreate(&handle, SIZE, &prop, 0));
    CALL(cuMemAddressReserve(&at, 2 * SIZE, 0, 0, 0));
    CALL(cuMemMap(at + SIZE, SIZE, 0, handle, 0));
    CALL(cuMemSetAccess(at + SIZE, SIZE, &access, 1));
    CALL(cuMemsetD32_v2(at + SIZE, 7, SIZE / 4));
    CALL(cuMemRelease(handle));
    CALL(cuMemUnmap(at + SIZE, SIZE));
    CALL(cuMemAddressFree(at, 2 * SIZE));
}

static void graph_round(CUstream stream, int *calls)
{
    CUgraph graph;
    CUgraphExec exec;
    CUdeviceptr scratch;
    CALL(cuStreamBeginCapture_v2(stream, 2));
    CALL(cuMemAllocAsync(&scratch, 10000, stream));
    CALL(cuLaunchKernel(kernel, 4, 1, 1, 64, 1, 1, 0, stream, NULL, NULL));
    CALL(cuLaunchHostFunc(stream, count_up, calls));
    CALL(cuMemFreeAsync(scratch, stream));
    CALL(cuStreamEndCapture(stream, &graph));
    CALL(cuGraphInstantiateWithFlags(&exec, graph, 0));
    CALL(cuGraphDestroy(graph));
    CALL(cuGraphLaunch(exec, stream));
    CALL(cuGraphLaunch(exec, stream));
    CALL(cuStreamSynchronize(stream));
    CALL(cuGraphExecDestroy(exec));
}

static void *worker(void *argument)
{
    unsigned seed = (unsigned)(uintptr_t)argument;
    int calls = 0;
    CUstream stream;
    CALL(cuCtxSetCurrent(context));
    CALL(cuStreamCreate(&stream, 1));
    for (int round = 0; round < ROUNDS; round++) {
        CUevent event;
        CUarray array;
        void *host;
        CUDA_ARRAY_DESCRIPTOR shape = {.width = 33, .height = 9, .format = 0x20, .channels = 2};
        memory_round(&seed, stream);
        vmm_round();
        graph_round(stream, &calls);
        CALL(cuArrayCreate_v2(&array, &shape));
        CALL(cuMemAllocHost_v2(&host, 10000));
        CALL(cuEventCreate(&event, 0));
        for (int i = 0; i < 30; i++)
            CALL(cuLaunchKernel(kernel, 4, 1, 1, 64, 1, 1, 0, i % 2 ? stream : NULL, NULL, NULL));
        CALL(cuEventRecord(event, stream));
        CALL(cuEventSynchronize(event));
        CALL(cuEventDestroy_v2(event));
        CALL(cuMemFreeHost(host));
        CALL(cuArrayDestroy(array));
    }
    CALL(cuStreamSynchronize(stream));
    CALL(cuStreamDestroy_v2(stream));
    if (calls != 2 * ROUNDS) {
        fprintf(stderr, "expected %d host functions, %d ran\n", 2 * ROUNDS, calls);
        exit(1);
    }
    return NULL;
}

int main(void)
{
    CUmodule module;
    pthread_t threads[3];
    CALL(cuInit(0));
    for (int turn = 0; turn < 2; turn++) {
        CALL(cuCtxCreate_v2(&context, 0, 0));
        /* The text declares a simulated kernel k of 1 microsecond on 4 SMs, and a global variable g of 100 bytes. */
        CALL(cuModuleLoadData(&module, ".gpusim kernel k 1 4\n.gpusim global g 100\n"));
        CALL(cuModuleGetFunction(&kernel, module, "k"));
        for (uintptr_t i = 0; i < 3; i++)
            pthread_create(&threads[i], NULL, worker, (void *)(i + 1));
        for (int i = 0; i < 3; i++)
            pthread_join(threads[i], NULL);
        CALL(cuCtxSynchronize());
        if (turn == 0)
            CALL(cuModuleUnload(module));
        CALL(cuCtxDestroy_v2(context));
    }
    return 0;
}
