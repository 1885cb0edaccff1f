/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Shared code of gpu-check's programs: opens the driver at run time, as a program without libcudart does, and loads the
 * kernels' module. On failure it prints a JSON line with "error" and exits with status 3, which check.py reports.
 */
#ifndef GPU_H
#define GPU_H

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "driver_api.h"
#include "kernels.h"

#define FUNCTIONS(FN) \
    FN(cuInit, (unsigned flags)) \
    FN(cuDriverGetVersion, (int *version)) \
    FN(cuDeviceGetAttribute, (int *value, int attribute, CUdevice device)) \
    FN(cuDeviceTotalMem_v2, (size_t *bytes, CUdevice device)) \
    FN(cuCtxCreate_v2, (CUcontext *context, unsigned flags, CUdevice device)) \
    FN(cuCtxDestroy_v2, (CUcontext context)) \
    FN(cuCtxSetCurrent, (CUcontext context)) \
    FN(cuCtxSynchronize, (void)) \
    FN(cuCtxSetLimit, (int limit, size_t value)) \
    FN(cuDevicePrimaryCtxRetain, (CUcontext *context, CUdevice device)) \
    FN(cuDevicePrimaryCtxRelease_v2, (CUdevice device)) \
    FN(cuMemGetInfo_v2, (size_t *free_bytes, size_t *total_bytes)) \
    FN(cuMemAlloc_v2, (CUdeviceptr *pointer, size_t bytes)) \
    FN(cuMemFree_v2, (CUdeviceptr pointer)) \
    FN(cuMemAllocPitch_v2, (CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height, unsigned element)) \
    FN(cuMemAllocManaged, (CUdeviceptr *pointer, size_t bytes, unsigned flags)) \
    FN(cuMemAllocAsync, (CUdeviceptr *pointer, size_t bytes, CUstream stream)) \
    FN(cuMemFreeAsync, (CUdeviceptr pointer, CUstream stream)) \
    FN(cuMemPoolCreate, (CUmemoryPool *pool, const CUmemPoolProps *properties)) \
    FN(cuMemPoolDestroy, (CUmemoryPool pool)) \
    FN(cuMemAllocFromPoolAsync, (CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream)) \
    FN(cuMemGetAllocationGranularity, (size_t *unit, const CUmemAllocationProp *properties, int option)) \
    FN(cuMemCreate, (CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties, \
                     unsigned long long flags)) \
    FN(cuMemRelease, (CUmemGenericAllocationHandle handle)) \
    FN(cuMemAddressReserve, (CUdeviceptr *pointer, size_t bytes, size_t alignment, CUdeviceptr address, \
                             unsigned long long flags)) \
    FN(cuMemAddressFree, (CUdeviceptr pointer, size_t bytes)) \
    FN(cuMemMap, (CUdeviceptr pointer, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, \
                  unsigned long long flags)) \
    FN(cuMemUnmap, (CUdeviceptr pointer, size_t bytes)) \
    FN(cuMemSetAccess, (CUdeviceptr pointer, size_t bytes, const CUmemAccessDesc *access, size_t count)) \
    FN(cuIpcGetMemHandle, (CUipcMemHandle *handle, CUdeviceptr pointer)) \
    FN(cuIpcOpenMemHandle_v2, (CUdeviceptr *pointer, CUipcMemHandle handle, unsigned flags)) \
    FN(cuArrayCreate_v2, (CUarray *array, const CUDA_ARRAY_DESCRIPTOR *description)) \
    FN(cuArrayDestroy, (CUarray array)) \
    FN(cuArray3DCreate_v2, (CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *description)) \
    FN(cuMipmappedArrayCreate, (CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *description, unsigned levels)) \
    FN(cuMipmappedArrayDestroy, (CUmipmappedArray array)) \
    FN(cuMemsetD8_v2, (CUdeviceptr pointer, unsigned char value, size_t count)) \
    FN(cuMemcpyDtoH_v2, (void *to, CUdeviceptr from, size_t bytes)) \
    FN(cuModuleLoadData, (CUmodule *module, const void *image)) \
    FN(cuModuleUnload, (CUmodule module)) \
    FN(cuModuleGetFunction, (CUfunction *function, CUmodule module, const char *name)) \
    FN(cuLaunchKernel, (CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, \
                        unsigned shared, CUstream stream, void **parameters, void **extra)) \
    FN(cuStreamCreate, (CUstream *stream, unsigned flags)) \
    FN(cuStreamSynchronize, (CUstream stream)) \
    FN(cuStreamBeginCapture_v2, (CUstream stream, int mode)) \
    FN(cuStreamEndCapture, (CUstream stream, CUgraph *graph)) \
    FN(cuGraphInstantiateWithFlags, (CUgraphExec *exec, CUgraph graph, unsigned long long flags)) \
    FN(cuGraphLaunch, (CUgraphExec exec, CUstream stream)) \
    FN(cuEventCreate, (CUevent *event, unsigned flags)) \
    FN(cuEventRecord, (CUevent event, CUstream stream)) \
    FN(cuEventQuery, (CUevent event)) \
    FN(cuEventSynchronize, (CUevent event)) \
    FN(cuEventElapsedTime, (float *milliseconds, CUevent from, CUevent to))

static struct {
#define FN(symbol, parameters) CUresult(*symbol) parameters;
    FUNCTIONS(FN)
#undef FN
} cu;

/* Calls a driver function. The result is CUDA_ERROR_NOT_FOUND if this driver does not have the function. */
#define CALL(function, ...) (cu.function ? cu.function(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND)

static inline void gpu_fail(const char *what, long status)
{
    printf("{\"error\": \"%s: %ld\"}\n", what, status);
    fflush(stdout);
    exit(3);
}

#define MUST(call) \
    do { \
        CUresult must_status = (call); \
        if (must_status != CUDA_SUCCESS) \
            gpu_fail(#call, must_status); \
    } while (0)

static inline uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

static inline void *gpu_library(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library)
        gpu_fail("libcuda.so.1 cannot be opened", 0);
    return library;
}

static inline void gpu_open(void)
{
    void *library = gpu_library();
#define FN(symbol, parameters) *(void **)&cu.symbol = dlsym(library, #symbol);
    FUNCTIONS(FN)
#undef FN
}

/*
 * Loads a module of the kernels. `simulated_us` is the duration of vgpu_spin on the simulated driver; a real driver
 * reads it as a comment. *header receives the number of the accepted PTX header. `simulated_spread`: on the simulated
 * driver the longest launch of vgpu_spin takes this many times `simulated_us`.
 */
static double simulated_spread = 1;

static inline CUresult gpu_module(CUmodule *module, double simulated_us, int *header)
{
    static char text[sizeof ptx_body + 512];
    CUresult status = CUDA_ERROR_NOT_FOUND;
    for (int i = 0; i < (int)(sizeof ptx_headers / sizeof *ptx_headers) && status != CUDA_SUCCESS; i++) {
        snprintf(text, sizeof text, "%s// .gpusim kernel vgpu_spin %.3f..%.3f\n// .gpusim kernel vgpu_empty 1\n%s", ptx_headers[i],
                 simulated_us, simulated_us * simulated_spread, ptx_body);
        status = CALL(cuModuleLoadData, module, text);
        if (header)
            *header = i;
        /* An out-of-memory error comes from the limit, so another header would not help. */
        if (status == CUDA_ERROR_OUT_OF_MEMORY)
            break;
    }
    return status;
}

#endif
