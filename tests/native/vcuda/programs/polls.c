/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Launches kernels of 10 ms for two seconds. Usage: polls HOW. Prints the elapsed time and the GPU time of the kernels,
 * both in ms, so that the test can check that the program got its share of GPU time.
 *
 *   waits    the program synchronizes after each launch
 *   asks     the program queries the stream until it is empty, then launches the next kernel
 *   runs     the program launches without a pause; only the limit delays it
 */
#include "driver/cuda_abi.h"

#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define SHAPE unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned
CUresult cuInit(unsigned flags);
CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device);
CUresult cuModuleLoadData(CUmodule *module, const void *image);
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name);
CUresult cuStreamCreate(CUstream *stream, unsigned flags);
CUresult cuStreamQuery(CUstream stream);
CUresult cuStreamSynchronize(CUstream stream);
CUresult cuLaunchKernel(CUfunction function, SHAPE, CUstream stream, void **parameters, void **extra);

#define KERNEL_MS 10

static double now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

int main(int argc, char **argv)
{
    const char *how = argc > 1 ? argv[1] : "";
    CUcontext context;
    CUmodule module;
    CUfunction function;
    CUstream stream;
    /* The text is for the simulated driver: the kernel `work` takes 10 ms. */
    if (cuInit(0) || cuCtxCreate_v2(&context, 0, 0) || cuModuleLoadData(&module, ".gpusim kernel work 10000\n") ||
        cuModuleGetFunction(&function, module, "work") || cuStreamCreate(&stream, 1))
        return 2;
    double begun = now_ms();
    int launches = 0;
    while (now_ms() < begun + 2000) {
        if (cuLaunchKernel(function, 64, 1, 1, 64, 1, 1, 0, stream, NULL, NULL))
            return 3;
        launches++;
        if (!strcmp(how, "waits"))
            cuStreamSynchronize(stream);
        while (!strcmp(how, "asks") && cuStreamQuery(stream))
            usleep(500);
    }
    if (cuStreamSynchronize(stream))
        return 3;
    printf("%.0f %d\n", now_ms() - begun, launches * KERNEL_MS);
    return 0;
}
