/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A tool like a profiler: the driver loads the tool (CUDA_INJECTION64_PATH) and calls it back while it loads code and creates
 * contexts. The callback loads the tool's own module through the public driver functions. The tool finds these functions by
 * name, also in a driver that the program opened with RTLD_LOCAL.
 */
#include "../../../../native/gpusim/cuda/private.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#define NOT_INITIALIZED 3

static int (*get_export_table)(const void **table, const void *id);
static int (*push)(void *context);
static int (*pop)(void **context);
static int (*load)(void **module, const void *image);
static int (*get_function)(void **function, void *module, const char *name);

static void called_back(void *data, enum gpusim_moment moment, void *handle)
{
    void *module, *function, *popped;
    (void)data;
    if (moment == GPUSIM_LIBRARY_LOADED)
        return; /* does nothing, because a library belongs to no context */
    if (moment == GPUSIM_CONTEXT_CREATED && push(handle))
        return;
    if (load(&module, ".gpusim kernel tool 1\n") == 0) /* the load fails while a capture forbids loads */
        get_function(&function, module, "tool");
    if (moment == GPUSIM_CONTEXT_CREATED)
        pop(&popped);
}

static void *find(const char *name)
{
    void *found = dlsym(RTLD_DEFAULT, name), *driver = found ? NULL : dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    return driver ? dlsym(driver, name) : found;
}

__attribute__((visibility("default"))) int InitializeInjection(void);
int InitializeInjection(void)
{
    const void *table;
    *(void **)&get_export_table = find("cuGetExportTable");
    *(void **)&push = find("cuCtxPushCurrent_v2");
    *(void **)&pop = find("cuCtxPopCurrent_v2");
    *(void **)&load = find("cuModuleLoadData");
    *(void **)&get_function = find("cuModuleGetFunction");
    if (!get_export_table || get_export_table(&table, GPUSIM_PRIVATE_ID))
        return 0;
    int status = ((const struct gpusim_private *)table)->subscribe(called_back, NULL);
    if (status == NOT_INITIALIZED)
        return 0; /* the program uses another driver, which has another name, so there is no driver to subscribe to */
    if (status) {
        fprintf(stderr, "tool: this driver takes no subscriber\n");
        abort();
    }
    return 1;
}
