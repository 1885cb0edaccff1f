/* SPDX-License-Identifier: Apache-2.0 */
/* Defines the hooks (replacements) of calls that wait for the GPU. After such a call pools may have released memory and
 * launches have finished, so charges can be corrected. */
#include "memory.h"

#include "events.h"
#include "process.h"

#define WAIT(symbol, parameters, arguments) \
    EXPORT CUresult symbol parameters \
    { \
        ENTER(symbol, arguments); \
        (void)control; \
        CUresult status = REAL(symbol) arguments; \
        EVENT(waited, status == CUDA_SUCCESS); \
        return status; \
    }

WAIT(cuCtxSynchronize, (void), ())
WAIT(cuCtxSynchronize_v2, (CUcontext context), (context))
WAIT(cuStreamSynchronize, (CUstream stream), (stream))
WAIT(cuStreamSynchronize_ptsz, (CUstream stream), (stream))
WAIT(cuEventSynchronize, (CUevent event), (event))
