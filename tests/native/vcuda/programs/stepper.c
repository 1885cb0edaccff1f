/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tests that the library loses no memory if a process is killed at any moment of an allocation. Usage:
 * stepper LIBRARY STRIDE LIMIT
 *
 * Kills processes while they allocate and free memory: the first at the start, and each further process STRIDE
 * instructions later than the one before. After each kill another process of the container, the survivor, allocates all
 * memory of the container's slice (its part of the GPU). Then the driver must report exactly LIMIT bytes in use. The
 * main process, which does not load the library, queries the driver. Prints the number of kills and of instructions.
 */
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include "driver/cuda_abi.h"

int cuInit(unsigned flags);
int cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device);
int cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes);
int cuMemFree_v2(CUdeviceptr pointer);
int cuMemGetInfo_v2(size_t *free_bytes, size_t *total);
int nvmlInit_v2(void);
int nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device);
int nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *processes);

static void begin(void)
{
    CUcontext context;
    CUdeviceptr pointer;
    if (cuInit(0) || cuCtxCreate_v2(&context, 0, 0) || cuMemAlloc_v2(&pointer, 4096) || cuMemFree_v2(pointer))
        _exit(9);
}

static int victim(void)
{
    CUdeviceptr pointer;
    begin();
    ptrace(PTRACE_TRACEME, 0, NULL, NULL);
    raise(SIGSTOP);
    if (cuMemAlloc_v2(&pointer, 1 << 20) || cuMemFree_v2(pointer))
        _exit(8);
    raise(SIGSTOP);
    return 0;
}

static int survivor(void)
{
    char order;
    CUdeviceptr held[64];
    begin();
    if (write(STDOUT_FILENO, "r", 1) != 1)
        return 7;
    while (read(STDIN_FILENO, &order, 1) == 1) {
        int count = 0;
        size_t left = 0, total;
        /* For a moment the dead process's bytes may still be shown as used. So the survivor does not query the free
         * memory, but allocates until an allocation is refused. */
        for (size_t piece = 8ull << 30; piece && count < 64; piece /= 2)
            if (cuMemAlloc_v2(&held[count], piece) == CUDA_SUCCESS)
                count++;
        cuMemGetInfo_v2(&left, &total);
        char answer = left == 0 ? 'a' : 'x';
        if (write(STDOUT_FILENO, &answer, 1) != 1 || read(STDIN_FILENO, &order, 1) != 1)
            return 7;
        while (count)
            cuMemFree_v2(held[--count]);
        if (write(STDOUT_FILENO, "f", 1) != 1)
            return 7;
    }
    return 0;
}

static pid_t start(char **argv, const char *role, int in, int out)
{
    pid_t child = fork();
    if (child == 0) {
        /* The kernel kills the child when this program ends. Otherwise the survivor would keep standard error open, and
         * the test would wait for its end. */
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (in >= 0)
            dup2(in, STDIN_FILENO);
        if (out >= 0)
            dup2(out, STDOUT_FILENO);
        setenv("LD_PRELOAD", argv[1], 1);
        execl("/proc/self/exe", argv[0], role, NULL);
        _exit(127);
    }
    return child;
}

static void expect(int from, char wanted, unsigned step)
{
    struct pollfd poll_from = {.fd = from, .events = POLLIN};
    char answer = 0;
    if (poll(&poll_from, 1, 20000) != 1 || read(from, &answer, 1) != 1 || answer != wanted) {
        fprintf(stderr, "stepper: after a kill at instruction %u the survivor answers '%c', expected '%c'\n", step, answer, wanted);
        exit(1);
    }
}

static unsigned long long on_card(nvmlDevice_t device)
{
    static nvmlProcessInfo_t list[64];
    unsigned count = 64;
    unsigned long long sum = 0;
    if (nvmlDeviceGetComputeRunningProcesses_v3(device, &count, list) != 0)
        return 0;
    for (unsigned i = 0; i < count; i++)
        sum += list[i].usedGpuMemory;
    return sum;
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "victim") == 0)
        return victim();
    if (argc == 2 && strcmp(argv[1], "survivor") == 0)
        return survivor();
    if (argc != 4)
        return 2;
    unsigned stride = (unsigned)atoi(argv[2]), kills = 0, step = 0;
    unsigned long long limit = strtoull(argv[3], NULL, 0);
    int to[2], from[2];
    nvmlDevice_t device;
    if (pipe(to) || pipe(from) || nvmlInit_v2() || nvmlDeviceGetHandleByIndex_v2(0, &device))
        return 3;
    pid_t other = start(argv, "survivor", to[0], from[1]);
    expect(from[0], 'r', 0);
    for (unsigned target = 0;; target += stride) {
        int status;
        bool ended = false;
        pid_t child = start(argv, "victim", -1, -1);
        if (waitpid(child, &status, 0) != child || !WIFSTOPPED(status))
            return 4;
        for (step = 0; step < target && !ended; step++) {
            ptrace(PTRACE_SINGLESTEP, child, NULL, NULL);
            waitpid(child, &status, 0);
            ended = !WIFSTOPPED(status) || WSTOPSIG(status) == SIGSTOP;
        }
        kill(child, SIGKILL);
        waitpid(child, &status, 0);
        if (ended)
            break;
        kills++;
        if (write(to[1], "a", 1) != 1)
            return 5;
        expect(from[0], 'a', step);
        unsigned long long sum = on_card(device);
        if (sum != limit) {
            fprintf(stderr, "stepper: after a kill at instruction %u the card holds %llu bytes, expected %llu\n", step, sum, limit);
            return 1;
        }
        if (write(to[1], "f", 1) != 1)
            return 5;
        expect(from[0], 'f', step);
    }
    kill(other, SIGKILL);
    waitpid(other, NULL, 0);
    printf("%u %u\n", kills, step);
    return 0;
}
