/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stream capture: a captured launch runs nothing, so it is neither charged nor throttled, and an event recorded into the
 * stream would become part of the graph. While no capture is open in the process the question costs one load.
 */
#include "limiter.h"

#define RELAXED 2

static _Atomic int open_captures;

bool capture_of(CUstream stream, bool per_thread)
{
    if (atomic_load_explicit(&open_captures, memory_order_acquire) <= 0)
        return false;
    int status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUresult result = CUDA_SUCCESS;
    if (per_thread && REAL_HAS(cuStreamIsCapturing_ptsz))
        result = REAL(cuStreamIsCapturing_ptsz)(stream, &status);
    else if (REAL_HAS(cuStreamIsCapturing))
        result = REAL(cuStreamIsCapturing)(stream, &status);
    /* An error: the legacy stream during a capture, where the launch itself is the program's mistake. */
    return result != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE;
}

int capture_relax(void)
{
    int mode = RELAXED;
    if (atomic_load_explicit(&open_captures, memory_order_relaxed) <= 0 || !REAL_HAS(cuThreadExchangeStreamCaptureMode) ||
        REAL(cuThreadExchangeStreamCaptureMode)(&mode) != CUDA_SUCCESS)
        return -1;
    return mode;
}

void capture_restore(int mode)
{
    if (mode >= 0)
        REAL(cuThreadExchangeStreamCaptureMode)(&mode);
}

/* Counted before the driver is asked: another thread's launch into the stream must not slip through in between. */
static void begin(void)
{
    atomic_fetch_add_explicit(&open_captures, 1, memory_order_acq_rel);
    limiter_forget_all();
}

static void end(void)
{
    int count = atomic_load_explicit(&open_captures, memory_order_relaxed);
    while (count > 0 && !atomic_compare_exchange_weak_explicit(&open_captures, &count, count - 1, memory_order_acq_rel,
                                                               memory_order_relaxed))
        ;
}

#define BEGIN(symbol, parameters, arguments) \
    EXPORT CUresult symbol parameters \
    { \
        ENTER(symbol, arguments); \
        (void)control; \
        begin(); \
        CUresult status = REAL(symbol) arguments; \
        if (status != CUDA_SUCCESS) \
            end(); \
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

/* A capture that failed is over too: only one that this thread may not end goes on. */
#define WRONG_THREAD 908
#define UNMATCHED 903
#define ILLEGAL_STATE 401

#define END(symbol, parameters, arguments) \
    EXPORT CUresult symbol parameters \
    { \
        ENTER(symbol, arguments); \
        (void)control; \
        CUresult status = REAL(symbol) arguments; \
        if (status != WRONG_THREAD && status != UNMATCHED && status != ILLEGAL_STATE) \
            end(); \
        return status; \
    }

END(cuStreamEndCapture, (CUstream stream, CUgraph *graph), (stream, graph))
END(cuStreamEndCapture_ptsz, (CUstream stream, CUgraph *graph), (stream, graph))
END(cuStreamEndCaptureToCig, (CUstream stream), (stream))
END(cuStreamEndCaptureToCig_ptsz, (CUstream stream), (stream))

void capture_reset(void)
{
    atomic_store_explicit(&open_captures, 0, memory_order_relaxed);
}
