/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tests a slice's memory limit with every function that allocates memory. Each way to allocate (see `ways`) fills the
 * slice in its own process. The result is NVML's figure for that process. If NVML gives none, or less than was granted,
 * the result is the granted memory plus the memory that was not free at the start. Inside a slice NVML shows the
 * library's figure; only an observer outside sees the driver's figure (see --hold in main.c).
 *
 * No way may get more than the limit. Each way must also reach the limit, except for less than one of its pieces: a way
 * that is charged too much, or refused while there is room, fails.
 */
#include "probe.h"

#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "loader.h"

#define POOL_PIECE (64 * MIB) /* A driver's pool, and its reserve for graphs, may grow in steps of up to 32 MiB. */

struct way {
    const char *name;
    /* Allocates one piece of about `bytes`. Returns the number of bytes that it takes from the slice; 0 if it was
     * refused. */
    uint64_t (*take)(uint64_t bytes);
    uint64_t smallest; /* Smallest piece in bytes; 0 means the granularity of cuMemCreate. */
};

/* These functions are looked up at run time. A way is skipped if the driver does not have its functions. */
#define FUNCTIONS(F) \
    F(alloc_async, cuMemAllocAsync, (CUdeviceptr *pointer, size_t bytes, CUstream stream)) \
    F(alloc_pool, cuMemAllocFromPoolAsync, (CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream)) \
    F(pool_create, cuMemPoolCreate, (CUmemoryPool *pool, const CUmemPoolProps *properties)) \
    F(managed, cuMemAllocManaged, (CUdeviceptr *pointer, size_t bytes, unsigned flags)) \
    F(pitch, cuMemAllocPitch_v2, (CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height, unsigned element)) \
    F(create, cuMemCreate, (CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties, \
                            unsigned long long flags)) \
    F(granularity, cuMemGetAllocationGranularity, (size_t *bytes, const CUmemAllocationProp *properties, int option)) \
    F(array, cuArrayCreate_v2, (CUarray *array, const CUDA_ARRAY_DESCRIPTOR *description)) \
    F(graph, cuGraphCreate, (CUgraph *graph, unsigned flags)) \
    F(node, cuGraphAddMemAllocNode, (CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count, \
                                     CUDA_MEM_ALLOC_NODE_PARAMS *parameters)) \
    F(stream, cuStreamCreate, (CUstream *stream, unsigned flags)) \
    F(capture, cuStreamBeginCapture_v2, (CUstream stream, int mode)) \
    F(captured, cuStreamEndCapture, (CUstream stream, CUgraph *graph)) \
    F(instantiate, cuGraphInstantiateWithFlags, (CUgraphExec *exec, CUgraph graph, unsigned long long flags)) \
    F(launch, cuGraphLaunch, (CUgraphExec exec, CUstream stream)) \
    F(forget_exec, cuGraphExecDestroy, (CUgraphExec exec)) \
    F(forget, cuGraphDestroy, (CUgraph graph)) \
    F(wait, cuCtxSynchronize, (void))
static struct {
    FUNCTIONS(FIELD)
} call;
static CUdevice device;
static CUmemoryPool pool;
/* Error of the last refused piece. NOT_FOUND means that this driver lacks functions that the way needs. */
static CUresult refusal;

static uint64_t got(CUresult status, uint64_t bytes)
{
    if (status == CUDA_SUCCESS)
        return bytes;
    refusal = status;
    return 0;
}

static uint64_t by_async(uint64_t bytes)
{
    CUdeviceptr pointer;
    return got(call.alloc_async ? call.alloc_async(&pointer, bytes, NULL) : CUDA_ERROR_NOT_FOUND, bytes);
}

static uint64_t by_pool(uint64_t bytes)
{
    CUmemPoolProps properties = {.allocType = 1, .location = {CU_MEM_LOCATION_TYPE_DEVICE, device}};
    CUdeviceptr pointer;
    if (!call.alloc_pool || !call.pool_create)
        return got(CUDA_ERROR_NOT_FOUND, 0);
    CUresult status = pool ? CUDA_SUCCESS : call.pool_create(&pool, &properties);
    return got(status == CUDA_SUCCESS ? call.alloc_pool(&pointer, bytes, pool, NULL) : status, bytes);
}

static uint64_t by_managed(uint64_t bytes)
{
    CUdeviceptr pointer;
    return got(call.managed ? call.managed(&pointer, bytes, 1) : CUDA_ERROR_NOT_FOUND, bytes);
}

static uint64_t by_pitch(uint64_t bytes)
{
    CUdeviceptr pointer;
    size_t pitch = 0, rows = bytes / 4096;
    CUresult status = call.pitch ? call.pitch(&pointer, &pitch, 4000, rows, 4) : CUDA_ERROR_NOT_FOUND;
    return got(status, pitch * rows);
}

static const CUmemAllocationProp *pinned(void)
{
    static CUmemAllocationProp properties;
    properties = (CUmemAllocationProp){.type = 1, .location = {CU_MEM_LOCATION_TYPE_DEVICE, device}};
    return &properties;
}

static uint64_t granule(void)
{
    size_t bytes = 0;
    return call.granularity && call.granularity(&bytes, pinned(), 0) == CUDA_SUCCESS ? bytes : 2 * MIB;
}

static uint64_t by_vmm(uint64_t bytes)
{
    CUmemGenericAllocationHandle handle;
    bytes = bytes / granule() * granule();
    return got(call.create ? call.create(&handle, bytes, pinned(), 0) : CUDA_ERROR_NOT_FOUND, bytes);
}

static uint64_t by_array(uint64_t bytes)
{
    CUDA_ARRAY_DESCRIPTOR description = {.Width = 16384, .Height = bytes / 65536, .Format = 0x20, .NumChannels = 1};
    CUarray array;
    if (description.Height > 32768)
        description.Height = 32768;
    return got(call.array ? call.array(&array, &description) : CUDA_ERROR_NOT_FOUND, description.Height * 65536);
}

/* Launches a graph. The graph's memory is allocated when it is instantiated or launched, and stays allocated. */
static CUresult run_graph(CUgraph graph)
{
    CUgraphExec exec;
    CUresult status = call.instantiate(&exec, graph, 0);
    if (status == CUDA_SUCCESS) {
        status = call.launch(exec, NULL);
        if (status == CUDA_SUCCESS)
            status = call.wait();
        if (status != CUDA_SUCCESS)
            call.forget_exec(exec);
    }
    if (status != CUDA_SUCCESS)
        call.forget(graph);
    return status;
}

static bool has_graphs(void)
{
    return call.graph && call.node && call.instantiate && call.launch && call.forget_exec && call.forget && call.wait;
}

static uint64_t by_graph(uint64_t bytes)
{
    CUDA_MEM_ALLOC_NODE_PARAMS parameters = {
        .poolProps = {.allocType = 1, .location = {CU_MEM_LOCATION_TYPE_DEVICE, device}}, .bytesize = bytes};
    CUgraph graph;
    CUgraphNode node;
    CUresult status = has_graphs() ? call.graph(&graph, 0) : CUDA_ERROR_NOT_FOUND;
    if (status != CUDA_SUCCESS)
        return got(status, 0);
    status = call.node(&node, graph, NULL, 0, &parameters);
    if (status == CUDA_SUCCESS)
        return got(run_graph(graph), bytes);
    call.forget(graph);
    return got(status, 0);
}

static uint64_t by_capture(uint64_t bytes)
{
    static CUstream stream;
    CUdeviceptr pointer;
    CUgraph graph = NULL;
    if (!has_graphs() || !call.stream || !call.capture || !call.captured || !call.alloc_async)
        return got(CUDA_ERROR_NOT_FOUND, 0);
    CUresult status = stream ? CUDA_SUCCESS : call.stream(&stream, 1);
    if (status == CUDA_SUCCESS)
        status = call.capture(stream, CU_STREAM_CAPTURE_MODE_RELAXED);
    if (status != CUDA_SUCCESS)
        return got(status, 0);
    status = call.alloc_async(&pointer, bytes, stream);
    CUresult ended = call.captured(stream, &graph);
    if (status == CUDA_SUCCESS && ended == CUDA_SUCCESS)
        return got(run_graph(graph), bytes);
    if (graph)
        call.forget(graph);
    return got(status != CUDA_SUCCESS ? status : ended, 0);
}

static const struct way ways[] = {
    {"cuMemAllocManaged", by_managed, 1},
    {"cuMemAllocPitch", by_pitch, 4096 * 2},
    {"cuMemAllocAsync", by_async, POOL_PIECE},
    {"a pool of its own", by_pool, POOL_PIECE},
    {"cuMemCreate", by_vmm, 0},
    {"cuArrayCreate", by_array, 65536 * 64},
    {"a graph's node", by_graph, POOL_PIECE},
    {"a capture", by_capture, POOL_PIECE},
};
#define WAYS (sizeof ways / sizeof *ways)

static void look_up(void)
{
    FUNCTIONS(LOOK_UP)
}

/* Fills the slice by one way to allocate. Runs in its own process. */
static void fill_by(const struct fill *fill, const struct way *way)
{
    struct board *board = fill->board;
    struct result *result = &board->result;
    struct nvml_figures figures;
    char reason[200];
    CUcontext context;
    size_t at_first = 0, left = 0, total = 0;
    const struct cuda *cuda = cuda_open(reason, sizeof reason);
    CUresult status = cuda ? cuda->ctx_create(&context, 0, fill->device) : CUDA_ERROR_NO_DEVICE;
    if (status == CUDA_SUCCESS)
        status = cuda->mem_info(&at_first, &total);
    if (status != CUDA_SUCCESS) {
        result_set(result, VIOLATED, fill->limit, 0, "bytes", "%s: no context can be created: the driver returns %d", fill->uuid, status);
        return;
    }
    device = fill->device;
    look_up();
    uint64_t granted = 0, smallest = way->smallest ? way->smallest : granule();
    for (uint64_t piece = at_first; piece >= smallest; piece /= 2)
        for (uint64_t taken; (taken = way->take(piece)) != 0 && granted <= fill->limit + piece;)
            granted += taken;
    cuda->mem_info(&left, &total);
    if (nvml_figures(fill->uuid, &figures) && figures.total - figures.used > left)
        /* cuMemGetInfo shows at most the card's free bytes; the slice's free bytes follow from NVML's figures. */
        left = figures.total - figures.used;
    /* A way that got nothing is skipped, unless it was refused for lack of memory although there was room for a
     * piece. */
    if (granted == 0 && (refusal != CUDA_ERROR_OUT_OF_MEMORY || at_first < smallest)) {
        result_set(result, PASSED, fill->limit, 0, "bytes", "no %s", way->name);
        return;
    }
    bool nvml = contexts_count(fill) && nvml_figures(fill->uuid, &figures) && figures.own >= granted;
    uint64_t found = nvml ? figures.own : granted + (contexts_count(fill) && total > at_first ? total - at_first : 0);
    bool near = found + 2 * smallest > fill->limit;
    if (!near && left > 2 * smallest)
        board->card_full = 1; /* The slice still has room, so the refusal means that the card is full. */
    result_set(result, found <= fill->limit && near ? PASSED : VIOLATED, fill->limit, found, "bytes",
               "%s: %s filled the slice to %llu bytes, context included%s", fill->uuid, way->name, (unsigned long long)found,
               nvml ? ", as NVML shows it" : "");
}

static void measure_ways(const struct fill *fill)
{
    struct result *result = &fill->board->result;
    char tried[160] = "";
    uint64_t most = 0;
    for (size_t i = 0; i < WAYS; i++) {
        /* The driver can hang if a program requests more unified memory than the card has while other containers fill
         * the card. So cuMemAllocManaged is skipped with oversubscription. */
        if (ways[i].take == by_managed && (fill->slice->flags & VGPU_LIMITS_OVERSUBSCRIBE))
            continue;
        result_set(result, VIOLATED, fill->limit, 0, "bytes", "%s: the process that filled the slice by %s was killed", fill->uuid,
                   ways[i].name);
        pid_t child = fork();
        if (child == 0) {
            fill_by(fill, &ways[i]);
            _exit(0);
        }
        waitpid(child, NULL, 0);
        if (result->verdict != PASSED)
            return;
        size_t length = strlen(tried);
        if (result->found) /* Name the way only if this driver has its functions. */
            snprintf(tried + length, sizeof tried - length, "%s%s", length ? ", " : "", ways[i].name);
        most = result->found > most ? result->found : most;
    }
    result_set(result, most ? PASSED : NOT_RUN, fill->limit, most, "bytes",
               "%s: ways that filled the slice to its limit and not beyond: %s",
               fill->uuid, most ? tried : "none, because the driver has none of the functions");
}

void check_every_allocator(const struct slice *slice, struct board *board)
{
    on_every_device(slice, board, measure_ways);
}
