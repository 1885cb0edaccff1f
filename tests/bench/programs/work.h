/* SPDX-License-Identifier: Apache-2.0 */
/* The driver calls that the benchmarks measure. Each is looked up by one of the routes that real programs use: link,
 * dlsym or cuGetProcAddress. */
#ifndef WORK_H
#define WORK_H

#include <stdbool.h>
#include <stddef.h>

#include "driver/cuda_abi.h"

typedef struct CUfunc_st *CUfunction;

/* FN(symbol, name for cuGetProcAddress, version, parameters) */
#define FUNCTIONS(FN) \
    FN(cuInit, "cuInit", 2000, (unsigned flags)) \
    FN(cuCtxCreate_v2, "cuCtxCreate", 3020, (CUcontext *context, unsigned flags, CUdevice device)) \
    FN(cuMemAlloc_v2, "cuMemAlloc", 3020, (CUdeviceptr *pointer, size_t bytes)) \
    FN(cuMemFree_v2, "cuMemFree", 3020, (CUdeviceptr pointer)) \
    FN(cuMemGetInfo_v2, "cuMemGetInfo", 3020, (size_t *free_bytes, size_t *total)) \
    FN(cuModuleLoadData, "cuModuleLoadData", 2000, (CUmodule *module, const void *image)) \
    FN(cuModuleGetFunction, "cuModuleGetFunction", 2000, (CUfunction *function, CUmodule module, const char *name)) \
    FN(cuCtxSynchronize, "cuCtxSynchronize", 2000, (void)) \
    FN(cuLaunchKernel, "cuLaunchKernel", 4000, \
       (CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, \
        CUstream stream, void **parameters, void **extra))

struct driver {
#define FN(symbol, name, version, parameters) CUresult(*symbol) parameters;
    FUNCTIONS(FN)
#undef FN
};

struct work {
    struct driver driver;
    CUfunction kernel, other;
    CUdeviceptr held; /* allocation that the next "free" frees */
};

/* Resolves the functions by the route link, dlsym or proc. Returns false for an unknown route or a missing function. */
bool work_route(struct work *work, const char *route);
/* Calls cuInit and creates a context on the device, as at the start of a program. */
bool work_start(struct work *work, int device);
/*
 * Loads NVML. The library reads the size of a context from NVML, and the simulated driver is slower in a process that
 * has NVML. So a process without the library must load NVML too before the two are compared.
 */
bool work_nvml(void);
/* Allocates `blocks` blocks that stay allocated and fill the library's table of blocks. */
bool work_fill(struct work *work, unsigned long blocks);
/* Prepares one call. The preparation is not measured. */
bool work_before(struct work *work, const char *call);
/* Makes one call: pair (allocate and free), free, launch, turns (launches of two kernels alternately), info or nothing.
 * Returns false if the driver refused it. */
bool work_call(struct work *work, const char *call);

#endif
