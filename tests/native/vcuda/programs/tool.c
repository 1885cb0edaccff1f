/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A tool as a profiler is one: the driver loads it (CUDA_INJECTION64_PATH), and calls it back inside loads and inside the making
 * of contexts. There it loads a module of its own and starts that kernel, by the functions that every program calls.
 */
#include "../../../../native/gpusim/cuda/private.h"

#include <stdio.h>
#include <stdlib.h>

int cuGetExportTable(const void **table, const void *id);
int cuCtxPushCurrent_v2(void *context);
int cuCtxPopCurrent_v2(void **context);
int cuModuleLoadData(void **module, const void *image);
int cuModuleGetFunction(void **function, void *module, const char *name);

static void called_back(void *data, enum gpusim_moment moment, void *handle)
{
    void *module, *function, *popped;
    (void)data;
    if (moment == GPUSIM_LIBRARY_LOADED)
        return; /* of no context */
    if (moment == GPUSIM_CONTEXT_CREATED && cuCtxPushCurrent_v2(handle))
        return;
    if (cuModuleLoadData(&module, ".gpusim kernel tool 1\n") == 0) /* refused while a capture forbids it */
        cuModuleGetFunction(&function, module, "tool");
    if (moment == GPUSIM_CONTEXT_CREATED)
        cuCtxPopCurrent_v2(&popped);
}

__attribute__((visibility("default"))) int InitializeInjection(void);
int InitializeInjection(void)
{
    const void *table;
    if (cuGetExportTable(&table, GPUSIM_PRIVATE_ID) || ((const struct gpusim_private *)table)->subscribe(called_back, NULL)) {
        fprintf(stderr, "tool: this driver takes no subscriber\n");
        abort();
    }
    return 1;
}
