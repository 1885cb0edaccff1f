/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Allocates and frees GPU memory, and requests one byte more than is free, repeatedly until its standard input ends.
 * Linked to libc alone, like fill.c.
 * Usage: churn; prints "ready\n" once it has a context, and at the end
 * "<rounds> <refused> <granted> <failed>\n": how many
 * allocations within the limit were refused, how many above the limit were granted, and how many other calls failed.
 */
#include <dlfcn.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

#define OUT_OF_MEMORY 2
#define PIECE (64ull << 20)

static int refuse(const char *what, int code)
{
    fprintf(stderr, "churn: %s: CUDA error %d\n", what, code);
    return 1;
}

int main(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) {
        fprintf(stderr, "churn: %s\n", dlerror());
        return 1;
    }
    int (*init)(unsigned);
    int (*create)(void **, unsigned, int);
    int (*information)(size_t *, size_t *);
    int (*allocate)(uint64_t *, size_t);
    int (*release)(uint64_t);
    *(void **)&init = dlsym(driver, "cuInit");
    *(void **)&create = dlsym(driver, "cuCtxCreate_v2");
    *(void **)&information = dlsym(driver, "cuMemGetInfo_v2");
    *(void **)&allocate = dlsym(driver, "cuMemAlloc_v2");
    *(void **)&release = dlsym(driver, "cuMemFree_v2");
    if (!init || !create || !information || !allocate || !release) {
        fprintf(stderr, "churn: libcuda.so.1 lacks a function\n");
        return 1;
    }
    void *context = NULL;
    int code = init(0);
    if (code)
        return refuse("cuInit", code);
    code = create(&context, 0, 0);
    if (code)
        return refuse("cuCtxCreate_v2", code);
    printf("ready\n");
    fflush(stdout);

    unsigned long rounds = 0, refused = 0, granted = 0, failed = 0;
    for (;; rounds++) {
        uint64_t pointer = 0, excess = 0;
        size_t left = 0, total = 0;
        code = allocate(&pointer, PIECE);
        refused += code != 0;
        /* Requests one byte more than is free, because the limit must hold even while library and plugin are
         * upgraded. */
        failed += information(&left, &total) != 0;
        code = allocate(&excess, left + 1);
        failed += code != 0 && code != OUT_OF_MEMORY;
        if (code == 0) {
            granted++;
            release(excess);
        }
        if (pointer)
            failed += release(pointer) != 0;
        struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
        if (poll(&input, 1, 1) > 0)
            break;
    }
    printf("%lu %lu %lu %lu\n", rounds, refused, granted, failed);
    return 0;
}
