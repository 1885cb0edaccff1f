/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Makes driver calls for a test. The program reads one command per line from standard input, makes the call, and prints
 * one result line. It keeps pointers and handles in numbered registers, and commands name the registers that they use.
 *
 *   puppet ROUTE        e.g. puppet link, puppet proc
 *
 * ROUTE says how the program looks up the driver's functions. The first word of a result line is the call's CUresult.
 */
#include "words.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

static struct api cu;
static unsigned long long reg[1 << 16];

#define CALL(function, ...) (cu.function ? cu.function(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND)

static int nvml(const char *what, unsigned index)
{
    void *library = dlopen("libnvidia-ml.so.1", RTLD_LAZY);
    int (*init)(void) = (int (*)(void))dlsym(library, "nvmlInit_v2");
    int (*handle_of)(unsigned, nvmlDevice_t *) =
        (int (*)(unsigned, nvmlDevice_t *))dlsym(library, "nvmlDeviceGetHandleByIndex_v2");
    nvmlDevice_t handle;
    int status = init();
    if (status == 0)
        status = handle_of(index, &handle);
    if (status == 0 && strcmp(what, "v1") == 0) {
        int (*info)(nvmlDevice_t, nvmlMemory_t *) =
            (int (*)(nvmlDevice_t, nvmlMemory_t *))dlsym(library, "nvmlDeviceGetMemoryInfo");
        nvmlMemory_t memory;
        status = info(handle, &memory);
        printf("%d %llu %llu %llu 0\n", status, memory.total, memory.used, memory.free);
        return 1;
    }
    if (status == 0) {
        int (*info)(nvmlDevice_t, nvmlMemory_v2_t *) =
            (int (*)(nvmlDevice_t, nvmlMemory_v2_t *))dlsym(library, "nvmlDeviceGetMemoryInfo_v2");
        nvmlMemory_v2_t memory = {.version = (unsigned)sizeof memory | 2u << 24};
        status = info(handle, &memory);
        printf("%d %llu %llu %llu %llu\n", status, memory.total, memory.used, memory.free, memory.reserved);
        return 1;
    }
    printf("%d\n", status);
    return 1;
}

struct churn {
    CUcontext context;
    unsigned rounds;
    size_t bytes;
    unsigned granted;
};

/* Allocates and frees memory in a loop, and counts the successful allocations. */
static void *churn(void *data)
{
    struct churn *work = data;
    CUdeviceptr held[4] = {0};
    cu.cuCtxSetCurrent(work->context);
    for (unsigned i = 0; i < work->rounds; i++) {
        CUdeviceptr *slot = &held[i % 4];
        if (*slot)
            cu.cuMemFree_v2(*slot);
        *slot = 0;
        if (cu.cuMemAlloc_v2(slot, work->bytes + i % 7) == CUDA_SUCCESS)
            work->granted++;
        else
            *slot = 0;
    }
    for (unsigned i = 0; i < 4; i++)
        if (held[i])
            cu.cuMemFree_v2(held[i]);
    return NULL;
}

static int threads(unsigned count, unsigned rounds, size_t bytes, CUcontext context)
{
    pthread_t thread[64];
    struct churn work[64];
    unsigned granted = 0;
    for (unsigned i = 0; i < count && i < 64; i++) {
        work[i] = (struct churn){context, rounds, bytes, 0};
        pthread_create(&thread[i], NULL, churn, &work[i]);
    }
    for (unsigned i = 0; i < count && i < 64; i++) {
        pthread_join(thread[i], NULL);
        granted += work[i].granted;
    }
    printf("0 %u\n", granted);
    return 1;
}

/* Allocates by the call that the command names. Returns 1, or 0 if the command names no such call. */
static int allocate(const char *verb, int to, unsigned long long a, unsigned long long b, unsigned long long c)
{
    CUdeviceptr pointer = 0;
    CUresult status;
    size_t pitch = 0;
    char image[160];
    /* The line with .gpusim tells the simulated driver the GPU memory of the code. */
    snprintf(image, sizeof image, ".version 7.0\n.target sm_50\n.address_size 64\n// .gpusim bytes %llu\n", a);
    CUDA_ARRAY_DESCRIPTOR flat = {a, b, (int)c, 1};
    CUDA_ARRAY3D_DESCRIPTOR deep = {a, b, c, 0x20, 1, 0};
    CUmemAllocationProp memory = {.type = 1, .location = {CU_MEM_LOCATION_TYPE_DEVICE, (int)b}};
    CUmemPoolProps pool = {.allocType = 1, .location = {CU_MEM_LOCATION_TYPE_DEVICE, (int)a}};
    if (strcmp(verb, "alloc") == 0)
        status = CALL(cuMemAlloc_v2, &pointer, a);
    else if (strcmp(verb, "alloc1") == 0) {
        CUdeviceptr_v1 small = 0;
        status = CALL(cuMemAlloc, &small, (unsigned)a);
        pointer = small;
    } else if (strcmp(verb, "managed") == 0)
        status = CALL(cuMemAllocManaged, &pointer, a, 1);
    else if (strcmp(verb, "pitch") == 0)
        status = CALL(cuMemAllocPitch_v2, &pointer, &pitch, a, b, 4);
    else if (strcmp(verb, "async") == 0)
        status = CALL(cuMemAllocAsync, &pointer, a, NULL);
    else if (strcmp(verb, "async-ptsz") == 0)
        status = CALL(cuMemAllocAsync_ptsz, &pointer, a, NULL);
    else if (strcmp(verb, "pool") == 0)
        status = CALL(cuMemPoolCreate, (CUmemoryPool *)&pointer, &pool);
    else if (strcmp(verb, "pool-shared") == 0) {
        pool.handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        status = CALL(cuMemPoolCreate, (CUmemoryPool *)&pointer, &pool);
    } else if (strcmp(verb, "frompool") == 0)
        status = CALL(cuMemAllocFromPoolAsync, &pointer, a, (CUmemoryPool)reg[b], NULL);
    else if (strcmp(verb, "create") == 0)
        status = CALL(cuMemCreate, &pointer, a, &memory, 0);
    else if (strcmp(verb, "create-shared") == 0) {
        memory.requestedHandleTypes = 1;
        status = CALL(cuMemCreate, &pointer, a, &memory, 0);
    } else if (strcmp(verb, "export") == 0) {
        int descriptor = -1;
        status = CALL(cuMemExportToShareableHandle, &descriptor, reg[a], 1, 0);
        pointer = (CUdeviceptr)descriptor;
    } else if (strcmp(verb, "import") == 0)
        status = CALL(cuMemImportFromShareableHandle, &pointer, (void *)reg[a], 1);
    else if (strcmp(verb, "reserve") == 0)
        status = CALL(cuMemAddressReserve, &pointer, a, 0, 0, 0);
    else if (strcmp(verb, "retain-handle") == 0)
        status = CALL(cuMemRetainAllocationHandle, &pointer, (void *)reg[a]);
    else if (strcmp(verb, "array") == 0)
        status = CALL(cuArrayCreate_v2, (CUarray *)&pointer, &flat);
    else if (strcmp(verb, "array3d") == 0)
        status = CALL(cuArray3DCreate_v2, (CUarray *)&pointer, &deep);
    else if (strcmp(verb, "mipmap") == 0) {
        deep.Depth = 0;
        status = CALL(cuMipmappedArrayCreate, (CUmipmappedArray *)&pointer, &deep, (unsigned)c);
    } else if (strcmp(verb, "ctx") == 0)
        status = CALL(cuCtxCreate_v2, (CUcontext *)&pointer, 0, (int)a);
    else if (strcmp(verb, "retain") == 0)
        status = CALL(cuDevicePrimaryCtxRetain, (CUcontext *)&pointer, (int)a);
    else if (strcmp(verb, "module") == 0)
        status = CALL(cuModuleLoadData, (CUmodule *)&pointer, image);
    else
        return 0;
    if (status == CUDA_SUCCESS)
        reg[to] = pointer;
    printf("%d %zu\n", status, pitch);
    return 1;
}

static int release(const char *verb, unsigned long long a, unsigned long long b, unsigned long long c)
{
    CUresult status;
    if (strcmp(verb, "free") == 0)
        status = CALL(cuMemFree_v2, reg[a]);
    else if (strcmp(verb, "free1") == 0)
        status = CALL(cuMemFree, (CUdeviceptr_v1)reg[a]);
    else if (strcmp(verb, "free-async") == 0)
        status = CALL(cuMemFreeAsync, reg[a], NULL);
    else if (strcmp(verb, "pool-destroy") == 0)
        status = CALL(cuMemPoolDestroy, (CUmemoryPool)reg[a]);
    else if (strcmp(verb, "release-handle") == 0)
        status = CALL(cuMemRelease, reg[a]);
    else if (strcmp(verb, "map") == 0)
        status = CALL(cuMemMap, reg[a], b, 0, reg[c], 0);
    else if (strcmp(verb, "unmap") == 0)
        status = CALL(cuMemUnmap, reg[a], b);
    else if (strcmp(verb, "array-destroy") == 0)
        status = CALL(cuArrayDestroy, (CUarray)reg[a]);
    else if (strcmp(verb, "mipmap-destroy") == 0)
        status = CALL(cuMipmappedArrayDestroy, (CUmipmappedArray)reg[a]);
    else if (strcmp(verb, "ctx-destroy") == 0)
        status = CALL(cuCtxDestroy_v2, (CUcontext)reg[a]);
    else if (strcmp(verb, "set") == 0)
        status = CALL(cuCtxSetCurrent, (CUcontext)reg[a]);
    else if (strcmp(verb, "release") == 0)
        status = CALL(cuDevicePrimaryCtxRelease_v2, (int)a);
    else if (strcmp(verb, "reset") == 0)
        status = CALL(cuDevicePrimaryCtxReset_v2, (int)a);
    else if (strcmp(verb, "unload") == 0)
        status = CALL(cuModuleUnload, (CUmodule)reg[a]);
    else if (strcmp(verb, "sync") == 0)
        status = CALL(cuCtxSynchronize);
    else if (strcmp(verb, "stream-sync") == 0)
        status = CALL(cuStreamSynchronize, NULL);
    else
        return 0;
    printf("%d\n", status);
    return 1;
}

static int ask(const char *verb, unsigned long long a, char *text)
{
    size_t free_bytes = 0, total = 0;
    if (strcmp(verb, "init") == 0) {
        printf("%d\n", CALL(cuInit, 0));
    } else if (strcmp(verb, "info") == 0) {
        CUresult status = CALL(cuMemGetInfo_v2, &free_bytes, &total);
        printf("%d %zu %zu\n", status, free_bytes, total);
    } else if (strcmp(verb, "total") == 0) {
        CUresult status = CALL(cuDeviceTotalMem_v2, &total, (int)a);
        printf("%d %zu\n", status, total);
    } else if (strcmp(verb, "uuid") == 0) {
        CUuuid uuid;
        CUresult status = CALL(cuDeviceGetUuid, &uuid, (int)a);
        printf("%d ", status);
        for (int i = 0; i < 16; i++)
            printf("%02x", uuid.bytes[i]);
        puts("");
    } else if (strcmp(verb, "nvml") == 0) {
        return nvml("v1", (unsigned)a);
    } else if (strcmp(verb, "nvml2") == 0) {
        return nvml("v2", (unsigned)a);
    } else if (strcmp(verb, "pid") == 0) {
        printf("0 %d\n", (int)getpid());
    } else if (strcmp(verb, "title") == 0) {
        /* Moves the environment to a copy and overwrites the original memory, as setproctitle() does. */
        char **old = environ, *first = old[0];
        size_t count = 0;
        while (old[count])
            count++;
        size_t size = (size_t)(old[count - 1] + strlen(old[count - 1]) - first);
        char **copy = calloc(count + 1, sizeof *copy);
        for (size_t i = 0; i < count; i++)
            copy[i] = strdup(old[i]);
        environ = copy;
        memset(first, 'T', size);
        printf("%d\n", chdir("/"));
    } else if (strcmp(verb, "nofile") == 0) {
        struct rlimit limit;
        getrlimit(RLIMIT_NOFILE, &limit);
        limit.rlim_cur = a;
        printf("%d\n", setrlimit(RLIMIT_NOFILE, &limit));
    } else if (strcmp(verb, "close-all") == 0) {
        for (int fd = 3; fd < 1024; fd++)
            close(fd);
        puts("0");
    } else if (strcmp(verb, "fork") == 0) {
        /* The child continues to read commands; the parent waits for the child's exit. */
        int status;
        pid_t child = fork();
        if (child == 0) {
            printf("0 %d\n", (int)getpid());
            return 1;
        }
        waitpid(child, &status, 0);
        _exit(0);
    } else if (strcmp(verb, "fork-away") == 0) {
        /* Forks a child that keeps all inherited descriptors and mappings until the test kills it. */
        pid_t child = fork();
        if (child == 0) {
            close(STDIN_FILENO);
            close(STDOUT_FILENO);
            for (;;)
                pause();
        }
        printf("0 %d\n", (int)child);
    } else if (strcmp(verb, "exec") == 0) {
        char *arguments[] = {(char *)"puppet", strtok(text, " \n"), NULL};
        fflush(stdout);
        execv("/proc/self/exe", arguments);
        puts("1");
    } else {
        return 0;
    }
    return 1;
}

static void *obey_there(void *line);

static void obey(char *line)
{
    char verb[32];
    unsigned long long a = 0, b = 0, c = 0, d = 0;
    int offset = 0;
    if (sscanf(line, "%31s %n", verb, &offset) < 1)
        return;
    sscanf(line + offset, "%llu %llu %llu %llu", &a, &b, &c, &d);
    /* aside LINE: another thread executes the command LINE, while this thread waits */
    if (strcmp(verb, "aside") == 0) {
        pthread_t thread;
        pthread_create(&thread, NULL, obey_there, line + offset);
        pthread_join(thread, NULL);
    } else if (strcmp(verb, "threads") == 0) {
        threads((unsigned)a, (unsigned)b, c, (CUcontext)reg[d]);
    } else if (!call_word(reg, verb, line + offset) && !ask(verb, a, line + offset) && !release(verb, a, b, c) &&
               !allocate(verb, (int)a, b, c, d) && !graph_word(&cu, reg, verb, a, b, c, d) &&
               !code_word(&cu, reg, verb, a, b, c) && !bind_word(&cu, reg, verb, a, b, c, d)) {
        printf("-1 unknown word %s\n", verb);
    }
}

static void *obey_there(void *line)
{
    obey(line);
    return NULL;
}

int main(int argc, char **argv)
{
    char line[256];
    setvbuf(stdout, NULL, _IOLBF, 0);
    /* Standard input is unbuffered, so that no line is lost in a buffer if another process reads on after a fork or
     * exec. */
    setvbuf(stdin, NULL, _IONBF, 0);
    if (argc != 2 || !route_fill(&cu, argv[1]))
        return 2;
    while (fgets(line, sizeof line, stdin)) {
        obey(line);
        fflush(stdout);
    }
    return 0;
}
