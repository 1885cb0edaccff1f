/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Makes driver calls that block, and driver calls during which the driver calls a tool. A tool is a profiler or the
 * like, which the driver calls back and which then makes its own driver calls. Usage: blocked MODE. Each mode prints
 * the results of its calls, waits until standard input closes, and exits without cleanup.
 *
 *   free      one thread frees memory and waits for an endless kernel; meanwhile others allocate and load a module
 *   held      one thread launches a graph that allocates, and waits for a long kernel; meanwhile another loads code until
 *             the library refuses it
 *   slow      one thread loads code for seconds; meanwhile another creates a context, allocates and loads code
 *   load      the driver calls a tool back while it loads a module; the tool loads its own module
 *   library   the driver calls the tool back while it loads a library onto the GPU
 *   create    the driver calls the tool back while it creates a context; the tool retains and uses the primary context
 *   second    the driver calls the tool back while it creates a context; the tool creates and destroys a context
 *
 * The callback is a function of this program with the name pthread_mutex_init. The simulated driver calls it instead of
 * libc's function of this name, at moments at which the driver holds no lock.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "driver/cuda_abi.h"

CUresult cuInit(unsigned flags);
CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device);
CUresult cuCtxDestroy_v2(CUcontext context);
CUresult cuCtxSetCurrent(CUcontext context);
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes);
CUresult cuMemFree_v2(CUdeviceptr pointer);
CUresult cuModuleLoadData(CUmodule *module, const void *image);
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name);
CUresult cuLibraryLoadData(CUlibrary *library, const void *image, int *a, void **b, unsigned c, int *d, void **e, unsigned f);
CUresult cuLibraryGetModule(CUmodule *module, CUlibrary library);
CUresult cuStreamCreate(CUstream *stream, unsigned flags);
CUresult cuGraphCreate(CUgraph *graph, unsigned flags);
CUresult cuGraphAddMemAllocNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count,
                                CUDA_MEM_ALLOC_NODE_PARAMS *parameters);
CUresult cuGraphAddKernelNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count, const void *parameters);
CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags);
CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream);
CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, CUstream stream, void **parameters, void **extra);

/* Lines with .gpusim are for the simulated driver. The kernel `forever` never ends, `load` is the time of a load in ms,
 * and `bytes` is the memory of the code. */
static const char image[] = ".version 7.0\n.target sm_50\n.address_size 64\n// .gpusim kernel forever inf\n"
                            "// .gpusim bytes 3145728\n";

/* The kernel `long` takes four seconds, longer than the loads during it. */
static const char large_image[] = ".version 7.0\n.target sm_50\n.address_size 64\n// .gpusim kernel long 4000000\n// .gpusim kernel short 1\n"
                                  "// .gpusim bytes 536870912\n";

static const char slow_image[] = ".version 7.0\n.target sm_50\n.address_size 64\n// .gpusim load 4000\n// .gpusim bytes 3145728\n";

static CUcontext context;
static int nested = -1;
static void (*called_back)(void);

static void call_back(void)
{
    void (*tool)(void) = called_back;
    called_back = NULL;
    if (tool)
        tool();
}

char *strdup(const char *text)
{
    size_t size = strlen(text) + 1;
    char *copy = malloc(size);
    call_back();
    return copy ? memcpy(copy, text, size) : NULL;
}

int pthread_mutex_init(pthread_mutex_t *mutex, const pthread_mutexattr_t *attributes)
{
    static const pthread_mutex_t plain = PTHREAD_MUTEX_INITIALIZER;
    /* The attributes are ignored, because the simulated driver passes only default attributes here. */
    (void)attributes;
    *mutex = plain;
    call_back();
    return 0;
}

static void loads(void)
{
    CUmodule module;
    nested = cuModuleLoadData(&module, image);
}

static void retains(void)
{
    CUcontext primary;
    CUdeviceptr pointer;
    nested = cuDevicePrimaryCtxRetain(&primary, 0);
    if (nested == 0 && (nested = cuCtxSetCurrent(primary)) == 0)
        nested = cuMemAlloc_v2(&pointer, 1 << 20);
}

static void makes(void)
{
    CUcontext other;
    nested = cuCtxCreate_v2(&other, 0, 0);
    if (nested == 0)
        nested = cuCtxDestroy_v2(other);
}

static void *frees(void *pointer)
{
    cuCtxSetCurrent(context);
    cuMemFree_v2(*(CUdeviceptr *)pointer);
    puts("the kernel has ended");
    return NULL;
}

static void *allocates(void *status)
{
    CUdeviceptr pointer;
    cuCtxSetCurrent(context);
    *(int *)status = cuMemAlloc_v2(&pointer, 1 << 20);
    return NULL;
}

static int behind_a_kernel(int *allocated)
{
    CUmodule module;
    CUfunction function;
    CUdeviceptr pointer;
    pthread_t freeing, allocating;
    if (cuModuleLoadData(&module, image) || cuModuleGetFunction(&function, module, "forever") ||
        cuMemAlloc_v2(&pointer, 1 << 20) || cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL))
        return -1;
    pthread_create(&freeing, NULL, frees, &pointer);
    usleep(100000);
    pthread_create(&allocating, NULL, allocates, allocated);
    int loaded = cuModuleLoadData(&module, image);
    pthread_join(allocating, NULL);
    return loaded;
}

struct kernel_node {
    CUfunction function;
    unsigned shape[7];
    void **parameters, **extra;
};

/* More kernels than the driver's queue has room for. */
#define MANY 1100

static void *launches(void *data)
{
    CUmodule module = data;
    CUfunction long_one;
    CUstream stream;
    CUgraph graph;
    CUgraphNode node;
    CUgraphExec exec;
    struct kernel_node kernel = {.shape = {1, 1, 1, 1, 1, 1}};
    CUDA_MEM_ALLOC_NODE_PARAMS memory = {.poolProps = {.allocType = 1, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}},
                                         .bytesize = 2 << 20};
    if (cuCtxSetCurrent(context) || cuModuleGetFunction(&long_one, module, "long") ||
        cuModuleGetFunction(&kernel.function, module, "short") || cuStreamCreate(&stream, 1) || cuGraphCreate(&graph, 0) ||
        cuGraphAddMemAllocNode(&node, graph, NULL, 0, &memory))
        exit(3);
    for (int i = 0; i < MANY; i++)
        if (cuGraphAddKernelNode(&node, graph, &node, 1, &kernel))
            exit(3);
    if (cuGraphInstantiateWithFlags(&exec, graph, 0) || cuLaunchKernel(long_one, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL))
        exit(3);
    cuGraphLaunch(exec, stream);
    return NULL;
}

/* Returns the result of the last of a dozen loads, or of the first that fails. */
static int beside_a_launch(void)
{
    CUmodule module;
    pthread_t launching;
    int status = 0;
    if (cuModuleLoadData(&module, large_image))
        return -1;
    pthread_create(&launching, NULL, launches, module);
    pthread_detach(launching);
    usleep(500000);
    for (int i = 0; i < 11 && status == 0; i++)
        status = cuModuleLoadData(&module, large_image);
    return status;
}

static _Atomic int loaded;

static void *loads_slowly(void *status)
{
    CUmodule module;
    cuCtxSetCurrent(context);
    *(int *)status = cuModuleLoadData(&module, slow_image);
    atomic_store(&loaded, 1);
    return NULL;
}

static int beside_a_load(int *status)
{
    CUcontext other;
    CUmodule module;
    CUdeviceptr pointer;
    pthread_t loading;
    pthread_create(&loading, NULL, loads_slowly, status);
    usleep(200000);
    int done = cuCtxCreate_v2(&other, 0, 0);
    if (done == 0 && (done = cuMemAlloc_v2(&pointer, 1 << 20)) == 0)
        done = cuModuleLoadData(&module, image);
    if (atomic_load(&loaded))
        done = -1; /* The call waited until the other thread's load had ended. */
    pthread_join(loading, NULL);
    return done;
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "";
    CUmodule module;
    CUlibrary library;
    CUdeviceptr pointer;
    int status = cuInit(0);
    if (status == 0 && strcmp(what, "create") && strcmp(what, "second"))
        status = cuCtxCreate_v2(&context, 0, 0);
    if (status) {
        return 2;
    } else if (strcmp(what, "free") == 0) {
        status = behind_a_kernel(&nested);
    } else if (strcmp(what, "held") == 0) {
        status = beside_a_launch();
        nested = 0;
    } else if (strcmp(what, "slow") == 0) {
        status = beside_a_load(&nested);
    } else if (strcmp(what, "load") == 0) {
        called_back = loads;
        status = cuModuleLoadData(&module, image);
    } else if (strcmp(what, "library") == 0) {
        status = cuLibraryLoadData(&library, image, NULL, NULL, 0, NULL, NULL, 0);
        called_back = loads;
        if (status == 0)
            status = cuLibraryGetModule(&module, library);
    } else {
        called_back = strcmp(what, "create") ? makes : retains;
        status = cuCtxCreate_v2(&context, 0, 0);
    }
    /* The library charges memory that it could not measure during the callback at the next allocation. */
    int later = cuMemAlloc_v2(&pointer, 200 << 20);
    printf("%d %d %d\n", status, nested, later);
    fflush(stdout);
    while (getchar() != EOF)
        ;
    _exit(0);
}
