/* SPDX-License-Identifier: Apache-2.0 */
#include "op.h"
#include "capture.h"
#define WEAK __attribute__((weak))
WEAK CUresult capture_check(CUstream s) { (void)s; return 0; }
WEAK CUresult capture_event(CUstream s, CUgraphNode *n) { (void)s; (void)n; return CUDA_ERROR_NOT_SUPPORTED; }
WEAK CUresult capture_op(CUstream s, const struct op *n) { (void)s; (void)n; return CUDA_ERROR_NOT_SUPPORTED; }
WEAK CUresult capture_wait(CUstream s, struct capture *f, CUgraphNode n) { (void)s; (void)f; (void)n; return CUDA_ERROR_NOT_SUPPORTED; }
