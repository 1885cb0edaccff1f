/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs concurrent threads in one process. Usage: contenders CASE ROUNDS. Prints the number of failed calls and waits
 * until standard input closes. Meanwhile the test compares the ledger, the file in which the library records the
 * container's GPU memory, with the driver's own figures. The case "fork" only prints how many descriptors of the ledger
 * a forked child has, and exits.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "driver/cuda_abi.h"

CUresult cuInit(unsigned flags);
CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device);
CUresult cuCtxDestroy_v2(CUcontext context);
CUresult cuCtxSetCurrent(CUcontext context);
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device);
CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes);
CUresult cuMemFree_v2(CUdeviceptr pointer);
CUresult cuModuleLoadData(CUmodule *module, const void *image);
CUresult cuModuleUnload(CUmodule module);

static int rounds;
static _Atomic int stop, failed;
static CUcontext shared;

static void *primary(void *unused)
{
    CUcontext context;
    for (int i = 0; i < rounds; i++)
        if (cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS)
            cuDevicePrimaryCtxRelease_v2(0);
        else
            atomic_fetch_add(&failed, 1);
    return unused;
}

static void *create(void *unused)
{
    CUcontext context;
    CUdeviceptr pointer;
    for (int i = 0; i < rounds; i++)
        if (cuCtxCreate_v2(&context, 0, 0) == CUDA_SUCCESS) {
            cuMemAlloc_v2(&pointer, 1 << 20);
            cuCtxDestroy_v2(context);
        } else {
            atomic_fetch_add(&failed, 1);
        }
    return unused;
}

static void *churn(void *data)
{
    CUdeviceptr pointer;
    cuCtxSetCurrent(shared);
    while (!stop)
        if (cuMemAlloc_v2(&pointer, (size_t)(uintptr_t)data) == CUDA_SUCCESS)
            cuMemFree_v2(pointer);
    return NULL;
}

/* Returns how many open descriptors of this process refer to the ledger. */
static int ledgers(void)
{
    char link[64], target[512];
    int count = 0;
    for (int descriptor = 3; descriptor < 64; descriptor++) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
        ssize_t length = readlink(link, target, sizeof target - 1);
        target[length < 0 ? 0 : length] = 0;
        count += strcmp(target, getenv("CUDA_DEVICE_MEMORY_SHARED_CACHE")) == 0;
    }
    return count;
}

/* Forks while another thread waits for its turn to measure its first context. Returns how many descriptors of the
 * ledger the child has. */
static int forked(void)
{
    pthread_t thread;
    int status;
    pthread_create(&thread, NULL, create, NULL);
    while (!ledgers())
        usleep(1000);
    /* By now the thread has closed its first descriptor of the ledger and waits on another descriptor. */
    usleep(50000);
    if (!ledgers())
        return -1;
    pid_t child = fork();
    if (child == 0)
        _exit(ledgers());
    waitpid(child, &status, 0);
    return WEXITSTATUS(status);
}

static void together(int count, void *(*work)(void *))
{
    pthread_t threads[8];
    for (int i = 0; i < count; i++)
        pthread_create(&threads[i], NULL, work, NULL);
    for (int i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
}

/* Creates contexts with two modules each, and destroys nine out of ten contexts, while two threads allocate and free
 * large blocks. */
static void among_churn(void)
{
    pthread_t threads[2];
    /* For the simulated driver: the code takes 20 MiB of GPU memory. */
    static const char image[] = ".version 7.0\n.target sm_50\n.address_size 64\n// .gpusim bytes 20971520\n";
    cuCtxCreate_v2(&shared, 0, 0);
    for (int i = 0; i < 2; i++)
        pthread_create(&threads[i], NULL, churn, (void *)((uintptr_t)(i + 1) * 512 << 20));
    for (int i = 0; i < rounds; i++) {
        CUcontext context;
        CUmodule module[2];
        if (cuCtxCreate_v2(&context, 0, 0) != CUDA_SUCCESS) {
            atomic_fetch_add(&failed, 1);
            continue;
        }
        for (int m = 0; m < 2; m++)
            if (cuModuleLoadData(&module[m], image) != CUDA_SUCCESS) {
                atomic_fetch_add(&failed, 1);
                module[m] = NULL;
            }
        if (module[0])
            cuModuleUnload(module[0]);
        if (i % 10)
            cuCtxDestroy_v2(context);
    }
    stop = 1;
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    /* During the race the library could not measure some contexts. It charges them at the first allocation after
     * AGAIN_NS. */
    CUdeviceptr last;
    cuCtxSetCurrent(shared);
    usleep(60000);
    if (cuMemAlloc_v2(&last, (size_t)512 << 20) == CUDA_SUCCESS)
        cuMemFree_v2(last);
}

int main(int argc, char **argv)
{
    char line[16];
    if (argc != 3 || cuInit(0) != CUDA_SUCCESS)
        return 2;
    rounds = atoi(argv[2]);
    if (strcmp(argv[1], "fork") == 0) {
        printf("%d\n", forked());
        fflush(stdout);
        _exit(0);
    }
    if (strcmp(argv[1], "primary") == 0)
        together(3, primary);
    else if (strcmp(argv[1], "create") == 0)
        together(3, create);
    else
        among_churn();
    printf("%d\n", failed);
    fflush(stdout);
    return fgets(line, sizeof line, stdin) ? 1 : 0;
}
