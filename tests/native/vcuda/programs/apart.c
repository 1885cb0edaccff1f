/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Uses two GPUs. One thread waits until the queue of GPU 0 is empty; during this wait the driver keeps the context of
 * GPU 0 locked. The queue of GPU 0 contains a host callback, which returns only after a second thread has used GPU 1.
 * So the program hangs if work on GPU 1 has to wait for GPU 0. Usage: apart LAUNCHES
 */
#include "driver/cuda_abi.h"

#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define SHAPE unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned
CUresult cuInit(unsigned flags);
CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device);
CUresult cuCtxSetCurrent(CUcontext context);
CUresult cuModuleLoadData(CUmodule *module, const void *image);
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name);
CUresult cuStreamCreate(CUstream *stream, unsigned flags);
CUresult cuStreamSynchronize(CUstream stream);
CUresult cuLaunchHostFunc(CUstream stream, void (*callback)(void *data), void *data);
CUresult cuLaunchKernel(CUfunction function, SHAPE, CUstream stream, void **parameters, void **extra);

#define MUST(call) \
    do { \
        CUresult status_ = (call); \
        if (status_ != 0) { \
            fprintf(stderr, "apart: line %d: %s: %d\n", __LINE__, #call, status_); \
            exit(3); \
        } \
    } while (0)

enum { GPUS = 2 };
static struct {
    CUcontext context;
    CUfunction function;
    CUstream stream;
} gpu[GPUS];
static sem_t begun, other_done;

static void prepare(int i)
{
    CUmodule module;
    MUST(cuCtxCreate_v2(&gpu[i].context, 0, i));
    /* For the simulated driver: the kernel `work` takes 100 us. */
    MUST(cuModuleLoadData(&module, ".gpusim kernel work 100\n"));
    MUST(cuModuleGetFunction(&gpu[i].function, module, "work"));
    MUST(cuStreamCreate(&gpu[i].stream, 1));
}

static void launch(int i, int count)
{
    while (count--)
        MUST(cuLaunchKernel(gpu[i].function, 64, 1, 1, 64, 1, 1, 0, gpu[i].stream, NULL, NULL));
}

/* The driver calls this host function on its own thread. */
static void callback(void *unused)
{
    (void)unused;
    sem_post(&begun);
    sem_wait(&other_done);
}

static void *drains(void *unused)
{
    (void)unused;
    MUST(cuCtxSetCurrent(gpu[0].context));
    launch(0, 4);
    MUST(cuLaunchHostFunc(gpu[0].stream, callback, NULL));
    /* The program does not synchronize, so the library has not yet read the fences (timing events) of these
     * launches. */
    launch(0, 4);
    MUST(cuStreamSynchronize(gpu[0].stream));
    return NULL;
}

int main(int argc, char **argv)
{
    int launches = argc > 1 ? atoi(argv[1]) : 100;
    pthread_t thread;
    MUST(cuInit(0));
    for (int i = 0; i < GPUS; i++)
        prepare(i);
    sem_init(&begun, 0, 0);
    sem_init(&other_done, 0, 0);
    pthread_create(&thread, NULL, drains, NULL);
    sem_wait(&begun);
    usleep(20000); /* Now the library's controller thread, which reads the fences of GPU 0, is blocked in the driver. */
    MUST(cuCtxSetCurrent(gpu[1].context));
    for (int round = 0; round < 4; round++) {
        launch(1, launches / 4);
        MUST(cuStreamSynchronize(gpu[1].stream));
        usleep(70000);
    }
    puts("launched");
    sem_post(&other_done);
    pthread_join(thread, NULL);
    puts("ok");
    return 0;
}
