/* SPDX-License-Identifier: Apache-2.0 */
/*
 * loader PLUGIN first|later: one thread opens PLUGIN by dlopen. The constructor of PLUGIN waits until the main thread
 * is about to call the driver, then calls the driver too. The loader's lock is held during a constructor, so a deadlock
 * is possible: the program then hangs. With "first" the main thread makes the process's first call. NVIDIA's driver 580
 * opens libraries in a process's first call, so with "first" the program hangs even without a preloaded library. With
 * "later" the driver is initialized before the thread starts.
 *
 * Compiled with -DPLUGIN, this file is the library PLUGIN.
 */
#include "gpu.h"

#include <pthread.h>
#include <stdatomic.h>

#ifdef PLUGIN
__attribute__((constructor)) static void begin(void)
{
    _Atomic int *stage = (_Atomic int *)strtoull(getenv("LOADER_STAGE"), NULL, 16);
    CUcontext context;
    *stage = 1;
    while (*stage < 2)
        usleep(100);
    usleep(50000); /* By now the other thread is inside its call. */
    gpu_open();
    if (CALL(cuInit, 0) || CALL(cuDevicePrimaryCtxRetain, &context, 0))
        *stage = -1;
}
#else
static _Atomic int stage;
static const char *plugin;

static void *open_plugin(void *unused)
{
    (void)unused;
    if (!dlopen(plugin, RTLD_NOW))
        gpu_fail("the plugin cannot be opened", 0);
    return NULL;
}

int main(int argc, char **argv)
{
    pthread_t thread;
    CUcontext context;
    char address[32];
    if (argc != 3)
        gpu_fail("usage: loader PLUGIN first|later", argc);
    plugin = argv[1];
    snprintf(address, sizeof address, "%llx", (unsigned long long)(uintptr_t)&stage);
    setenv("LOADER_STAGE", address, 1);
    gpu_open();
    if (strcmp(argv[2], "later") == 0) {
        MUST(CALL(cuInit, 0));
        MUST(CALL(cuDevicePrimaryCtxRetain, &context, 0));
    }
    if (pthread_create(&thread, NULL, open_plugin, NULL))
        gpu_fail("no thread", 0);
    while (stage < 1)
        usleep(100);
    stage = 2;
    MUST(CALL(cuInit, 0));
    MUST(CALL(cuDevicePrimaryCtxRetain, &context, 0));
    pthread_join(thread, NULL);
    printf("{\"ended\": %d}\n", stage == 2);
    return 0;
}
#endif
