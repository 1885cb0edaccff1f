/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Implements functions of CUDA 13.5's driver that 12.4's lacks: new kinds of capture, and newer versions of known
 * functions. A capture "to CIG" (CUDA in Graphics) adds CUDA work to a graphics program's commands. Graphics is not
 * simulated, so the captured work is dropped.
 */
#include "capture.h"
#include "graph.h"

struct cig_parameters {
    void *parameters;
};

static CUresult cig_begin(CUstream stream, const struct cig_parameters *parameters)
{
    REQUIRE(parameters && parameters->parameters, CUDA_ERROR_INVALID_VALUE);
    return capture_begin(stream, MODE_RELAXED, NULL);
}

static CUresult cig_end(CUstream stream)
{
    CUgraph graph = NULL;
    CUresult result = capture_end(stream, &graph);
    if (graph)
        graph_free(graph);
    return result;
}

/* A real driver asks this callback about each changed parameter. The simulation never calls it and accepts all
 * changes. */
typedef CUresult (*recapture_callback)(void *, CUgraphNode, const void *, const void *, int);

static CUresult recapture_begin(CUstream stream, int mode, CUgraph graph)
{
    REQUIRE(graph && graph->magic == GRAPH_MAGIC, CUDA_ERROR_INVALID_VALUE);
    return capture_begin(stream, mode, graph);
}

EXPORT CUresult cuStreamBeginCaptureToCig(CUstream stream, struct cig_parameters *parameters)
{
    return cig_begin(LEGACY_STREAM(stream), parameters);
}

EXPORT CUresult cuStreamBeginCaptureToCig_ptsz(CUstream stream, struct cig_parameters *parameters)
{
    return cig_begin(PER_THREAD_STREAM(stream), parameters);
}

EXPORT CUresult cuStreamEndCaptureToCig(CUstream stream)
{
    return cig_end(LEGACY_STREAM(stream));
}

EXPORT CUresult cuStreamEndCaptureToCig_ptsz(CUstream stream)
{
    return cig_end(PER_THREAD_STREAM(stream));
}

EXPORT CUresult cuStreamBeginRecaptureToGraph(CUstream stream, int mode, CUgraph graph, recapture_callback differs, void *data)
{
    (void)differs, (void)data;
    return recapture_begin(LEGACY_STREAM(stream), mode, graph);
}

EXPORT CUresult cuStreamBeginRecaptureToGraph_ptsz(CUstream stream, int mode, CUgraph graph, recapture_callback differs, void *data)
{
    (void)differs, (void)data;
    return recapture_begin(PER_THREAD_STREAM(stream), mode, graph);
}

/* ---- newer forms ---------------------------------------------------------------------------------------------------------- */

struct node_params;
typedef const CUgraphNode *nodes;
CUresult cuGraphAddNode(CUgraphNode *node, CUgraph graph, nodes on, size_t count, struct node_params *parameters);
CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *data);
CUresult cuLaunchHostFunc_ptsz(CUstream stream, CUhostFn function, void *data);
CUresult cuMulticastBindMem(CUmemGenericAllocationHandle handle, size_t place, CUmemGenericAllocationHandle memory,
                            size_t offset, size_t bytes, unsigned long long flags);
CUresult cuMulticastBindAddr(CUmemGenericAllocationHandle handle, size_t place, CUdeviceptr pointer, size_t bytes,
                             unsigned long long flags);

/* Edge data lets a node wait for a part of a kernel. The simulation has no such wait, so it refuses edge data. */
EXPORT CUresult cuGraphAddNode_v3(CUgraphNode *node, CUgraph graph, nodes on, const void *edges, size_t count, struct node_params *p)
{
    REQUIRE(!edges, CUDA_ERROR_NOT_SUPPORTED);
    return cuGraphAddNode(node, graph, on, count, p);
}

EXPORT CUresult cuLaunchHostFunc_v2(CUstream stream, CUhostFn function, void *data, unsigned mode)
{
    return mode <= 1 ? cuLaunchHostFunc(stream, function, data) : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuLaunchHostFunc_v2_ptsz(CUstream stream, CUhostFn function, void *data, unsigned mode)
{
    return mode <= 1 ? cuLaunchHostFunc_ptsz(stream, function, data) : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMulticastBindMem_v2(CUmemGenericAllocationHandle handle, CUdevice device, size_t place,
                                      CUmemGenericAllocationHandle memory, size_t offset, size_t bytes, unsigned long long flags)
{
    REQUIRE(device_valid(device), CUDA_ERROR_INVALID_DEVICE);
    return cuMulticastBindMem(handle, place, memory, offset, bytes, flags);
}

EXPORT CUresult cuMulticastBindAddr_v2(CUmemGenericAllocationHandle handle, CUdevice device, size_t place, CUdeviceptr pointer,
                                       size_t bytes, unsigned long long flags)
{
    REQUIRE(device_valid(device), CUDA_ERROR_INVALID_DEVICE);
    return cuMulticastBindAddr(handle, place, pointer, bytes, flags);
}
