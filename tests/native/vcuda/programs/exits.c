/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A program that exits while the library has not yet read all timing events (fences) of its launches. Usage: exits HOW
 *
 *   main      main returns
 *   handler   main returns; an exit handler registered before cuInit launches and synchronizes again
 *   thread    main returns while another thread launches; an exit handler waits until this thread has launched more
 *   destroy   an exit handler registered before cuInit destroys the context
 *   one       makes one launch of a measured kernel, synchronizes, and prints the number of the library's threads
 *   few       like one, but with five launches
 */
#include "driver/cuda_abi.h"

#include <dirent.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SHAPE unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned
CUresult cuInit(unsigned flags);
CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device);
CUresult cuCtxDestroy_v2(CUcontext context);
CUresult cuCtxSetCurrent(CUcontext context);
CUresult cuModuleLoadData(CUmodule *module, const void *image);
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name);
CUresult cuStreamCreate(CUstream *stream, unsigned flags);
CUresult cuStreamSynchronize(CUstream stream);
CUresult cuLaunchKernel(CUfunction function, SHAPE, CUstream stream, void **parameters, void **extra);

#define MUST(call) \
    do { \
        CUresult status_ = (call); \
        if (status_ != 0) { \
            fprintf(stderr, "exits: line %d: %s: %d\n", __LINE__, #call, status_); \
            _exit(3); \
        } \
    } while (0)

static CUcontext context;
static CUfunction function;
static CUstream stream;
static atomic_long launched;

static void launch(int count)
{
    while (count--) {
        MUST(cuLaunchKernel(function, 64, 1, 1, 64, 1, 1, 0, stream, NULL, NULL));
        atomic_fetch_add(&launched, 1);
    }
}

static void once_more(void)
{
    launch(100);
    MUST(cuStreamSynchronize(stream));
    write(1, "handled\n", 8);
}

static void destroy(void)
{
    MUST(cuCtxDestroy_v2(context));
    write(1, "handled\n", 8);
}

static void *launches(void *unused)
{
    (void)unused;
    MUST(cuCtxSetCurrent(context));
    for (;;)
        launch(10);
    return NULL;
}

static void launches_on(void)
{
    for (long seen = atomic_load(&launched); atomic_load(&launched) < seen + 300;)
        usleep(1000);
    write(1, "handled\n", 8);
    /* Exit handlers would tear the driver down while the launching thread still calls it, so end without them. */
    _exit(0);
}

static int threads(void)
{
    int count = 0;
    DIR *folder = opendir("/proc/self/task");
    for (struct dirent *entry; (entry = readdir(folder));) {
        char path[300], name[64] = "";
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", entry->d_name);
        FILE *file = fopen(path, "r");
        count += file && fgets(name, sizeof name, file) && !strcmp(name, "vgpu-limiter\n");
        if (file)
            fclose(file);
    }
    closedir(folder);
    return count;
}

int main(int argc, char **argv)
{
    const char *how = argc > 1 ? argv[1] : "";
    CUmodule module;
    pthread_t thread;
    if (!strcmp(how, "handler"))
        atexit(once_more);
    if (!strcmp(how, "destroy"))
        atexit(destroy);
    if (!strcmp(how, "thread"))
        atexit(launches_on);
    MUST(cuInit(0));
    MUST(cuCtxCreate_v2(&context, 0, 0));
    /* For the simulated driver: the kernel `work` takes 30 us. */
    MUST(cuModuleLoadData(&module, ".gpusim kernel work 30\n"));
    MUST(cuModuleGetFunction(&function, module, "work"));
    MUST(cuStreamCreate(&stream, 1));
    if (!strcmp(how, "one") || !strcmp(how, "few")) {
        for (int i = how[0] == 'o' ? 1 : 5; i; i--) {
            launch(1);
            MUST(cuStreamSynchronize(stream));
            usleep(20000);
        }
        printf("%d\n", threads());
        return 0;
    }
    if (!strcmp(how, "thread"))
        pthread_create(&thread, NULL, launches, NULL);
    /* The library's controller thread works in a cycle. This delay varies the moment of the cycle at which the process
     * exits. */
    launch(150 + getpid() % 50);
    usleep((useconds_t)getpid() % 7 * 300);
    return 0;
}
