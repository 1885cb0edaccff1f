/* SPDX-License-Identifier: Apache-2.0 */
/* Usage: many_streams US LAUNCHES STREAMS THREADS TOGETHER. Each thread launches a kernel of US microseconds LAUNCHES
 * times, into its STREAMS streams in turn, and waits for the GPU after every TOGETHER launches. */
#include "driver/cuda_abi.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#define SHAPE unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned
CUresult cuInit(unsigned flags);
CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device);
CUresult cuCtxSetCurrent(CUcontext context);
CUresult cuCtxSynchronize(void);
CUresult cuModuleLoadData(CUmodule *module, const void *image);
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name);
CUresult cuStreamCreate(CUstream *stream, unsigned flags);
CUresult cuLaunchKernel(CUfunction function, SHAPE, CUstream stream, void **parameters, void **extra);

#define MUST(call) \
    do { \
        CUresult status_ = (call); \
        if (status_ != 0) { \
            fprintf(stderr, "many_streams: line %d: %s: %d\n", __LINE__, #call, status_); \
            exit(3); \
        } \
    } while (0)

static CUcontext context;
static CUfunction function;
static int launches, streams, together;

static void *launch(void *unused)
{
    CUstream stream[64];
    (void)unused;
    MUST(cuCtxSetCurrent(context));
    for (int i = 0; i < streams; i++)
        MUST(cuStreamCreate(&stream[i], 1));
    for (int i = 1; i <= launches; i++) {
        MUST(cuLaunchKernel(function, 64, 1, 1, 64, 1, 1, 0, stream[i % streams], NULL, NULL));
        if (i % together == 0 || i == launches)
            MUST(cuCtxSynchronize());
    }
    return NULL;
}

int main(int argc, char **argv)
{
    pthread_t thread[8];
    char image[64];
    CUmodule module;
    if (argc != 6)
        return 2;
    launches = atoi(argv[2]);
    streams = atoi(argv[3]);
    int threads = atoi(argv[4]);
    together = atoi(argv[5]);
    snprintf(image, sizeof image, ".gpusim kernel work %d\n", atoi(argv[1]));
    MUST(cuInit(0));
    MUST(cuCtxCreate_v2(&context, 0, 0));
    MUST(cuModuleLoadData(&module, image));
    MUST(cuModuleGetFunction(&function, module, "work"));
    for (int i = 0; i < threads; i++)
        pthread_create(&thread[i], NULL, launch, NULL);
    for (int i = 0; i < threads; i++)
        pthread_join(thread[i], NULL);
    return 0;
}
