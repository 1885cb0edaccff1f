/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Creates contexts or loads code twice at the same time. Either two threads do so, or the driver calls a tool (such as
 * a profiler) during such a call, and the tool makes a second call. Usage: meanwhile WAY. Prints the results of its
 * calls, and waits until its standard input closes. The following ways need a simulated driver with the behaviour
 * `callbacks`, which calls tools back:
 *
 *   nested    a tool creates a context inside the callback of cuCtxCreate
 *   slow      one thread's cuCtxCreate takes longer than the library lets others wait; another thread creates a
 *             context
 *   retained  like slow, but both threads retain the primary context; it is released once, and again after an input
 *             line
 *   making    like retained, but the driver reports the primary context as inactive until the first retain returns
 *   thrown    a tool leaves cuCtxCreate by longjmp; then another thread creates contexts
 *
 * This way works on any driver:
 *   loads BYTES  two threads load code of that size concurrently, forty times; prints how often both
 *                failed and how often both succeeded
 */
#include "driver/cuda_abi.h"

#include "../../../../native/gpusim/cuda/private.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

CUresult cuInit(unsigned flags);
CUresult cuGetExportTable(const void **table, const void *id);
CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device);
CUresult cuCtxDestroy_v2(CUcontext context);
CUresult cuCtxSetCurrent(CUcontext context);
CUresult cuCtxSynchronize(void);
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device);
CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes);
CUresult cuMemFree_v2(CUdeviceptr pointer);
CUresult cuModuleLoadData(CUmodule *module, const void *image);
CUresult cuModuleUnload(CUmodule module);

/* The library lets a thread wait for another thread's context for a shorter time than this. */
#define LONGER_US 1500000
#define SOON_US 200000

static CUcontext first, second;
static int nested = -1;
static pthread_t other;
static jmp_buf before;

static int use(CUcontext context)
{
    CUdeviceptr pointer;
    int status = cuCtxSetCurrent(context);
    return status ? status : (status = cuMemAlloc_v2(&pointer, 1 << 20)) ? status : cuMemFree_v2(pointer);
}

static void makes(void)
{
    nested = cuCtxCreate_v2(&second, 0, 0);
}

static void waits(void)
{
    usleep(LONGER_US);
}

static void throws(void)
{
    longjmp(before, 1);
}

static void called_back(void *data, enum gpusim_moment moment, void *handle)
{
    static _Atomic int calls;
    (void)handle;
    if (moment == GPUSIM_CONTEXT_CREATED && !calls++)
        (*(void (**)(void))data)();
}

static void subscribe(void (*tool)(void))
{
    static void (*kept)(void);
    const void *table;
    kept = tool;
    if (cuGetExportTable(&table, GPUSIM_PRIVATE_ID) || ((const struct gpusim_private *)table)->subscribe(called_back, &kept))
        exit(2);
}

/* The simulated driver calls this function, instead of libc's function of the same name, while it creates a context. */
static _Atomic int making;

int pthread_mutex_init(pthread_mutex_t *mutex, const pthread_mutexattr_t *attributes)
{
    pthread_mutex_t plain = PTHREAD_MUTEX_INITIALIZER;
    plain.__data.__kind = attributes ? PTHREAD_MUTEX_RECURSIVE : PTHREAD_MUTEX_NORMAL;
    *mutex = plain;
    if (making && making--)
        waits();
    return 0;
}

static void *makes_another(void *unused)
{
    (void)unused;
    usleep(SOON_US);
    makes();
    return NULL;
}

static void *retains_it(void *unused)
{
    (void)unused;
    usleep(SOON_US);
    nested = cuDevicePrimaryCtxRetain(&second, 0);
    return NULL;
}

static void *makes_many(void *unused)
{
    (void)unused;
    nested = 0;
    for (int i = 0; i < 12 && !nested; i++) {
        nested = cuCtxCreate_v2(&second, 0, 0);
        if (!nested)
            nested = cuCtxDestroy_v2(second);
    }
    return NULL;
}

/* Body of the two threads that load code concurrently. Either of them may have to wait for the other. */
struct loader {
    pthread_barrier_t *barrier;
    const char *image;
    CUresult status;
    CUmodule module;
};

static void *loads(void *data)
{
    struct loader *loader = data;
    cuCtxSetCurrent(first);
    pthread_barrier_wait(loader->barrier);
    loader->status = cuModuleLoadData(&loader->module, loader->image);
    return NULL;
}

static int load_together(const char *bytes)
{
    char image[256];
    int none = 0, both = 0;
    /* For the simulated driver: the GPU memory of the code, and how many ms its load takes. */
    snprintf(image, sizeof image, ".gpusim bytes %s\n.gpusim load 1\n", bytes);
    for (int round = 0; round < 40; round++) {
        pthread_barrier_t barrier;
        pthread_t threads[2];
        struct loader loaders[2] = {{.barrier = &barrier, .image = image}, {.barrier = &barrier, .image = image}};
        pthread_barrier_init(&barrier, NULL, 2);
        for (int i = 0; i < 2; i++)
            pthread_create(&threads[i], NULL, loads, &loaders[i]);
        for (int i = 0; i < 2; i++)
            pthread_join(threads[i], NULL);
        none += loaders[0].status && loaders[1].status;
        both += !loaders[0].status && !loaders[1].status;
        for (int i = 0; i < 2; i++)
            if (!loaders[i].status)
                cuModuleUnload(loaders[i].module);
    }
    printf("%d %d\n", none, both);
    return 0;
}

/* Waits for a line of standard input. Closed standard input means that the test has ended, so the program exits. */
static void next_line(void)
{
    for (int c; (c = getchar()) != '\n';)
        if (c == EOF)
            _exit(0);
}

int main(int argc, char **argv)
{
    const char *way = argc > 1 ? argv[1] : "";
    int status = cuInit(0), last = 0;
    if (status)
        return 2;
    if (!strcmp(way, "loads")) {
        if (cuCtxCreate_v2(&first, 0, 0) || load_together(argv[2]))
            return 2;
    } else if (!strcmp(way, "thrown")) {
        subscribe(throws);
        if (!setjmp(before))
            cuCtxCreate_v2(&first, 0, 0);
        pthread_create(&other, NULL, makes_many, NULL);
        pthread_join(other, NULL);
        printf("%d\n", nested);
    } else if (!strcmp(way, "retained") || !strcmp(way, "making")) {
        if (strcmp(way, "making"))
            subscribe(waits);
        else
            making = 1;
        pthread_create(&other, NULL, retains_it, NULL);
        status = cuDevicePrimaryCtxRetain(&first, 0);
        pthread_join(other, NULL);
        last = use(first);
        printf("%d %d %d\n", status, nested, last);
    } else {
        subscribe(strcmp(way, "slow") ? makes : waits);
        if (!strcmp(way, "slow"))
            pthread_create(&other, NULL, makes_another, NULL);
        status = cuCtxCreate_v2(&first, 0, 0);
        if (!strcmp(way, "slow"))
            pthread_join(other, NULL);
        last = use(first);
        printf("%d %d %d\n", status, nested, last);
    }
    fflush(stdout);
    next_line();
    if (!strcmp(way, "retained") || !strcmp(way, "making")) {
        cuDevicePrimaryCtxRelease_v2(0);
        last = use(first);
        printf("%d\n", last);
        fflush(stdout);
        next_line();
        printf("%d\n", cuDevicePrimaryCtxRelease_v2(0));
    } else {
        cuCtxDestroy_v2(first);
        printf("%d\n", use(second));
    }
    fflush(stdout);
    while (getchar() != EOF)
        ;
    _exit(0);
}
