/* SPDX-License-Identifier: Apache-2.0 */
/* The driver functions that a test can call through the puppet program. A route is a way in which real programs look
 * functions up. Each function can be looked up by each route. */
#ifndef ROUTES_H
#define ROUTES_H

#include "driver/cuda_abi.h"

/* Each line: symbol; name, version and per-thread stream (0 or 1) for cuGetProcAddress; parameters. */
#define FUNCTIONS(FN) \
    FN(cuInit, "cuInit", 2000, 0, (unsigned flags)) \
    FN(cuDeviceGetCount, "cuDeviceGetCount", 2000, 0, (int *count)) \
    FN(cuCtxCreate_v2, "cuCtxCreate", 3020, 0, (CUcontext *context, unsigned flags, CUdevice device)) \
    FN(cuCtxDestroy_v2, "cuCtxDestroy", 4000, 0, (CUcontext context)) \
    FN(cuCtxSetCurrent, "cuCtxSetCurrent", 4000, 0, (CUcontext context)) \
    FN(cuCtxSynchronize, "cuCtxSynchronize", 2000, 0, (void)) \
    FN(cuStreamSynchronize, "cuStreamSynchronize", 2000, 0, (CUstream stream)) \
    FN(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", 7000, 0, (CUcontext *context, CUdevice device)) \
    FN(cuDevicePrimaryCtxRelease_v2, "cuDevicePrimaryCtxRelease", 11000, 0, (CUdevice device)) \
    FN(cuDevicePrimaryCtxReset_v2, "cuDevicePrimaryCtxReset", 11000, 0, (CUdevice device)) \
    FN(cuMemAlloc_v2, "cuMemAlloc", 3020, 0, (CUdeviceptr *pointer, size_t bytes)) \
    FN(cuMemAlloc, "cuMemAlloc", 2000, 0, (CUdeviceptr_v1 *pointer, unsigned bytes)) \
    FN(cuMemFree, "cuMemFree", 2000, 0, (CUdeviceptr_v1 pointer)) \
    FN(cuMemAllocPitch_v2, "cuMemAllocPitch", 3020, 0, \
       (CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height, unsigned element)) \
    FN(cuMemAllocManaged, "cuMemAllocManaged", 6000, 0, (CUdeviceptr *pointer, size_t bytes, unsigned flags)) \
    FN(cuMemFree_v2, "cuMemFree", 3020, 0, (CUdeviceptr pointer)) \
    FN(cuMemAllocAsync, "cuMemAllocAsync", 11020, 0, (CUdeviceptr *pointer, size_t bytes, CUstream stream)) \
    FN(cuMemAllocAsync_ptsz, "cuMemAllocAsync", 11020, 1, (CUdeviceptr *pointer, size_t bytes, CUstream stream)) \
    FN(cuMemFreeAsync, "cuMemFreeAsync", 11020, 0, (CUdeviceptr pointer, CUstream stream)) \
    FN(cuStreamCreate, "cuStreamCreate", 2000, 0, (CUstream *stream, unsigned flags)) \
    FN(cuStreamBeginCapture_v2, "cuStreamBeginCapture", 10010, 0, (CUstream stream, int mode)) \
    FN(cuStreamEndCapture, "cuStreamEndCapture", 10000, 0, (CUstream stream, CUgraph *graph)) \
    FN(cuMemPoolCreate, "cuMemPoolCreate", 11020, 0, (CUmemoryPool *pool, const CUmemPoolProps *properties)) \
    FN(cuMemPoolDestroy, "cuMemPoolDestroy", 11020, 0, (CUmemoryPool pool)) \
    FN(cuMemAllocFromPoolAsync, "cuMemAllocFromPoolAsync", 11020, 0, \
       (CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream)) \
    FN(cuMemAddressReserve, "cuMemAddressReserve", 10020, 0, \
       (CUdeviceptr *pointer, size_t bytes, size_t alignment, CUdeviceptr address, unsigned long long flags)) \
    FN(cuMemCreate, "cuMemCreate", 10020, 0, \
       (CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties, unsigned long long flags)) \
    FN(cuMemRelease, "cuMemRelease", 10020, 0, (CUmemGenericAllocationHandle handle)) \
    FN(cuMemExportToShareableHandle, "cuMemExportToShareableHandle", 10020, 0, \
       (void *shareable, CUmemGenericAllocationHandle handle, int type, unsigned long long flags)) \
    FN(cuMemImportFromShareableHandle, "cuMemImportFromShareableHandle", 10020, 0, \
       (CUmemGenericAllocationHandle *handle, void *shareable, int type)) \
    FN(cuMemMap, "cuMemMap", 10020, 0, \
       (CUdeviceptr pointer, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags)) \
    FN(cuMemUnmap, "cuMemUnmap", 10020, 0, (CUdeviceptr pointer, size_t bytes)) \
    FN(cuMemRetainAllocationHandle, "cuMemRetainAllocationHandle", 11000, 0, \
       (CUmemGenericAllocationHandle *handle, void *address)) \
    FN(cuArrayCreate_v2, "cuArrayCreate", 3020, 0, (CUarray *array, const CUDA_ARRAY_DESCRIPTOR *description)) \
    FN(cuArray3DCreate_v2, "cuArray3DCreate", 3020, 0, (CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *description)) \
    FN(cuArrayDestroy, "cuArrayDestroy", 2000, 0, (CUarray array)) \
    FN(cuMipmappedArrayCreate, "cuMipmappedArrayCreate", 5000, 0, \
       (CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *description, unsigned levels)) \
    FN(cuMipmappedArrayDestroy, "cuMipmappedArrayDestroy", 5000, 0, (CUmipmappedArray array)) \
    FN(cuModuleLoadData, "cuModuleLoadData", 2000, 0, (CUmodule *module, const void *image)) \
    FN(cuModuleUnload, "cuModuleUnload", 2000, 0, (CUmodule module)) \
    FN(cuGraphCreate, "cuGraphCreate", 10000, 0, (CUgraph *graph, unsigned flags)) \
    FN(cuGraphDestroy, "cuGraphDestroy", 10000, 0, (CUgraph graph)) \
    FN(cuGraphAddMemAllocNode, "cuGraphAddMemAllocNode", 11040, 0, \
       (CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count, CUDA_MEM_ALLOC_NODE_PARAMS *parameters)) \
    FN(cuGraphAddNode, "cuGraphAddNode", 12020, 0, \
       (CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count, void *parameters)) \
    FN(cuGraphAddMemFreeNode, "cuGraphAddMemFreeNode", 11040, 0, \
       (CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count, CUdeviceptr pointer)) \
    FN(cuGraphAddChildGraphNode, "cuGraphAddChildGraphNode", 10000, 0, \
       (CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count, CUgraph child)) \
    FN(cuGraphInstantiate, "cuGraphInstantiate", 10000, 0, \
       (CUgraphExec *exec, CUgraph graph, CUgraphNode *bad, char *log, size_t size)) \
    FN(cuGraphInstantiate_v2, "cuGraphInstantiate", 11000, 0, \
       (CUgraphExec *exec, CUgraph graph, CUgraphNode *bad, char *log, size_t size)) \
    FN(cuGraphInstantiateWithFlags, "cuGraphInstantiateWithFlags", 11040, 0, \
       (CUgraphExec *exec, CUgraph graph, unsigned long long flags)) \
    FN(cuGraphInstantiateWithParams, "cuGraphInstantiateWithParams", 12000, 0, \
       (CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *parameters)) \
    FN(cuGraphInstantiateWithParams_ptsz, "cuGraphInstantiateWithParams", 12000, 1, \
       (CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *parameters)) \
    FN(cuGraphUpload, "cuGraphUpload", 11010, 0, (CUgraphExec exec, CUstream stream)) \
    FN(cuGraphUpload_ptsz, "cuGraphUpload", 11010, 1, (CUgraphExec exec, CUstream stream)) \
    FN(cuGraphLaunch, "cuGraphLaunch", 10000, 0, (CUgraphExec exec, CUstream stream)) \
    FN(cuGraphLaunch_ptsz, "cuGraphLaunch", 10000, 1, (CUgraphExec exec, CUstream stream)) \
    FN(cuGraphExecDestroy, "cuGraphExecDestroy", 10000, 0, (CUgraphExec exec)) \
    FN(cuDeviceGraphMemTrim, "cuDeviceGraphMemTrim", 11040, 0, (CUdevice device)) \
    FN(cuMemMapArrayAsync, "cuMemMapArrayAsync", 11010, 0, (CUarrayMapInfo *tiles, unsigned count, CUstream stream)) \
    FN(cuMemMapArrayAsync_ptsz, "cuMemMapArrayAsync", 11010, 1, (CUarrayMapInfo *tiles, unsigned count, CUstream stream)) \
    FN(cuMulticastCreate, "cuMulticastCreate", 12010, 0, (CUmemGenericAllocationHandle *object, const void *properties)) \
    FN(cuMulticastAddDevice, "cuMulticastAddDevice", 12010, 0, (CUmemGenericAllocationHandle object, CUdevice device)) \
    FN(cuMulticastBindMem, "cuMulticastBindMem", 12010, 0, \
       (CUmemGenericAllocationHandle object, size_t place, CUmemGenericAllocationHandle memory, size_t offset, size_t bytes, \
        unsigned long long flags)) \
    FN(cuMulticastBindAddr, "cuMulticastBindAddr", 12010, 0, \
       (CUmemGenericAllocationHandle object, size_t place, CUdeviceptr pointer, size_t bytes, unsigned long long flags)) \
    FN(cuMulticastUnbind, "cuMulticastUnbind", 12010, 0, \
       (CUmemGenericAllocationHandle object, CUdevice device, size_t place, size_t bytes)) \
    FN(cuModuleGetFunction, "cuModuleGetFunction", 2000, 0, (CUfunction *function, CUmodule module, const char *name)) \
    FN(cuModuleGetGlobal_v2, "cuModuleGetGlobal", 3020, 0, \
       (CUdeviceptr *pointer, size_t *bytes, CUmodule module, const char *name)) \
    FN(cuLibraryLoadData, "cuLibraryLoadData", 12000, 0, \
       (CUlibrary *library, const void *code, int *jit, void **jit_values, unsigned jit_count, int *options, void **values, unsigned count)) \
    FN(cuLibraryLoadFromFile, "cuLibraryLoadFromFile", 12000, 0, \
       (CUlibrary *library, const char *file, int *jit, void **jit_values, unsigned jit_count, int *options, void **values, unsigned count)) \
    FN(cuLibraryUnload, "cuLibraryUnload", 12000, 0, (CUlibrary library)) \
    FN(cuLibraryGetModule, "cuLibraryGetModule", 12000, 0, (CUmodule *module, CUlibrary library)) \
    FN(cuLibraryGetKernel, "cuLibraryGetKernel", 12000, 0, (CUkernel *kernel, CUlibrary library, const char *name)) \
    FN(cuLibraryGetGlobal, "cuLibraryGetGlobal", 12000, 0, \
       (CUdeviceptr *pointer, size_t *bytes, CUlibrary library, const char *name)) \
    FN(cuKernelGetFunction, "cuKernelGetFunction", 12000, 0, (CUfunction *function, CUkernel kernel)) \
    FN(cuLaunchKernel, "cuLaunchKernel", 4000, 0, \
       (CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, \
        CUstream stream, void **parameters, void **extra)) \
    FN(cuCtxSetLimit, "cuCtxSetLimit", 3010, 0, (int limit, size_t value)) \
    FN(cuCtxGetLimit, "cuCtxGetLimit", 3010, 0, (size_t *value, int limit)) \
    FN(cuMemGetInfo_v2, "cuMemGetInfo", 3020, 0, (size_t *free_bytes, size_t *total_bytes)) \
    FN(cuDeviceTotalMem_v2, "cuDeviceTotalMem", 3020, 0, (size_t *bytes, CUdevice device)) \
    FN(cuDeviceGetUuid, "cuDeviceGetUuid", 9020, 0, (CUuuid *uuid, CUdevice device))

#define FN(symbol, name, version, stream, parameters) CUresult symbol parameters;
FUNCTIONS(FN)
#undef FN

struct api {
#define FN(symbol, name, version, stream, parameters) CUresult(*symbol) parameters;
    FUNCTIONS(FN)
#undef FN
};

/* Looks up all functions by a route of routes.c, such as "link". A function that the route does not find becomes NULL.
 * Returns 0 if there is no such route. */
int route_fill(struct api *api, const char *route);

#endif
