/* SPDX-License-Identifier: Apache-2.0 */
#include "capture.h"
#define WEAK __attribute__((weak))
WEAK CUresult capture_check(CUstream s) { (void)s; return 0; }
WEAK CUresult capture_event(CUstream s, CUgraphNode *n) { (void)s; (void)n; return CUDA_ERROR_NOT_SUPPORTED; }
WEAK CUresult capture_wait(CUstream s, struct capture *f, CUgraphNode n) { (void)s; (void)f; (void)n; return CUDA_ERROR_NOT_SUPPORTED; }
WEAK CUresult pool_free(CUdeviceptr p, const struct block *b) { (void)p; (void)b; return CUDA_ERROR_NOT_SUPPORTED; }
WEAK bool vmm_find(CUdeviceptr p, CUdeviceptr *b, size_t *n, int *d) { (void)p; (void)b; (void)n; (void)d; return false; }
WEAK void modules_unload(CUcontext c) { (void)c; }
