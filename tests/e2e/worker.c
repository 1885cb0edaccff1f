/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The program in the pods of tests/e2e: it allocates GPU memory, keeps the GPU busy and prints its results. It links
 * only libc and opens the driver by name, because in a container the runtime mounts the driver.
 *
 *   gpu-worker [fill] [follow] [take MIB] [busy] [crash]
 *
 * The program carries out its commands in this order: "fill" allocates until the driver refuses (prints "filled
 * BYTES"); "follow" repeats that until the end, frees all memory at SIGUSR1 and allocates again from SIGUSR2 on;
 * "take" allocates MIB MiB (prints "took MIB: CODE", the driver's result code); "busy" prints "busy" and launches
 * kernels of 2 ms one by one until the end; "crash" exits with status 3. After the last command the program waits to
 * be stopped.
 */
#define _DEFAULT_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define OUT_OF_MEMORY 2
#define LARGEST (1ull << 30)
#define MOST 65536

static void *driver;

static void *named(const char *name)
{
    void *found = dlsym(driver, name);
    if (!found) {
        printf("libcuda.so.1 lacks %s\n", name);
        exit(1);
    }
    return found;
}

static void must(const char *what, int code)
{
    if (code) {
        printf("%s: CUDA error %d\n", what, code);
        exit(1);
    }
}

static uint64_t blocks[MOST];
static unsigned taken;
static volatile sig_atomic_t gives;

static int allocate(uint64_t bytes)
{
    int (*call)(uint64_t *, size_t);
    uint64_t pointer;
    *(void **)&call = named("cuMemAlloc_v2");
    int code = call(&pointer, bytes);
    if (!code && taken < MOST)
        blocks[taken++] = pointer;
    return code;
}

/* Halving the size after each refusal, down to one byte, uses up everything that the limit allows. */
static uint64_t fill(void)
{
    uint64_t total = 0;
    for (uint64_t size = LARGEST; size > 0;) {
        int code = allocate(size);
        if (code == OUT_OF_MEMORY)
            size /= 2;
        else {
            must("cuMemAlloc_v2", code);
            total += size;
        }
    }
    return total;
}

static void asked(int number)
{
    gives = number == SIGUSR1;
}

/* Try one byte first, so that a full slice (part of a GPU) causes only one refusal per round. */
static void follow(void)
{
    int (*give)(uint64_t);
    *(void **)&give = named("cuMemFree_v2");
    signal(SIGUSR1, asked);
    signal(SIGUSR2, asked);
    for (printf("follows\n");; usleep(50000)) {
        if (!gives && !allocate(1))
            fill();
        for (; gives && taken; taken--)
            must("cuMemFree_v2", give(blocks[taken - 1]));
    }
}

static void busy(void)
{
    int (*load)(void **, const void *), (*find)(void **, void *, const char *), (*synchronize)(void);
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
    void *module, *function;
    *(void **)&load = named("cuModuleLoadData");
    *(void **)&find = named("cuModuleGetFunction");
    *(void **)&launch = named("cuLaunchKernel");
    *(void **)&synchronize = named("cuCtxSynchronize");
    /* For the simulated driver this text declares a kernel of 2000 microseconds. */
    must("cuModuleLoadData", load(&module, "// .gpusim kernel spin 2000\n"));
    must("cuModuleGetFunction", find(&function, module, "spin"));
    printf("busy\n");
    for (;;) {
        /* Keep several kernels queued, so that the GPU does not wait for this process on a busy machine. */
        for (int i = 0; i < 8; i++)
            must("cuLaunchKernel", launch(function, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL));
        must("cuCtxSynchronize", synchronize());
    }
}

int main(int count, char **words)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    signal(SIGTERM, SIG_DFL);
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) {
        printf("no driver: %s\n", dlerror());
        return 1;
    }
    int (*init)(unsigned), (*create)(void **, unsigned, int), (*total)(size_t *, int);
    void *context;
    size_t bytes = 0;
    *(void **)&init = named("cuInit");
    *(void **)&create = named("cuCtxCreate_v2");
    *(void **)&total = named("cuDeviceTotalMem_v2");
    must("cuInit", init(0));
    must("cuDeviceTotalMem_v2", total(&bytes, 0));
    printf("total %zu\n", bytes);
    must("cuCtxCreate_v2", create(&context, 0, 0));
    printf("context\n");
    for (int i = 1; i < count; i++) {
        if (!strcmp(words[i], "fill"))
            printf("filled %llu\n", (unsigned long long)fill());
        else if (!strcmp(words[i], "follow"))
            follow();
        else if (!strcmp(words[i], "take") && i + 1 < count) {
            unsigned long mib = strtoul(words[++i], NULL, 10);
            printf("took %lu: %d\n", mib, allocate((uint64_t)mib << 20));
        } else if (!strcmp(words[i], "busy"))
            busy();
        else if (!strcmp(words[i], "crash"))
            return 3;
        else {
            printf("unknown word %s\n", words[i]);
            return 64;
        }
    }
    printf("waiting\n");
    for (;;)
        pause();
}
