/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tests that the library grants no memory beyond the limit if many processes allocate at once. Usage: racers LIBRARY
 * PROCESSES ROUNDS BYTES LIMIT
 *
 * In every round all processes allocate BYTES after a common barrier. Then the main process, which does not load the
 * library, asks the driver for the memory in use. Prints four numbers: the rounds, the rounds in which more than LIMIT
 * was in use, the most bytes in use, and the granted allocations.
 */
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "driver/cuda_abi.h"

int cuInit(unsigned flags);
int cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device);
int cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes);
int cuMemFree_v2(CUdeviceptr pointer);
int nvmlInit_v2(void);
int nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device);
int nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *processes);

struct board {
    pthread_barrier_t start, asked, freed;
    _Atomic unsigned grants, broken;
};

static struct board *board_open(int descriptor)
{
    struct board *board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (board == MAP_FAILED)
        exit(3);
    return board;
}

static int racer(int descriptor, unsigned rounds, size_t bytes)
{
    struct board *board = board_open(descriptor);
    CUcontext context;
    if (cuInit(0) != CUDA_SUCCESS || cuCtxCreate_v2(&context, 0, 0) != CUDA_SUCCESS)
        atomic_fetch_add(&board->broken, 1);
    for (unsigned i = 0; i < rounds; i++) {
        CUdeviceptr pointer = 0;
        pthread_barrier_wait(&board->start);
        int status = cuMemAlloc_v2(&pointer, bytes);
        if (status == CUDA_SUCCESS)
            atomic_fetch_add(&board->grants, 1);
        pthread_barrier_wait(&board->asked);
        pthread_barrier_wait(&board->freed);
        if (status == CUDA_SUCCESS && cuMemFree_v2(pointer) != CUDA_SUCCESS)
            atomic_fetch_add(&board->broken, 1);
    }
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 5 && strcmp(argv[1], "--racer") == 0)
        return racer(atoi(argv[2]), (unsigned)atoi(argv[3]), strtoull(argv[4], NULL, 0));
    if (argc != 6)
        return 2;
    unsigned processes = (unsigned)atoi(argv[2]), rounds = (unsigned)atoi(argv[3]), over = 0;
    unsigned long long limit = strtoull(argv[5], NULL, 0), greatest = 0;
    nvmlDevice_t device;
    char number[16];
    int descriptor = memfd_create("board", 0);
    if (descriptor < 0 || ftruncate(descriptor, sizeof(struct board)) != 0)
        return 3;
    struct board *board = board_open(descriptor);
    pthread_barrierattr_t shared;
    pthread_barrierattr_init(&shared);
    pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&board->start, &shared, processes);
    pthread_barrier_init(&board->asked, &shared, processes + 1);
    pthread_barrier_init(&board->freed, &shared, processes + 1);
    snprintf(number, sizeof number, "%d", descriptor);
    for (unsigned i = 0; i < processes; i++)
        if (fork() == 0) {
            setenv("LD_PRELOAD", argv[1], 1);
            execl("/proc/self/exe", argv[0], "--racer", number, argv[3], argv[4], NULL);
            _exit(127);
        }
    if (nvmlInit_v2() != NVML_SUCCESS || nvmlDeviceGetHandleByIndex_v2(0, &device) != NVML_SUCCESS)
        return 4;
    for (unsigned i = 0; i < rounds; i++) {
        static nvmlProcessInfo_t list[1024];
        unsigned count = 1024;
        unsigned long long sum = 0;
        pthread_barrier_wait(&board->asked);
        if (nvmlDeviceGetComputeRunningProcesses_v3(device, &count, list) != NVML_SUCCESS)
            return 5;
        for (unsigned p = 0; p < count; p++)
            sum += list[p].usedGpuMemory;
        over += sum > limit;
        greatest = sum > greatest ? sum : greatest;
        pthread_barrier_wait(&board->freed);
    }
    while (wait(NULL) > 0)
        continue;
    if (board->broken)
        return 6;
    printf("%u %u %llu %u\n", rounds, over, greatest, board->grants);
    return 0;
}
