/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The negative control of the benchmarks: a naive interposer library that limits GPU memory. Every gate (bound on a
 * measurement) must reject it, which shows that the gates detect a bad library.
 *
 * Its faults are deliberate. It checks the limit before it takes the lock. Its lock names no holder, and stays locked
 * when the holder dies. It stores only a total, so the memory of a killed process stays charged. Its blocks are in a
 * list, so a free takes longer the more blocks exist. It reads its pid and the time without need. Processes start one
 * after the other. The processes share the file $NAIVE_STATE; $NAIVE_LIMIT
 * is the limit in bytes.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "work.h"

struct shared {
    _Atomic uint32_t lock;
    _Atomic uint64_t used, launches;
};
struct node {
    struct node *next;
    CUdeviceptr pointer;
    size_t bytes;
};
static struct shared *shared;
static uint64_t limit;
static struct node *list;

#define REAL(symbol) \
    static __typeof__(&symbol) real; \
    if (!real) \
        *(void **)&real = dlsym(RTLD_NEXT, #symbol)

CUresult cuInit(unsigned flags);
CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device);
CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes);
CUresult cuMemFree_v2(CUdeviceptr pointer);
CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total);
CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned bytes, CUstream stream, void **parameters, void **extra);

static __attribute__((constructor)) void load(void)
{
    static char text[1 << 16];
    for (unsigned i = 0; i < 30; i++) {
        FILE *maps = fopen("/proc/self/maps", "r");
        while (maps && fgets(text, sizeof text, maps))
            continue;
        if (maps)
            fclose(maps);
    }
}

static void join(void)
{
    const char *path = getenv("NAIVE_STATE"), *text = getenv("NAIVE_LIMIT");
    int file = open(path ? path : "/dev/null", O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, 4096) != 0 || flock(file, LOCK_EX) != 0)
        abort();
    usleep(20000);
    limit = text ? strtoull(text, NULL, 0) : UINT64_MAX;
    void *map = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (map == MAP_FAILED)
        abort();
    shared = map;
    flock(file, LOCK_UN); /* close() alone would keep the lock, because the mapping keeps the file open. */
    close(file);
}

static void take(void)
{
    uint32_t unlocked = 0;
    while (!atomic_compare_exchange_weak(&shared->lock, &unlocked, 1)) {
        unlocked = 0;
        sched_yield();
    }
    syscall(SYS_getpid);
    syscall(SYS_getpid);
}

CUresult cuInit(unsigned flags)
{
    REAL(cuInit);
    if (!shared)
        join();
    return real(flags);
}

static CUresult charge(size_t bytes)
{
    if (atomic_load(&shared->used) + bytes > limit)
        return CUDA_ERROR_OUT_OF_MEMORY;
    sched_yield();
    take();
    shared->used += bytes;
    shared->lock = 0;
    return CUDA_SUCCESS;
}

CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device)
{
    REAL(cuCtxCreate_v2);
    const char *bytes = getenv("NAIVE_CONTEXT");
    CUresult status = charge(bytes ? strtoull(bytes, NULL, 0) : 0);
    return status ? status : real(context, flags, device);
}

CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes)
{
    REAL(cuMemAlloc_v2);
    CUresult status = charge(bytes);
    if (status || (status = real(pointer, bytes)))
        return status;
    struct node *node = malloc(sizeof *node), **last = &list;
    if (!node)
        abort();
    *node = (struct node){NULL, *pointer, bytes};
    take();
    while (*last)
        last = &(*last)->next;
    *last = node;
    shared->lock = 0;
    return CUDA_SUCCESS;
}

CUresult cuMemFree_v2(CUdeviceptr pointer)
{
    REAL(cuMemFree_v2);
    take();
    for (struct node **link = &list; *link; link = &(*link)->next)
        if ((*link)->pointer == pointer) {
            struct node *node = *link;
            shared->used -= node->bytes;
            *link = node->next;
            free(node);
            break;
        }
    shared->lock = 0;
    return real(pointer);
}

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    REAL(cuMemGetInfo_v2);
    clock();
    clock();
    CUresult status = real(free_bytes, total);
    *total = limit;
    *free_bytes = limit - shared->used;
    return status;
}

CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned bytes, CUstream stream, void **parameters, void **extra)
{
    REAL(cuLaunchKernel);
    struct timespec time;
    char name[32];
    clock_gettime(CLOCK_MONOTONIC, &time);
    snprintf(name, sizeof name, "%ld", (long)time.tv_nsec);
    atomic_fetch_add(&shared->launches, 1);
    return real(function, gx, gy, gz, bx, by, bz, bytes, stream, parameters, extra);
}
