/* SPDX-License-Identifier: Apache-2.0 */
/* Allocates memory, launches kernels, waits and frees in an endless loop. Tests kill this program at a random
 * moment. */
#include "cuda_abi.h"

#include <stdlib.h>
#include <unistd.h>

CUresult cuInit(unsigned);
CUresult cuCtxCreate_v2(CUcontext *, unsigned, CUdevice);
CUresult cuMemAlloc_v2(CUdeviceptr *, size_t);
CUresult cuMemFree_v2(CUdeviceptr);
CUresult cuMemAllocAsync(CUdeviceptr *, size_t, CUstream);
CUresult cuCtxSynchronize(void);
CUresult cuModuleLoadData(CUmodule *, const void *);
CUresult cuModuleGetFunction(CUfunction *, CUmodule, const char *);
CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream,
                        void **, void **);

int main(void)
{
    CUcontext context;
    CUmodule module;
    CUfunction kernel;
    unsigned seed = (unsigned)getpid();
    /* The module's text declares a simulated kernel k of 3 microseconds. */
    if (cuInit(0) || cuCtxCreate_v2(&context, 0, 0) || cuModuleLoadData(&module, ".gpusim kernel k 3\n") ||
        cuModuleGetFunction(&kernel, module, "k"))
        return 1;
    for (;;) {
        CUdeviceptr blocks[8];
        int count = 0;
        for (int i = 0; i < 8; i++)
            count += (i % 4 ? cuMemAlloc_v2(&blocks[count], 1 + rand_r(&seed) % (1 << 26))
                            : cuMemAllocAsync(&blocks[count], 1 + rand_r(&seed) % (1 << 26), NULL)) == 0;
        for (int i = 0; i < 20; i++)
            if (cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL))
                return 2;
        if (rand_r(&seed) % 8 == 0 && cuCtxSynchronize())
            return 3;
        while (count > 0)
            if (cuMemFree_v2(blocks[--count]))
                return 4;
    }
}
