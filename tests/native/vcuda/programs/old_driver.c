/* SPDX-License-Identifier: Apache-2.0 */
/* Runs on a driver so old that it has no cuLaunchKernelEx. Launches by cuLaunchKernel, then calls cuLaunchKernelEx, for
 * which the library has a hook, and prints the result. */
#include "driver/cuda_abi.h"

#include <stdio.h>

typedef struct CUfunc_st *CUfunction;
CUresult cuInit(unsigned flags);
CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device);
CUresult cuModuleLoadData(CUmodule *module, const void *image);
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name);
CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, CUstream stream, void **parameters, void **extra);
CUresult cuLaunchKernelEx(const void *config, CUfunction function, void **parameters, void **extra);

int main(void)
{
    static const unsigned long long config[8]; /* The buffer is larger than any launch configuration. */
    CUcontext context;
    CUmodule module;
    CUfunction function;
    /* The text is for the simulated driver: the kernel `k` takes 10 us. */
    if (cuInit(0) || cuCtxCreate_v2(&context, 0, 0) || cuModuleLoadData(&module, "// .gpusim kernel k 10\n") ||
        cuModuleGetFunction(&function, module, "k"))
        return 2;
    for (int i = 0; i < 5; i++)
        if (cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL))
            return 3;
    printf("%d\n", cuLaunchKernelEx(config, function, NULL, NULL));
    return 0;
}
