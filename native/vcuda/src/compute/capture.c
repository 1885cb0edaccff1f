/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Handles stream capture. While a program captures a stream into a graph, a launch runs nothing, so the compute limiter
 * neither charges nor throttles it. The limiter records no event into such a stream, because the event would become
 * part of the program's graph. capture_of() asks the driver each time, because a function that this library does not
 * replace may have started the capture.
 */
#include "limiter.h"

bool capture_of(CUstream stream, bool per_thread)
{
    int status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUresult result = CUDA_SUCCESS;
    if (per_thread && REAL_HAS(cuStreamIsCapturing_ptsz))
        result = REAL(cuStreamIsCapturing_ptsz)(stream, &status);
    else if (REAL_HAS(cuStreamIsCapturing))
        result = REAL(cuStreamIsCapturing)(stream, &status);
    /* While another stream is being captured, the driver answers this query for the legacy stream with an error. In
     * that state a launch into the legacy stream is the program's mistake, which the driver reports. */
    return result != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE;
}

/* Defines the hook (replacement) of a function that begins a capture. After the call each thread's next launch checks
 * for a capture, because launches into this stream now run nothing. */
#define BEGIN(symbol, parameters, arguments) \
    EXPORT CUresult symbol parameters \
    { \
        ENTER(symbol, arguments); \
        (void)control; \
        CUresult status = REAL(symbol) arguments; \
        if (status == CUDA_SUCCESS) \
            limiter_forget_all(); \
        return status; \
    }

BEGIN(cuStreamBeginCapture, (CUstream stream), (stream))
BEGIN(cuStreamBeginCapture_ptsz, (CUstream stream), (stream))
BEGIN(cuStreamBeginCapture_v2, (CUstream stream, int mode), (stream, mode))
BEGIN(cuStreamBeginCapture_v2_ptsz, (CUstream stream, int mode), (stream, mode))
BEGIN(cuStreamBeginCaptureToGraph,
      (CUstream stream, CUgraph graph, const CUgraphNode *dependencies, const void *edges, size_t count, int mode),
      (stream, graph, dependencies, edges, count, mode))
BEGIN(cuStreamBeginCaptureToGraph_ptsz,
      (CUstream stream, CUgraph graph, const CUgraphNode *dependencies, const void *edges, size_t count, int mode),
      (stream, graph, dependencies, edges, count, mode))
BEGIN(cuStreamBeginCaptureToCig, (CUstream stream, void *parameters), (stream, parameters))
BEGIN(cuStreamBeginCaptureToCig_ptsz, (CUstream stream, void *parameters), (stream, parameters))
BEGIN(cuStreamBeginRecaptureToGraph, (CUstream stream, int mode, CUgraph graph, void *callback, void *data),
      (stream, mode, graph, callback, data))
BEGIN(cuStreamBeginRecaptureToGraph_ptsz, (CUstream stream, int mode, CUgraph graph, void *callback, void *data),
      (stream, mode, graph, callback, data))
