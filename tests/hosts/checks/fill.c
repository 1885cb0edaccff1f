/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Allocates all available GPU memory, or at most MIB, prints the allocated bytes, and keeps the memory until its
 * standard input ends.
 * Linked to libc alone: the driver is opened by name, because a container gets it from the runtime.
 * Usage: fill [MIB]; prints "<bytes>\n", or a line on stderr and status 1.
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define OUT_OF_MEMORY 2
#define LARGEST (1ull << 30)

static int refuse(const char *what, int code)
{
    fprintf(stderr, "fill: %s: CUDA error %d\n", what, code);
    return 1;
}

int main(int count, char **words)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) {
        fprintf(stderr, "fill: %s\n", dlerror());
        return 1;
    }
    int (*init)(unsigned);
    int (*create)(void **, unsigned, int);
    int (*allocate)(uint64_t *, size_t);
    *(void **)&init = dlsym(driver, "cuInit");
    *(void **)&create = dlsym(driver, "cuCtxCreate_v2");
    *(void **)&allocate = dlsym(driver, "cuMemAlloc_v2");
    if (!init || !create || !allocate) {
        fprintf(stderr, "fill: libcuda.so.1 lacks cuInit, cuCtxCreate_v2 or cuMemAlloc_v2\n");
        return 1;
    }
    void *context = NULL;
    int code = init(0);
    if (code)
        return refuse("cuInit", code);
    code = create(&context, 0, 0);
    if (code)
        return refuse("cuCtxCreate_v2", code);

    uint64_t total = 0, most = count > 1 ? strtoull(words[1], NULL, 10) << 20 : UINT64_MAX;
    /* The size is halved after each refusal, so in the end not one byte is free. */
    for (uint64_t size = LARGEST; size > 0 && total < most;) {
        if (size > most - total)
            size = most - total;
        uint64_t pointer;
        code = allocate(&pointer, size);
        if (code == OUT_OF_MEMORY)
            size /= 2;
        else if (code)
            return refuse("cuMemAlloc_v2", code);
        else
            total += size;
    }
    printf("%llu\n", (unsigned long long)total);
    fflush(stdout);
    char byte;
    while (read(STDIN_FILENO, &byte, 1) > 0)
        ;
    return 0;
}
