/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tests that the library's hooks pass on all parameters of a launch. The last parameters are passed on the stack, and
 * the result of each launch depends on them, so a lost parameter gives a wrong result. Prints "ok" or the number of the
 * launch with a wrong result. Each launch is repeated, because a first launch takes the library's slow path and most
 * later ones the fast path.
 */
#include "driver/cuda_abi.h"

#include <stdio.h>

typedef struct CUfunc_st *CUfunction;
CUresult cuInit(unsigned flags);
CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device);
CUresult cuModuleLoadData(CUmodule *module, const void *image);
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name);
CUresult cuStreamCreate(CUstream *stream, unsigned flags);
CUresult cuStreamSynchronize(CUstream stream);
CUresult cuStreamDestroy_v2(CUstream stream);
CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, CUstream stream, void **parameters, void **extra);
CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                   unsigned bz, unsigned shared, CUstream stream, void **parameters);

enum { TIMES = 200 };

int main(void)
{
    CUcontext context;
    CUmodule module;
    CUfunction function;
    CUstream stream, other;
    /* The text is for the simulated driver: the kernel `k` takes 10 us. */
    if (cuInit(0) || cuCtxCreate_v2(&context, 0, 0) || cuModuleLoadData(&module, "// .gpusim kernel k 10\n") ||
        cuModuleGetFunction(&function, module, "k") || cuStreamCreate(&stream, 1) || cuStreamCreate(&other, 1))
        return 2;
    cuStreamDestroy_v2(other); /* From here on `other` is an invalid handle. */
    void *list[] = {NULL};
    const struct {
        unsigned bz, shared;
        CUstream stream;
        void **parameters, **extra;
        CUresult answer; /* The expected result. 0: success; other values: any error. */
    } launches[] = {
        {1, 0, stream, NULL, NULL, 0},
        {4, 0, stream, list, NULL, 0},
        {2000, 0, stream, list, NULL, 1},
        {1, 1u << 30, stream, list, NULL, 1},
        {1, 0, stream, list, list, 1},
        {1, 0, NULL, NULL, list, 0},
        {1, 0, other, list, NULL, 1},
    };
    for (unsigned i = 0; i < sizeof launches / sizeof *launches; i++)
        for (int times = 0; times < TIMES; times++) {
            CUresult answer = cuLaunchKernel(function, 3, 2, 1, 8, 4, launches[i].bz, launches[i].shared, launches[i].stream,
                                             launches[i].parameters, launches[i].extra);
            if (!answer != !launches[i].answer) {
                printf("launch %u, time %d: %d\n", i, times, answer);
                return 1;
            }
            if (!launches[i].extra &&
                !cuLaunchCooperativeKernel(function, 3, 2, 1, 8, 4, launches[i].bz, launches[i].shared, launches[i].stream,
                                           launches[i].parameters) != !launches[i].answer) {
                printf("cooperative launch %u, time %d\n", i, times);
                return 1;
            }
        }
    if (cuStreamSynchronize(stream))
        return 3;
    puts("ok");
    return 0;
}
