/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Does what programs may legally do while the library limits their launches. Usage: launch_life WHAT. Each case must
 * end as it does without the library. The library measures launches in groups (segments): it records an event before
 * and after each segment. This pair is a fence. A fence is open until the library's controller thread has read the two
 * events.
 *
 *   contexts   contexts and streams are created and destroyed while work is queued
 *   streams    one thread launches, another destroys the stream afterwards, and a new stream gets the same handle
 *   captures   one thread captures repeatedly in global mode while another thread launches
 *   fork       a process that launches forks; the children cannot use the driver, the parent continues
 *   signals    a signal to the program is never handled by a thread of the library
 *   exit       the process ends with work queued and fences open
 *   threads    threads start, make so few launches that the library records no fence, and exit
 *   behind     the program queues more behind a host callback than the limiter allows; the callback waits for the last
 *              launch
 *   uneven     as `behind`, but the kernel's times vary so much that the library measures each launch alone;
 *              also uneven-spread
 *   spread     as `behind`, but the launches are spread over more streams than the library keeps open segments for
 *   broken     GPUSIMCTL raises an uncorrectable error while two threads launch and fences are open
 *   popped     a context on another device is created, used and destroyed, so that the former context is current again
 */
#include "driver/cuda_abi.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define SHAPE unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned
CUresult cuInit(unsigned flags);
CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device);
CUresult cuCtxDestroy_v2(CUcontext context);
CUresult cuCtxSetCurrent(CUcontext context);
CUresult cuCtxPushCurrent_v2(CUcontext context);
CUresult cuCtxPopCurrent_v2(CUcontext *context);
CUresult cuCtxSynchronize(void);
CUresult cuModuleLoadData(CUmodule *module, const void *image);
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name);
CUresult cuStreamCreate(CUstream *stream, unsigned flags);
CUresult cuStreamDestroy_v2(CUstream stream);
CUresult cuStreamSynchronize(CUstream stream);
CUresult cuStreamBeginCapture_v2(CUstream stream, int mode);
CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph);
CUresult cuLaunchHostFunc(CUstream stream, void (*callback)(void *data), void *data);
CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count);
CUresult cuGraphDestroy(CUgraph graph);
CUresult cuLaunchKernel(CUfunction function, SHAPE, CUstream stream, void **parameters, void **extra);

#define MUST(call) \
    do { \
        CUresult status_ = (call); \
        if (status_ != 0) { \
            fprintf(stderr, "launch_life: line %d: %s: %d\n", __LINE__, #call, status_); \
            _exit(3); \
        } \
    } while (0)

static CUcontext context;
static CUfunction function;
static atomic_int stop;

static void load_kernel(const char *name)
{
    CUmodule module;
    /* For the simulated driver: `work` takes 50 us, and `uneven` 10 to 1000 us, different in each launch. */
    MUST(cuModuleLoadData(&module, ".gpusim kernel work 50\n.gpusim kernel uneven 10..1000\n"));
    MUST(cuModuleGetFunction(&function, module, name));
}

static void load(void)
{
    load_kernel("work");
}

static void launch(CUstream stream, int count)
{
    for (int i = 0; i < count; i++)
        MUST(cuLaunchKernel(function, 64, 1, 1, 64, 1, 1, 0, stream, NULL, NULL));
}

static void contexts(void)
{
    for (int round = 0; round < 20; round++) {
        CUcontext other, popped;
        CUstream stream;
        MUST(cuCtxCreate_v2(&other, 0, round % 2));
        load();
        MUST(cuStreamCreate(&stream, 1));
        launch(stream, 40);
        MUST(cuCtxPushCurrent_v2(context));
        MUST(cuCtxPopCurrent_v2(&popped));
        launch(stream, 5);
        if (round % 3 == 0)
            MUST(cuStreamDestroy_v2(stream));
        MUST(cuCtxDestroy_v2(other)); /* At this moment the context has queued work and open fences. */
        MUST(cuCtxSetCurrent(context));
    }
    load();
    launch(NULL, 10);
    MUST(cuCtxSynchronize());
}

static _Atomic(CUstream) handed;

static void *destroyer(void *unused)
{
    (void)unused;
    MUST(cuCtxSetCurrent(context));
    while (!atomic_load(&stop)) {
        CUstream stream = atomic_exchange(&handed, NULL);
        if (stream) {
            MUST(cuStreamSynchronize(stream));
            MUST(cuStreamDestroy_v2(stream));
        } else {
            usleep(50);
        }
    }
    return NULL;
}

static void streams(void)
{
    pthread_t thread;
    pthread_create(&thread, NULL, destroyer, NULL);
    for (int round = 0; round < 300; round++) {
        CUstream stream, own;
        MUST(cuStreamCreate(&stream, 1));
        MUST(cuStreamCreate(&own, 1));
        /* The thread makes so few launches that the library has recorded no fence when the stream is destroyed. */
        launch(stream, 1 + round % 7);
        while (atomic_load(&handed))
            usleep(20);
        atomic_store(&handed, stream);
        launch(own, 3);
        MUST(cuStreamDestroy_v2(own));
    }
    while (atomic_load(&handed))
        usleep(20);
    atomic_store(&stop, 1);
    pthread_join(thread, NULL);
    MUST(cuCtxSynchronize());
}

static void *launcher(void *unused)
{
    CUstream stream;
    (void)unused;
    MUST(cuCtxSetCurrent(context));
    MUST(cuStreamCreate(&stream, 1));
    while (!atomic_load(&stop))
        launch(stream, 10);
    return NULL;
}

static void captures(void)
{
    CUstream stream;
    pthread_t thread;
    MUST(cuStreamCreate(&stream, 1));
    launch(stream, 100);
    pthread_create(&thread, NULL, launcher, NULL);
    for (int round = 0; round < 200; round++) {
        CUgraph graph;
        size_t nodes = 0;
        launch(stream, 3);
        MUST(cuStreamBeginCapture_v2(stream, 0));
        launch(stream, 100);
        usleep(300); /* In this pause the controller thread queries the fences. */
        MUST(cuStreamEndCapture(stream, &graph));
        MUST(cuGraphGetNodes(graph, NULL, &nodes));
        if (nodes != 100) {
            fprintf(stderr, "launch_life: a capture of 100 launches has %zu nodes\n", nodes);
            _exit(4);
        }
        MUST(cuGraphDestroy(graph));
    }
    atomic_store(&stop, 1);
    pthread_join(thread, NULL);
    MUST(cuCtxSynchronize());
}

static void forks(void)
{
    CUstream stream;
    MUST(cuStreamCreate(&stream, 1));
    for (int round = 0; round < 30; round++) {
        int status;
        launch(stream, 20);
        pid_t child = fork();
        if (child == 0) {
            /* The driver may return any error, but the child must not hang or crash. */
            CUresult result = cuLaunchKernel(function, 64, 1, 1, 64, 1, 1, 0, stream, NULL, NULL);
            _exit(result == 0 ? 9 : 0);
        }
        waitpid(child, &status, 0);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
            fprintf(stderr, "launch_life: a child ended with %#x\n", status);
            _exit(5);
        }
    }
    MUST(cuCtxSynchronize());
}

static pthread_t main_thread;
static atomic_int elsewhere, taken;

static void on_signal(int number)
{
    (void)number;
    atomic_fetch_add(&taken, 1);
    if (!pthread_equal(pthread_self(), main_thread))
        atomic_fetch_add(&elsewhere, 1);
}

static void signals(void)
{
    CUstream stream;
    main_thread = pthread_self();
    signal(SIGUSR1, on_signal);
    MUST(cuStreamCreate(&stream, 1));
    for (int round = 0; round < 200; round++) {
        launch(stream, 5);
        kill(getpid(), SIGUSR1);
    }
    if (atomic_load(&taken) == 0 || atomic_load(&elsewhere) != 0) {
        fprintf(stderr, "launch_life: %d signals were handled, %d by another thread\n", atomic_load(&taken), atomic_load(&elsewhere));
        _exit(6);
    }
    MUST(cuCtxSynchronize());
}

static void *launch_on(void *stream)
{
    CUresult status = CUDA_SUCCESS;
    MUST(cuCtxSetCurrent(context));
    for (int i = 0; i < 1000000 && status == CUDA_SUCCESS; i++)
        status = cuLaunchKernel(function, 64, 1, 1, 64, 1, 1, 0, stream, NULL, NULL);
    for (int i = 0; i < 1000; i++) /* The error is permanent, so each further call returns it at once. */
        if (status != (CUresult)214 || cuLaunchKernel(function, 64, 1, 1, 64, 1, 1, 0, stream, NULL, NULL) != status) {
            fprintf(stderr, "launch_life: a launch after an ECC error must return 214, the first returned %d\n", status);
            _exit(7);
        }
    return NULL;
}

static void broken(void)
{
    pthread_t thread;
    char command[600];
    snprintf(command, sizeof command, "LD_PRELOAD= %s ecc 0 1 >&2", getenv("GPUSIMCTL"));
    for (int round = 0; round < 3; round++) {
        CUstream stream[2];
        MUST(cuCtxCreate_v2(&context, 0, 0));
        load();
        MUST(cuStreamCreate(&stream[0], 1));
        MUST(cuStreamCreate(&stream[1], 1));
        launch(stream[0], 100);
        pthread_create(&thread, NULL, launch_on, stream[1]);
        launch(stream[0], 100);
        if (system(command) != 0)
            _exit(8);
        launch_on(stream[0]);
        pthread_join(thread, NULL);
        cuStreamDestroy_v2(stream[0]);
        cuCtxSynchronize();
        cuCtxDestroy_v2(context);
    }
    MUST(cuCtxCreate_v2(&context, 0, 0));
    load();
    launch(NULL, 300);
    MUST(cuCtxSynchronize());
}

static void *brief(void *unused)
{
    (void)unused;
    MUST(cuCtxSetCurrent(context));
    launch(NULL, 4);
    return NULL;
}

static void threads(void)
{
    launch(NULL, 100);
    MUST(cuCtxSynchronize());
    for (int round = 0; round < 200; round++) {
        pthread_t thread;
        pthread_create(&thread, NULL, brief, NULL);
        pthread_join(thread, NULL);
    }
    MUST(cuCtxSynchronize());
}

static void wait_for_stop(void *unused)
{
    (void)unused;
    while (!atomic_load(&stop))
        usleep(100);
}

static void behind(int streams)
{
    CUstream stream[8];
    for (int i = 0; i < streams; i++)
        MUST(cuStreamCreate(&stream[i], 1));
    for (int i = 0; i < 100; i++)
        launch(stream[i % streams], 1);
    MUST(cuCtxSynchronize());
    for (int i = 0; i < streams; i++)
        MUST(cuLaunchHostFunc(stream[i], wait_for_stop, NULL));
    for (int i = 0; i < 600; i++)
        launch(stream[i % streams], 1);
    atomic_store(&stop, 1);
    MUST(cuCtxSynchronize());
}

static void uneven(int streams)
{
    load_kernel("uneven");
    behind(streams);
}

static void popped(void)
{
    CUcontext other;
    CUfunction first = function;
    launch(NULL, 1);
    for (int round = 0; round < 2; round++) {
        MUST(cuCtxCreate_v2(&other, 0, 1));
        load();
        launch(NULL, 1);
        MUST(cuCtxDestroy_v2(other));
        function = first;
        launch(NULL, 400);
        MUST(cuCtxSynchronize());
    }
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "";
    alarm(100);
    MUST(cuInit(0));
    MUST(cuCtxCreate_v2(&context, 0, 0));
    load();
    if (strcmp(what, "contexts") == 0)
        contexts();
    else if (strcmp(what, "streams") == 0)
        streams();
    else if (strcmp(what, "captures") == 0)
        captures();
    else if (strcmp(what, "fork") == 0)
        forks();
    else if (strcmp(what, "signals") == 0)
        signals();
    else if (strcmp(what, "exit") == 0)
        launch(NULL, 200);
    else if (strcmp(what, "threads") == 0)
        threads();
    else if (strcmp(what, "behind") == 0)
        behind(1);
    else if (strcmp(what, "uneven") == 0)
        uneven(1);
    else if (strcmp(what, "spread") == 0)
        behind(8);
    else if (strcmp(what, "uneven-spread") == 0)
        uneven(8);
    else if (strcmp(what, "broken") == 0)
        broken();
    else if (strcmp(what, "popped") == 0)
        popped();
    else
        return 2;
    puts("ok");
    return 0;
}
