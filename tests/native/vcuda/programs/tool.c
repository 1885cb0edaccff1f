/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A tool like a profiler. The driver loads the tool because the variable CUDA_INJECTION64_PATH names it, and calls it
 * back during each load of code and creation of a context. The callback loads the tool's own module through the public
 * driver functions. The tool looks these functions up by name, even if the program opened the driver with RTLD_LOCAL.
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
        return; /* A library belongs to no context, so the callback does nothing here. */
    if (moment == GPUSIM_CONTEXT_CREATED && push(handle))
        return;
    /* During a stream capture that forbids loads, this load fails. */
    /* The text is for the simulated driver: the kernel `tool` takes 1 us. */
    if (load(&module, ".gpusim kernel tool 1\n") == 0)
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
        return 0; /* The program uses a driver with another name, so the tool cannot subscribe to its callbacks. */
    if (status) {
        fprintf(stderr, "tool: this driver accepts no subscriber\n");
        abort();
    }
    return 1;
}
