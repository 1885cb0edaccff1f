/* SPDX-License-Identifier: Apache-2.0 */
/* Plays another tool that is preloaded next to the library. It replaces the driver's allocation function, reports each
 * allocation on stderr, and calls the next definition of the function. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "driver/cuda_abi.h"

CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes)
{
    static CUresult (*next)(CUdeviceptr *, size_t);
    if (!next)
        *(void **)&next = dlsym(RTLD_NEXT, "cuMemAlloc_v2");
    if (!next || next == cuMemAlloc_v2)
        abort();
    fputs("other: cuMemAlloc_v2\n", stderr);
    return next(pointer, bytes);
}

int puts_of_other(const char *text);
int puts_of_other(const char *text)
{
    /* If the library does not hook a function, two lookups of the function must return the same address. */
    int (*first)(const char *) = (int (*)(const char *))dlsym(RTLD_NEXT, "puts");
    int (*second)(const char *) = (int (*)(const char *))dlsym(RTLD_NEXT, "puts");
    return first && first == second ? second(text) : -1;
}
