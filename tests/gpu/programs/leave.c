/* SPDX-License-Identifier: Apache-2.0 */
/* leave: launches kernels for a moment and returns from main before all kernels have finished, as many programs do. A
 * preloaded library must not change the program's exit status or output. */
#include "gpu.h"

enum { LAUNCHES = 256, STEPS = 20000, OPEN = 64 };

int main(void)
{
    CUcontext context;
    CUmodule module;
    CUfunction spin;
    CUdeviceptr stamps = 0;
    unsigned steps = STEPS;
    gpu_open();
    MUST(CALL(cuInit, 0));
    MUST(CALL(cuDevicePrimaryCtxRetain, &context, 0));
    MUST(CALL(cuCtxSetCurrent, context));
    MUST(gpu_module(&module, 300, NULL));
    MUST(CALL(cuModuleGetFunction, &spin, module, "vgpu_spin"));
    MUST(CALL(cuMemAlloc_v2, &stamps, 2 * LAUNCHES * 8));
    CUdeviceptr ends = stamps + LAUNCHES * 8;
    for (unsigned i = 0; i < LAUNCHES; i++) {
        void *parameters[] = {&stamps, &ends, &i, &steps};
        MUST(CALL(cuLaunchKernel, spin, 8, 1, 1, 32, 1, 1, 0, NULL, parameters, NULL));
        if (i == LAUNCHES - OPEN)
            MUST(CALL(cuCtxSynchronize));
    }
    return 0;
}
