/* SPDX-License-Identifier: Apache-2.0 */
/* Launches 300 kernels of 50 us in a green context, which has 16 of the GPU's SMs. Usage: green WAY. If WAY is "green",
 * the program creates a stream for the launches; if it is "green-default", the launches use the context's default
 * stream. */
#include "driver/cuda_abi.h"

#include <stdio.h>
#include <string.h>

#define SHAPE unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned
CUresult cuInit(unsigned flags);
CUresult cuCtxSetCurrent(CUcontext context);
CUresult cuModuleLoadData(CUmodule *module, const void *image);
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name);
CUresult cuStreamCreate(CUstream *stream, unsigned flags);
CUresult cuStreamSynchronize(CUstream stream);
CUresult cuLaunchKernel(CUfunction function, SHAPE, CUstream stream, void **parameters, void **extra);

/* These functions are looked up by name, because the driver that the tests link to does not have them. */
#include <dlfcn.h>

static CUresult call(const char *name, void *a, void *b, void *c, size_t d, size_t e, size_t f)
{
    CUresult (*function)(void *, void *, void *, size_t, size_t, size_t);
    *(void **)&function = dlsym(RTLD_DEFAULT, name);
    return function ? function(a, b, c, d, e, f) : -1;
}

#define MUST(call) \
    do { \
        CUresult status_ = (call); \
        if (status_ != 0) { \
            fprintf(stderr, "green: line %d: %s: %d\n", __LINE__, #call, status_); \
            return 3; \
        } \
    } while (0)

int main(int argc, char **argv)
{
    static char all[144], part[144];
    unsigned groups = 1;
    void *description, *green;
    CUcontext context;
    CUmodule module;
    CUfunction function;
    CUstream stream = NULL;
    MUST(cuInit(0));
    MUST(call("cuDeviceGetDevResource", NULL, all, (void *)1, 0, 0, 0));
    MUST(call("cuDevSmResourceSplitByCount", part, &groups, all, 0, 0, 16));
    MUST(call("cuDevResourceGenerateDesc", &description, part, (void *)1, 0, 0, 0));
    MUST(call("cuGreenCtxCreate", &green, description, NULL, 1, 0, 0));
    MUST(call("cuCtxFromGreenCtx", &context, green, NULL, 0, 0, 0));
    MUST(cuCtxSetCurrent(context));
    /* For the simulated driver: the kernel `k` takes 50 us. */
    MUST(cuModuleLoadData(&module, "// .gpusim kernel k 50\n"));
    MUST(cuModuleGetFunction(&function, module, "k"));
    if (argc < 2 || strcmp(argv[1], "green") == 0)
        MUST(cuStreamCreate(&stream, 1));
    for (int i = 0; i < 300; i++)
        MUST(cuLaunchKernel(function, 160, 1, 1, 32, 1, 1, 0, stream, NULL, NULL));
    MUST(cuStreamSynchronize(stream));
    MUST(call("cuGreenCtxDestroy", green, NULL, NULL, 0, 0, 0));
    puts("ok");
    return 0;
}
