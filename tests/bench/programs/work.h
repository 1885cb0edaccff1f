/* SPDX-License-Identifier: Apache-2.0 */
/* The driver calls that are measured, each reachable by the routes that a real program takes. */
#ifndef WORK_H
#define WORK_H

#include <stdbool.h>
#include <stddef.h>

#include "driver/cuda_abi.h"

typedef struct CUfunc_st *CUfunction;

/* FN(symbol, name of cuGetProcAddress, version, parameters) */
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
    CUdeviceptr held; /* by "alloc", for the next "free" */
};

/* link, dlsym, proc. false: no such route, or the driver lacks a function. */
bool work_route(struct work *work, const char *route);
/* cuInit and a context on the device: what the start of a program costs. */
bool work_start(struct work *work, int device);
/*
 * The library asks NVML what a context costs. The simulated driver is dearer in a process that has NVML too, so where a
 * call is compared with the bare one, both processes have it.
 */
bool work_nvml(void);
/* Blocks that stay, so that a table of them is as full as asked. */
bool work_fill(struct work *work, unsigned long blocks);
/* One call of: pair (allocate and free), free, launch, turns (launches of two kernels, one after the other), info,
 * nothing. false: the driver refused. */
bool work_before(struct work *work, const char *call); /* what the call needs and is not measured */
bool work_call(struct work *work, const char *call);

#endif
