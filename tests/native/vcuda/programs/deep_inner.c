/* SPDX-License-Identifier: Apache-2.0 */
/* The library that deep.c opens. It finds the driver's functions by dlsym, or is linked to the driver if compiled with
 * -DLINKED. Its function allocates GPU memory and returns the CUresult. */
#include <dlfcn.h>
#include <stddef.h>

typedef int (*init_type)(unsigned);
typedef int (*create_type)(void **, unsigned, int);
typedef int (*alloc_type)(unsigned long long *, size_t);

#ifdef LINKED
int cuInit(unsigned flags);
int cuCtxCreate_v2(void **context, unsigned flags, int device);
int cuMemAlloc_v2(unsigned long long *pointer, size_t bytes);
#define FIND(name) ((void *)name)
#else
#define FIND(name) dlsym(dlopen("libcuda.so.1", RTLD_LAZY), #name)
#endif

int inner(size_t bytes)
{
    void *context;
    unsigned long long pointer;
    init_type init = (init_type)FIND(cuInit);
    create_type create = (create_type)FIND(cuCtxCreate_v2);
    alloc_type alloc = (alloc_type)FIND(cuMemAlloc_v2);
    if (init(0) || create(&context, 0, 0))
        return -1;
    return alloc(&pointer, bytes);
}
