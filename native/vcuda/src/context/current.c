/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Defines the hooks (replacements) of the functions that set a thread's current context or create a stream. NVIDIA's
 * runtime can create contexts through a private table of functions, so that no hook sees the creation. Such a context
 * is charged when a hook first finds it: when a thread sets it as current or creates a stream in it (in this file), or
 * at the first launch, allocation or load of code in it.
 */
#include "context.h"

#include "events.h"
#include "process.h"

static void meet(enum control control)
{
    CUcontext context;
    CUresult unused;
    if (control == CONTROL_ON)
        device_current(&context, &unused);
}

#define CURRENT(symbol, parameters, arguments, met) \
    EXPORT CUresult symbol parameters \
    { \
        ENTER(symbol, arguments); \
        struct block unused; \
        EVENT(context_changed); \
        CUresult status = REAL(symbol) arguments; \
        if (status == CUDA_SUCCESS && met) \
            meet(control); \
        return status; \
    }
#define UNKNOWN (context && !block_get(&vgpu_contexts, (uintptr_t)context, &unused))

CURRENT(cuCtxSetCurrent, (CUcontext context), (context), UNKNOWN)
CURRENT(cuCtxPushCurrent, (CUcontext context), (context), UNKNOWN)
CURRENT(cuCtxPushCurrent_v2, (CUcontext context), (context), UNKNOWN)
CURRENT(cuCtxPopCurrent, (CUcontext * context), (context), ((void)unused, false))
CURRENT(cuCtxPopCurrent_v2, (CUcontext * context), (context), ((void)unused, false))

#define STREAM(symbol, parameters, arguments) \
    EXPORT CUresult symbol parameters \
    { \
        ENTER(symbol, arguments); \
        meet(control); \
        return REAL(symbol) arguments; \
    }

STREAM(cuStreamCreate, (CUstream * stream, unsigned int flags), (stream, flags))
STREAM(cuStreamCreateWithPriority, (CUstream * stream, unsigned int flags, int priority), (stream, flags, priority))
