/* SPDX-License-Identifier: Apache-2.0 */
/*
 * This file is linked with the objects of the simulated driver, and the result simulates a newer driver. This file
 * defines those functions of CUDA 13.5 that allocate memory or begin a capture, and cuMemAlloc_v9, an invented function
 * of a future CUDA. The cuGetProcAddress of this file returns these functions, and passes all other names to the
 * simulated driver's own cuGetProcAddress, which the test has renamed. With -DNVML this file defines a function of a
 * newer NVML instead.
 */
#include "driver/cuda_abi.h"

#include <string.h>

#ifdef NVML

nvmlReturn_t nvmlDeviceGetAccountingStats(nvmlDevice_t device, unsigned pid, nvmlAccountingStats_t *stats);
nvmlReturn_t nvmlDeviceGetAccountingStats_v2(nvmlDevice_t device, nvmlAccountingStats_v2_t *stats);

nvmlReturn_t nvmlDeviceGetAccountingStats_v2(nvmlDevice_t device, nvmlAccountingStats_v2_t *stats)
{
    nvmlAccountingStats_t old;
    nvmlReturn_t status = nvmlDeviceGetAccountingStats(device, stats ? stats->pid : 0, stats ? &old : NULL);
    if (status == NVML_SUCCESS)
        *stats = (nvmlAccountingStats_v2_t){.pid = stats->pid, .isRunning = old.isRunning, .gpuUtilization = old.gpuUtilization,
                                            .memoryUtilization = old.memoryUtilization, .maxMemoryUsage = old.maxMemoryUsage,
                                            .sampleCount = 4, .sumGpuUtil = old.gpuUtilization * 400ull,
                                            .sumFbUtil = old.memoryUtilization * 400ull};
    return status;
}

#else

#define API __attribute__((visibility("default")))
#define NODE CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies
#define HANDLE CUmemGenericAllocationHandle

CUresult gpusim_cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags, int *status);
CUresult cuGraphAddNode(NODE, size_t count, void *parameters);
CUresult cuMulticastCreate(HANDLE *object, const void *properties);
CUresult cuMulticastAddDevice(HANDLE object, CUdevice device);
CUresult cuMulticastBindMem(HANDLE object, size_t place, HANDLE memory, size_t offset, size_t bytes, unsigned long long flags);
CUresult cuMulticastBindAddr(HANDLE object, size_t place, CUdeviceptr address, size_t bytes, unsigned long long flags);
CUresult cuStreamBeginCapture_v2(CUstream stream, int mode);
CUresult cuStreamBeginCapture_v2_ptsz(CUstream stream, int mode);
CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph);
CUresult cuStreamEndCapture_ptsz(CUstream stream, CUgraph *graph);
CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count);
CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes);

API CUresult cuGraphAddNode_v3(NODE, const void *edges, size_t count, void *parameters)
{
    return edges ? CUDA_ERROR_NOT_SUPPORTED : cuGraphAddNode(node, graph, dependencies, count, parameters);
}

API CUresult cuMulticastBindMem_v2(HANDLE object, CUdevice device, size_t place, HANDLE memory, size_t offset, size_t bytes,
                                   unsigned long long flags)
{
    return device ? CUDA_ERROR_INVALID_VALUE : cuMulticastBindMem(object, place, memory, offset, bytes, flags);
}

API CUresult cuMulticastBindAddr_v2(HANDLE object, CUdevice device, size_t place, CUdeviceptr address, size_t bytes,
                                    unsigned long long flags)
{
    return device ? CUDA_ERROR_INVALID_VALUE : cuMulticastBindAddr(object, place, address, bytes, flags);
}

/* Memory that is bound to a logical endpoint stays in use, as with a multicast object. So this driver implements a
 * logical endpoint by a multicast object. */
static CUresult endpoint(HANDLE *object, size_t bytes)
{
    static HANDLE made;
    struct {
        unsigned devices;
        size_t size;
        unsigned long long types, flags;
    } properties = {2, bytes, 0, 0};
    CUresult status = made ? CUDA_SUCCESS : cuMulticastCreate(&made, &properties);
    for (CUdevice device = 0; device < 2 && status == CUDA_SUCCESS && !*object; device++)
        status = cuMulticastAddDevice(made, device);
    *object = made;
    return status;
}

API CUresult cuLogicalEndpointBindMem(unsigned id, CUdevice device, cuuint64_t place, HANDLE memory, cuuint64_t offset,
                                      cuuint64_t bytes, unsigned long long flags)
{
    HANDLE object = 0;
    CUresult status = id == 7 && device == 0 ? endpoint(&object, bytes) : CUDA_ERROR_INVALID_VALUE;
    return status == CUDA_SUCCESS ? cuMulticastBindMem(object, place, memory, offset, bytes, flags) : status;
}

API CUresult cuLogicalEndpointBindAddr(unsigned id, CUdevice device, cuuint64_t place, void *address, cuuint64_t bytes,
                                       unsigned long long flags)
{
    HANDLE object = 0;
    CUresult status = id == 7 && device == 0 ? endpoint(&object, bytes) : CUDA_ERROR_INVALID_VALUE;
    return status == CUDA_SUCCESS ? cuMulticastBindAddr(object, place, (CUdeviceptr)address, bytes, flags) : status;
}

/* The test program passes this pointer in place of graphics parameters. cuStreamEndCaptureToCig writes the number of
 * captured nodes there. */
static size_t *nodes_to;

#define CAPTURES(suffix, begin, end) \
    API CUresult cuStreamBeginCaptureToCig##suffix(CUstream stream, void *parameters) \
    { \
        nodes_to = parameters; \
        return parameters ? begin(stream, 2) : CUDA_ERROR_INVALID_VALUE; \
    } \
    API CUresult cuStreamEndCaptureToCig##suffix(CUstream stream) \
    { \
        CUgraph graph; \
        CUresult status = end(stream, &graph); \
        return status == CUDA_SUCCESS ? cuGraphGetNodes(graph, NULL, nodes_to) : status; \
    } \
    API CUresult cuStreamBeginRecaptureToGraph##suffix(CUstream stream, int mode, CUgraph graph, void *callback, void *data) \
    { \
        (void)graph, (void)callback, (void)data; \
        return begin(stream, mode); \
    }

CAPTURES(, cuStreamBeginCapture_v2, cuStreamEndCapture)
CAPTURES(_ptsz, cuStreamBeginCapture_v2_ptsz, cuStreamEndCapture_ptsz)

/* --- memory locations that name a part of a card --------------------------------------------------------------------- */

CUresult gpusim_cuMemCreate(HANDLE *handle, size_t bytes, const CUmemAllocationProp *properties, unsigned long long flags);
CUresult gpusim_cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *properties);

/* Replaces a location that the simulated driver does not know: a part of device 1 by device 1, and NUMA node 9, which
 * is the memory of device 0, by device 0. */
static void on_card(CUmemLocation *location)
{
    if (location->type == CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN && location->id == (1 | 3 << 8))
        *location = (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE, 1};
    else if (location->type == CU_MEM_LOCATION_TYPE_HOST_NUMA && location->id == 9)
        *location = (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE, 0};
}

API CUresult cuMemCreate(HANDLE *handle, size_t bytes, const CUmemAllocationProp *properties, unsigned long long flags)
{
    CUmemAllocationProp own = *properties;
    on_card(&own.location);
    return gpusim_cuMemCreate(handle, bytes, &own, flags);
}

API CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *properties)
{
    CUmemPoolProps own = *properties;
    on_card(&own.location);
    return gpusim_cuMemPoolCreate(pool, &own);
}

/* --- a version that the library does not know ------------------------------------------------------------------ */

/* The parameters of this function fill every parameter register and a part of the stack. If the library loses a
 * parameter on the way to the driver, the test notices it. */
API CUresult cuMemAlloc_v9(CUdeviceptr *pointer, size_t bytes, int two, int three, int four, int five, double half, double third,
                           int seven, int eight)
{
    if (two != 2 || three != 3 || four != 4 || five != 5 || half != 0.5 || third != 0.25 || seven != 7 || eight != 8)
        return CUDA_ERROR_INVALID_VALUE;
    return cuMemAlloc_v2(pointer, bytes);
}

/* --- cuGetProcAddress ------------------------------------------------------------------------------------ */

static const struct {
    const char *name;
    int since, per_thread;
    void *function;
} added[] = {
    {"cuGraphAddNode", 13040, 0, (void *)cuGraphAddNode_v3},
    {"cuMulticastBindMem", 13010, 0, (void *)cuMulticastBindMem_v2},
    {"cuMulticastBindAddr", 13010, 0, (void *)cuMulticastBindAddr_v2},
    {"cuLogicalEndpointBindMem", 13030, 0, (void *)cuLogicalEndpointBindMem},
    {"cuLogicalEndpointBindAddr", 13030, 0, (void *)cuLogicalEndpointBindAddr},
    {"cuStreamBeginCaptureToCig", 13010, 2, (void *)cuStreamBeginCaptureToCig_ptsz},
    {"cuStreamBeginCaptureToCig", 13010, 0, (void *)cuStreamBeginCaptureToCig},
    {"cuStreamEndCaptureToCig", 13010, 2, (void *)cuStreamEndCaptureToCig_ptsz},
    {"cuStreamEndCaptureToCig", 13010, 0, (void *)cuStreamEndCaptureToCig},
    {"cuStreamBeginRecaptureToGraph", 13030, 2, (void *)cuStreamBeginRecaptureToGraph_ptsz},
    {"cuStreamBeginRecaptureToGraph", 13030, 0, (void *)cuStreamBeginRecaptureToGraph},
    {"cuMemAlloc", 19000, 0, (void *)cuMemAlloc_v9},
};

API CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags, int *status)
{
    for (unsigned i = 0; i < sizeof added / sizeof *added; i++)
        if (strcmp(added[i].name, name) == 0 && version >= added[i].since &&
            (!added[i].per_thread || flags == CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM)) {
            *function = added[i].function;
            if (status)
                *status = 0;
            return CUDA_SUCCESS;
        }
    return gpusim_cuGetProcAddress_v2(name, function, version, flags, status);
}

API CUresult cuGetProcAddress(const char *name, void **function, int version, cuuint64_t flags)
{
    int status = 0;
    CUresult result = cuGetProcAddress_v2(name, function, version, flags, &status);
    return result == CUDA_SUCCESS && status ? CUDA_ERROR_NOT_FOUND : result;
}
#endif
