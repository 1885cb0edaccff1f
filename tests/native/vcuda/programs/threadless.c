/* SPDX-License-Identifier: Apache-2.0 */
/* A preloaded library that simulates a limit on threads. libvgpu.so can create as many threads as the variable THREADS
 * says; further attempts fail with EAGAIN. The program itself can create any number of threads. */
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

__attribute__((visibility("default"))) int pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                                                          void *(*start)(void *), void *data)
{
    static _Atomic int made;
    int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    Dl_info info;
    const char *most = getenv("THREADS");
    if (most && dladdr((void *)(size_t)start, &info) && strstr(info.dli_fname, "libvgpu.so") &&
        atomic_fetch_add(&made, 1) >= atoi(most))
        return EAGAIN;
    *(void **)&real = dlsym(RTLD_NEXT, "pthread_create");
    return real(thread, attributes, start, data);
}
