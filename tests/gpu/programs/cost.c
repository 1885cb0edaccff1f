/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cost ROUNDS
 *
 * Measures what a call costs more with a preloaded library: in alternating bursts it times a call resolved by dlsym, as
 * programs do, and the driver's own function from the driver's symbol table. Without a preloaded library both are the
 * same function. Ends with one line of JSON. For each call it has three medians over all bursts, in nanoseconds: of the
 * driver's function, of the call by dlsym, and of their difference.
 */
#include "gpu.h"

void *bare_symbol(const char *name); /* bare.c */

/* A burst of launches: long enough that the start after a pause does not matter, too short to fill the queue. */
enum { LAUNCHES = 512, BURST = 64 };

static CUfunction empty;
static CUstream stream;
static CUevent event;

struct call {
    const char *name, *symbol;
    void (*burst)(void *function);
    int calls;
};

typedef CUresult (*launch_type)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream,
                                void **, void **);

static void launch(void *function)
{
    for (int i = 0; i < LAUNCHES; i++)
        ((launch_type)function)(empty, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL);
}

static void info(void *function)
{
    size_t free_bytes, total;
    for (int i = 0; i < BURST; i++)
        ((CUresult(*)(size_t *, size_t *))function)(&free_bytes, &total);
}

static void record(void *function)
{
    for (int i = 0; i < BURST; i++)
        ((CUresult(*)(CUevent, CUstream))function)(event, stream);
}

static void query(void *function)
{
    for (int i = 0; i < BURST; i++)
        ((CUresult(*)(CUevent))function)(event);
}

static const struct call calls[] = {
    {"launch", "cuLaunchKernel", launch, LAUNCHES},
    {"mem_get_info", "cuMemGetInfo_v2", info, BURST},
    {"event_record", "cuEventRecord", record, BURST},
    {"event_query", "cuEventQuery", query, BURST},
};

static int ascending(const void *left, const void *right)
{
    double a = *(const double *)left, b = *(const double *)right;
    return a < b ? -1 : a > b;
}

static double middle(double *values, unsigned count)
{
    qsort(values, count, sizeof *values, ascending);
    return values[count / 2];
}

static double timed(const struct call *call, void *function)
{
    uint64_t began = now_ns();
    call->burst(function);
    double each = (double)(now_ns() - began) / call->calls;
    cu.cuStreamSynchronize(stream);
    return each;
}

/* Measures allocation and free as a pair, because both must be the library's or both the driver's. */
static double pair(void *get, void *drop, size_t bytes)
{
    CUdeviceptr pointer;
    uint64_t began = now_ns();
    for (int i = 0; i < BURST / 8; i++)
        if (((CUresult(*)(CUdeviceptr *, size_t))get)(&pointer, bytes) == CUDA_SUCCESS)
            ((CUresult(*)(CUdeviceptr))drop)(pointer);
    return (double)(now_ns() - began) / (BURST / 8);
}

int main(int argc, char **argv)
{
    unsigned rounds = argc > 1 ? (unsigned)atoi(argv[1]) : 200;
    double *bare = calloc(rounds, sizeof *bare), *called = calloc(rounds, sizeof *called), *more = calloc(rounds, sizeof *more);
    CUcontext context;
    CUmodule module;
    void *library = gpu_library();
    gpu_open();
    if (!bare || !called || !more || !bare_symbol("cuInit"))
        gpu_fail("the driver's own symbols cannot be read", 0);
    MUST(CALL(cuInit, 0));
    MUST(CALL(cuDevicePrimaryCtxRetain, &context, 0));
    MUST(CALL(cuCtxSetCurrent, context));
    MUST(gpu_module(&module, 1, NULL));
    MUST(CALL(cuModuleGetFunction, &empty, module, "vgpu_empty"));
    MUST(CALL(cuStreamCreate, &stream, 1));
    MUST(CALL(cuEventCreate, &event, 0));
    MUST(CALL(cuEventRecord, event, stream));
    MUST(CALL(cuStreamSynchronize, stream));
    printf("{\"calls\": [");
    for (size_t c = 0; c < sizeof calls / sizeof *calls; c++) {
        void *own = bare_symbol(calls[c].symbol), *ours = dlsym(library, calls[c].symbol);
        if (!own || !ours)
            continue;
        timed(&calls[c], own);
        timed(&calls[c], ours);
        for (unsigned i = 0; i < rounds; i++) {
            bare[i] = timed(&calls[c], own);
            called[i] = timed(&calls[c], ours);
            more[i] = called[i] - bare[i];
        }
        printf("%s{\"name\": \"%s\", \"replaced\": %s, \"bare_ns\": %.1f, \"called_ns\": %.1f, \"more_ns\": %.1f}", c ? ", " : "",
               calls[c].name, own == ours ? "false" : "true", middle(bare, rounds), middle(called, rounds),
               middle(more, rounds));
    }
    const size_t sizes[] = {4096, 1 << 20, 8 << 20};
    void *own_get = bare_symbol("cuMemAlloc_v2"), *own_drop = bare_symbol("cuMemFree_v2");
    for (size_t s = 0; own_get && own_drop && s < sizeof sizes / sizeof *sizes; s++) {
        pair((void *)cu.cuMemAlloc_v2, (void *)cu.cuMemFree_v2, sizes[s]);
        for (unsigned i = 0; i < rounds; i++) {
            bare[i] = pair(own_get, own_drop, sizes[s]);
            called[i] = pair((void *)cu.cuMemAlloc_v2, (void *)cu.cuMemFree_v2, sizes[s]);
            more[i] = called[i] - bare[i];
        }
        printf(", {\"name\": \"alloc_free_%zu\", \"replaced\": %s, \"bare_ns\": %.1f, \"called_ns\": %.1f, \"more_ns\": %.1f}",
               sizes[s], own_get == (void *)cu.cuMemAlloc_v2 ? "false" : "true", middle(bare, rounds), middle(called, rounds),
               middle(more, rounds));
    }
    printf("]}\n");
    return 0;
}
