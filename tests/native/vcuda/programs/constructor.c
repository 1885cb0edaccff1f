/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One thread opens a library whose constructor uses the GPU, while another thread makes a driver call. Usage:
 * constructor PLUGIN WHAT. PLUGIN is the opened library, WHAT one of:
 *
 *   context   both threads make the process's first hooked call at the same time
 *   late      both threads create the first context; the process has made a hooked call before
 *   nvml      both threads make the first call of NVML
 *   launch    both threads make the first launch, in an existing context
 *
 * While the constructor runs, its thread holds the dynamic loader's lock. The constructor waits until shortly after the
 * other thread has begun its call. If the other thread waits for the loader's lock while it holds a lock that the
 * constructor needs, both threads hang. -DPLUGIN compiles the opened library.
 */
#include "driver/cuda_abi.h"

#include <stdio.h>
#include <unistd.h>

void in_constructor(void);

#ifdef PLUGIN
static __attribute__((constructor)) void construct(void)
{
    in_constructor();
}
#else

#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <string.h>

#define SHAPE unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned
CUresult cuInit(unsigned flags);
CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device);
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
CUresult cuCtxSetCurrent(CUcontext context);
CUresult cuModuleLoadData(CUmodule *module, const void *image);
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name);
CUresult cuLaunchKernel(CUfunction function, SHAPE, CUstream stream, void **parameters, void **extra);
CUresult cuCtxSynchronize(void);
nvmlReturn_t nvmlInit_v2(void);
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device);
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory);

static const char *plugin, *what;
static sem_t constructing, calling;
static CUcontext context;
static CUfunction function;
static nvmlDevice_t card;

static void must(const char *name, int status)
{
    if (status == 0)
        return;
    fprintf(stderr, "constructor: %s: %d\n", name, status);
    _exit(3);
}

static void work(void)
{
    nvmlMemory_t memory;
    if (strcmp(what, "nvml") == 0) {
        must("nvmlDeviceGetMemoryInfo", nvmlDeviceGetMemoryInfo(card, &memory));
    } else if (strcmp(what, "launch") == 0) {
        must("cuCtxSetCurrent", cuCtxSetCurrent(context));
        must("cuLaunchKernel", cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL));
        must("cuCtxSynchronize", cuCtxSynchronize());
    } else {
        CUcontext own;
        must("cuDevicePrimaryCtxRetain", cuDevicePrimaryCtxRetain(&own, 0));
    }
}

void in_constructor(void)
{
    sem_post(&constructing);
    sem_wait(&calling);
    usleep(300000);
    work();
}

static void *open_plugin(void *unused)
{
    void *library = dlopen(plugin, RTLD_NOW);
    (void)unused;
    must(library ? "dlopen" : dlerror(), !library);
    return NULL;
}

static void *call(void *unused)
{
    (void)unused;
    sem_wait(&constructing);
    sem_post(&calling);
    work();
    return NULL;
}

static void prepare(void)
{
    CUmodule module;
    size_t bytes;
    must("cuInit", cuInit(0));
    if (strcmp(what, "nvml") == 0) {
        must("nvmlInit_v2", nvmlInit_v2());
        must("nvmlDeviceGetHandleByIndex_v2", nvmlDeviceGetHandleByIndex_v2(0, &card));
    } else if (strcmp(what, "late") == 0) {
        must("cuDeviceTotalMem_v2", cuDeviceTotalMem_v2(&bytes, 0));
    } else if (strcmp(what, "launch") == 0) {
        must("cuDevicePrimaryCtxRetain", cuDevicePrimaryCtxRetain(&context, 0));
        must("cuCtxSetCurrent", cuCtxSetCurrent(context));
        /* For the simulated driver: the kernel `k` takes 50 us. */
        must("cuModuleLoadData", cuModuleLoadData(&module, ".gpusim kernel k 50\n"));
        must("cuModuleGetFunction", cuModuleGetFunction(&function, module, "k"));
    }
}

int main(int argc, char **argv)
{
    pthread_t threads[2];
    if (argc != 3)
        return 2;
    plugin = argv[1], what = argv[2];
    sem_init(&constructing, 0, 0);
    sem_init(&calling, 0, 0);
    prepare();
    pthread_create(&threads[0], NULL, open_plugin, NULL);
    pthread_create(&threads[1], NULL, call, NULL);
    pthread_join(threads[0], NULL);
    pthread_join(threads[1], NULL);
    puts("ok");
    return 0;
}
#endif
