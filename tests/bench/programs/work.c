/* SPDX-License-Identifier: Apache-2.0 */
/* Looks up and makes the driver calls that the benchmarks measure. */
#include "work.h"

#include <dlfcn.h>
#include <string.h>

#define FN(symbol, name, version, parameters) CUresult symbol parameters;
FUNCTIONS(FN)
#undef FN
CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, cuuint64_t flags, int *status);
nvmlReturn_t nvmlInit_v2(void);

/* A kernel takes one microsecond, so most queued kernels have run before the next launch. */
static const char image[] = ".version 7.0\n.target sm_50\n.address_size 64\n"
                            "// .gpusim kernel quick 1\n// .gpusim kernel other 1\n";

bool work_route(struct work *work, const char *route)
{
    memset(work, 0, sizeof *work);
    if (strcmp(route, "link") == 0) {
#define FN(symbol, name, version, parameters) work->driver.symbol = symbol;
        FUNCTIONS(FN)
#undef FN
        return true;
    }
    bool found = true;
    if (strcmp(route, "dlsym") == 0) {
        void *library = dlopen("libcuda.so.1", RTLD_NOW);
#define FN(symbol, name, version, parameters) \
    *(void **)&work->driver.symbol = library ? dlsym(library, #symbol) : NULL; \
    found = found && work->driver.symbol;
        FUNCTIONS(FN)
#undef FN
        return found;
    }
    if (strcmp(route, "proc") == 0) {
        int status;
#define FN(symbol, name, version, parameters) \
    found = cuGetProcAddress_v2(name, (void **)&work->driver.symbol, version, 0, &status) == CUDA_SUCCESS && found;
        FUNCTIONS(FN)
#undef FN
        return found;
    }
    return false;
}

bool work_start(struct work *work, int device)
{
    CUcontext context;
    return work->driver.cuInit(0) == CUDA_SUCCESS && work->driver.cuCtxCreate_v2(&context, 0, device) == CUDA_SUCCESS;
}

bool work_nvml(void)
{
    return nvmlInit_v2() == NVML_SUCCESS;
}

bool work_fill(struct work *work, unsigned long blocks)
{
    CUdeviceptr pointer;
    for (unsigned long i = 0; i < blocks; i++)
        if (work->driver.cuMemAlloc_v2(&pointer, 512) != CUDA_SUCCESS)
            return false;
    return true;
}

static bool kernel(struct work *work)
{
    CUmodule module;
    return work->kernel || (work->driver.cuModuleLoadData(&module, image) == CUDA_SUCCESS &&
                            work->driver.cuModuleGetFunction(&work->other, module, "other") == CUDA_SUCCESS &&
                            work->driver.cuModuleGetFunction(&work->kernel, module, "quick") == CUDA_SUCCESS);
}

bool work_before(struct work *work, const char *call)
{
    if (strcmp(call, "free") == 0)
        return work->driver.cuMemAlloc_v2(&work->held, 4096) == CUDA_SUCCESS;
    if (strcmp(call, "launch") == 0)
        return kernel(work);
    if (strcmp(call, "turns") == 0) {
        CUfunction last = work->kernel;
        work->kernel = work->other;
        work->other = last;
        return kernel(work);
    }
    return true;
}

bool work_call(struct work *work, const char *call)
{
    CUdeviceptr pointer;
    size_t free_bytes, total;
    switch (call[0]) {
    case 'p':
        return work->driver.cuMemAlloc_v2(&pointer, 4096) == CUDA_SUCCESS && work->driver.cuMemFree_v2(pointer) == CUDA_SUCCESS;
    case 'f':
        return work->driver.cuMemFree_v2(work->held) == CUDA_SUCCESS;
    case 'l':
    case 't':
        return work->driver.cuLaunchKernel(work->kernel, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL) == CUDA_SUCCESS;
    case 'i':
        return work->driver.cuMemGetInfo_v2(&free_bytes, &total) == CUDA_SUCCESS;
    default:
        return true;
    }
}
