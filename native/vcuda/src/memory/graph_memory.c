/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Defines the hooks (replacements) of the functions for memory nodes of graphs. A memory node only reserves an address.
 * Memory of the card is allocated when the graph is instantiated, uploaded or launched. It comes from a reserve that
 * the driver keeps for graphs until cuDeviceGraphMemTrim is called.
 *
 * So the charge is the size of this process's reserve, as the driver reports it. This size is read before and after
 * every call that can increase it. The nodes of a graph show how much a launch can need at most. That amount is charged
 * before the call, and the unused part is uncharged after it. In a process without memory nodes these hooks cost only
 * one load.
 */
#include "memory.h"

#include "process.h"

#include <stdlib.h>
#include <string.h>

#define GRAPH_UNIT (2 * MIB) /* Physical memory is allocated in multiples of this size. */

/* Bytes that the memory nodes of an executable graph request, by the device's index in the ledger (the file with the
 * container's charges). */
struct need {
    uint64_t bytes[VGPU_MAX_DEVICES];
};

/* Memory that the driver keeps for the graphs of this process on a device. */
static struct reserve {
    struct lock lock;
    const struct device *device; /* NULL if no graph of this process has requested memory of this device. */
    CUdevice ordinal;
    uint64_t charged;
} reserves[VGPU_MAX_DEVICES];

/* Set when the program adds its first memory node, and never cleared. While it is false, the functions of this file do
 * nothing. */
static _Atomic bool used;

static uint64_t round_up(uint64_t bytes)
{
    return bytes > UINT64_MAX - GRAPH_UNIT ? UINT64_MAX : (bytes + GRAPH_UNIT - 1) / GRAPH_UNIT * GRAPH_UNIT;
}

static uint64_t add(uint64_t left, uint64_t right)
{
    return left > UINT64_MAX - right ? UINT64_MAX : left + right;
}

static uint64_t attribute(const struct reserve *reserve, int which, uint64_t otherwise)
{
    cuuint64_t value;
    if (!REAL_HAS(cuDeviceGetGraphMemAttribute) ||
        REAL(cuDeviceGetGraphMemAttribute)(reserve->ordinal, which, &value) != CUDA_SUCCESS)
        return otherwise;
    return value;
}

/* The caller of a function with a parameter `reserve` must hold the lock of that reserve. grow_begin is the exception,
 * because it takes the lock. */
static void settle_down(struct reserve *reserve)
{
    uint64_t held = attribute(reserve, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, reserve->charged);
    if (held < reserve->charged) {
        ledger_uncharge(reserve->device->ledger, ACCOUNT_USED, reserve->charged - held);
        reserve->charged = held;
    }
}

static void trim(struct reserve *reserve)
{
    if (REAL_HAS(cuDeviceGraphMemTrim))
        REAL(cuDeviceGraphMemTrim)(reserve->ordinal);
    settle_down(reserve);
}

void graph_memory_settle(bool trimmed)
{
    if (!atomic_load_explicit(&used, memory_order_relaxed))
        return;
    for (int i = 0; i < VGPU_MAX_DEVICES; i++) {
        struct reserve *reserve = &reserves[i];
        if (!lock_try(&reserve->lock))
            /* The thread that has the lock corrects the charge. Do not wait for the lock, because the holder may be
             * this thread. */
            continue;
        if (reserve->device && trimmed)
            trim(reserve);
        else if (reserve->device)
            settle_down(reserve);
        lock_drop(&reserve->lock);
    }
}

/* --- the memory that a graph requests ------------------------------------------------------------------- */

static CUresult count_nodes(CUgraph graph, struct need *need);

static CUresult count_node(CUgraphNode node, struct need *need)
{
    int type;
    CUDA_MEM_ALLOC_NODE_PARAMS memory;
    CUgraph child;
    CUresult status = REAL(cuGraphNodeGetType)(node, &type);
    if (status == CUDA_SUCCESS && type == CU_GRAPH_NODE_TYPE_GRAPH) {
        status = REAL(cuGraphChildGraphNodeGetGraph)(node, &child);
        return status == CUDA_SUCCESS ? count_nodes(child, need) : status;
    }
    if (status != CUDA_SUCCESS || type != CU_GRAPH_NODE_TYPE_MEM_ALLOC)
        return status;
    status = REAL(cuGraphMemAllocNodeGetParams)(node, &memory);
    CUdevice ordinal;
    if (status != CUDA_SUCCESS || !location_on_card(&memory.poolProps.location, &ordinal))
        return status;
    const struct device *device = device_of(ordinal, &status);
    if (!device)
        return status;
    struct reserve *reserve = &reserves[device->ledger];
    lock_take(&reserve->lock);
    reserve->device = device;
    reserve->ordinal = ordinal;
    lock_drop(&reserve->lock);
    need->bytes[device->ledger] = add(need->bytes[device->ledger], round_up(memory.bytesize));
    return CUDA_SUCCESS;
}

static CUresult count_nodes(CUgraph graph, struct need *need)
{
    size_t count = 0;
    CUresult status = REAL(cuGraphGetNodes)(graph, NULL, &count);
    if (status != CUDA_SUCCESS || count == 0)
        return status;
    CUgraphNode *nodes = calloc(count, sizeof *nodes);
    if (!nodes)
        return CUDA_ERROR_OUT_OF_MEMORY;
    status = REAL(cuGraphGetNodes)(graph, nodes, &count);
    for (size_t i = 0; i < count && status == CUDA_SUCCESS; i++)
        status = count_node(nodes[i], need);
    free(nodes);
    return status;
}

static bool nothing(const struct need *need)
{
    for (int i = 0; i < VGPU_MAX_DEVICES; i++)
        if (need->bytes[i])
            return false;
    return true;
}

/* --- charging around a call that may allocate ------------------------------------------------------------ */

/* Charges the most that the call can need on one device. If that succeeds, the reserve stays locked until grow_end. */
static CUresult grow_begin(struct reserve *reserve, uint64_t bytes)
{
    lock_take(&reserve->lock);
    settle_down(reserve);
    CUresult status = memory_charge(reserve->device, ACCOUNT_USED, bytes);
    for (int trimmed = 0; status == CUDA_ERROR_OUT_OF_MEMORY && trimmed < 2; trimmed++) {
        if (trimmed)
            trim(reserve);
        /* Part of the needed memory may come from the part of the reserve that no graph uses, so charge only what
         * exceeds the reserve. */
        uint64_t in_use = attribute(reserve, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT, reserve->charged);
        uint64_t needed = add(round_up(in_use), bytes);
        bytes = needed > reserve->charged ? needed - reserve->charged : 0;
        status = memory_charge(reserve->device, ACCOUNT_USED, bytes);
    }
    if (status == CUDA_SUCCESS)
        reserve->charged += bytes;
    else
        lock_drop(&reserve->lock);
    return status;
}

static uint64_t excess(const struct reserve *reserve)
{
    uint64_t held = attribute(reserve, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, reserve->charged);
    return held > reserve->charged ? held - reserve->charged : 0;
}

/* Returns false if the driver reserved more than was charged and the limit has no room for it. */
static bool grow_end(struct reserve *reserve)
{
    uint64_t more = excess(reserve);
    bool fits = !more || memory_charge(reserve->device, ACCOUNT_USED, more) == CUDA_SUCCESS;
    if (!fits) {
        /* Release what no launched graph uses. A launched graph cannot be undone, so the rest is charged even above the
         * limit, and the next allocation is refused. */
        trim(reserve);
        more = excess(reserve);
        ledger_charge(reserve->device->ledger, ACCOUNT_USED, more, UINT64_MAX);
    }
    reserve->charged += more;
    settle_down(reserve);
    lock_drop(&reserve->lock);
    return fits;
}

typedef CUresult (*growing)(void *data);

/* Calls the driver and charges the memory around the call. Sets *fits to false if the call succeeded but used more than
 * the limit has room for. */
static CUresult grow(const struct need *need, growing call, void *data, bool *fits)
{
    CUresult status = CUDA_SUCCESS;
    int reached = 0;
    /* Lock the reserves in the order of the devices' indices, so that two threads that need two devices cannot
     * deadlock. */
    for (; reached < VGPU_MAX_DEVICES && status == CUDA_SUCCESS; reached++)
        if (need->bytes[reached]) {
            flight_begin(reached);
            status = grow_begin(&reserves[reached], need->bytes[reached]);
            if (status != CUDA_SUCCESS) {
                flight_end(&reached);
                break;
            }
        }
    if (status == CUDA_SUCCESS)
        status = call(data);
    for (int i = reached - 1; i >= 0; i--)
        if (need->bytes[i]) {
            *fits = grow_end(&reserves[i]) && *fits;
            flight_end(&i);
        }
    return status;
}

/* --- instantiation ----------------------------------------------------------------------------------------- */

struct instantiation {
    CUgraphExec *exec;
    CUgraph graph;
    CUgraphNode *bad;
    char *log;
    size_t size;
    unsigned long long flags;
    CUDA_GRAPH_INSTANTIATE_PARAMS *parameters;
};

static CUresult instantiate(const struct instantiation *request, growing call)
{
    struct need *need = NULL;
    struct block block = {.kind = 1};
    CUresult status = CUDA_SUCCESS;
    bool fits = true;
    if (atomic_load_explicit(&used, memory_order_relaxed) && request->graph && request->exec) {
        need = calloc(1, sizeof *need);
        status = need ? count_nodes(request->graph, need) : CUDA_ERROR_OUT_OF_MEMORY;
        if (status == CUDA_SUCCESS && nothing(need)) {
            free(need);
            need = NULL;
        }
    }
    if (status == CUDA_SUCCESS)
        status = need ? grow(need, call, (void *)request, &fits) : call((void *)request);
    else if (request->parameters)
        request->parameters->result_out = CUDA_GRAPH_INSTANTIATE_ERROR;
    if (status == CUDA_SUCCESS && need) {
        block.key = (uintptr_t)*request->exec;
        block.owner = (uintptr_t)need;
        if (fits && block_put(&vgpu_graphs, &block))
            return status;
        /* The graph's memory does not fit, or the graph could not be recorded. Without a record a launch of it could
         * exceed the limit, so destroy the graph. */
        if (request->parameters)
            request->parameters->result_out = CUDA_GRAPH_INSTANTIATE_ERROR;
        REAL(cuGraphExecDestroy)(*request->exec);
        graph_memory_settle(false);
        status = CUDA_ERROR_OUT_OF_MEMORY;
    }
    free(need);
    return status;
}

#define INSTANTIATE(symbol, parameters, arguments, request, call_arguments) \
    static CUresult call_##symbol(void *data) \
    { \
        const struct instantiation *to = data; \
        return REAL(symbol) call_arguments; \
    } \
    EXPORT CUresult symbol parameters \
    { \
        ENTER(symbol, arguments); \
        (void)control; \
        struct instantiation with = request; \
        return instantiate(&with, call_##symbol); \
    }
#define REQUEST(...) {.exec = exec, .graph = graph, __VA_ARGS__}

#define OLD_PARAMETERS (CUgraphExec * exec, CUgraph graph, CUgraphNode *bad, char *log, size_t size)
INSTANTIATE(cuGraphInstantiate, OLD_PARAMETERS, (exec, graph, bad, log, size),
            REQUEST(.bad = bad, .log = log, .size = size), (to->exec, to->graph, to->bad, to->log, to->size))
INSTANTIATE(cuGraphInstantiate_v2, OLD_PARAMETERS, (exec, graph, bad, log, size),
            REQUEST(.bad = bad, .log = log, .size = size), (to->exec, to->graph, to->bad, to->log, to->size))
INSTANTIATE(cuGraphInstantiateWithFlags, (CUgraphExec * exec, CUgraph graph, unsigned long long flags), (exec, graph, flags),
            REQUEST(.flags = flags), (to->exec, to->graph, to->flags))
#define NEW_PARAMETERS (CUgraphExec * exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *parameters)
INSTANTIATE(cuGraphInstantiateWithParams, NEW_PARAMETERS, (exec, graph, parameters), REQUEST(.parameters = parameters),
            (to->exec, to->graph, to->parameters))
INSTANTIATE(cuGraphInstantiateWithParams_ptsz, NEW_PARAMETERS, (exec, graph, parameters), REQUEST(.parameters = parameters),
            (to->exec, to->graph, to->parameters))

/* --- launch and upload --------------------------------------------------------------------------------------- */

struct run {
    CUgraphExec exec;
    CUstream stream;
    CUresult (*call)(CUgraphExec exec, CUstream stream);
};

static CUresult run(void *data)
{
    const struct run *run = data;
    return run->call(run->exec, run->stream);
}

CUresult graph_memory_run(CUgraphExec exec, CUstream stream, CUresult (*call)(CUgraphExec exec, CUstream stream))
{
    struct block block;
    if (!atomic_load_explicit(&used, memory_order_relaxed) || !block_get(&vgpu_graphs, (uintptr_t)exec, &block))
        return call(exec, stream);
    struct run request = {exec, stream, call};
    bool fits = true;
    return grow((const struct need *)(uintptr_t)block.owner, run, &request, &fits);
}

#define RUN(symbol) \
    EXPORT CUresult symbol(CUgraphExec exec, CUstream stream) \
    { \
        ENTER(symbol, (exec, stream)); \
        (void)control; \
        return graph_memory_run(exec, stream, REAL(symbol)); \
    }

RUN(cuGraphUpload)
RUN(cuGraphUpload_ptsz)

/* --- destruction --------------------------------------------------------------------------------------------- */

EXPORT CUresult cuGraphExecDestroy(CUgraphExec exec)
{
    ENTER(cuGraphExecDestroy, (exec));
    (void)control;
    struct block block;
    bool ours = block_take(&vgpu_graphs, (uintptr_t)exec, &block);
    CUresult status = REAL(cuGraphExecDestroy)(exec);
    if (ours && status != CUDA_SUCCESS) {
        block_put(&vgpu_graphs, &block);
    } else if (ours) {
        free((struct need *)(uintptr_t)block.owner);
        graph_memory_settle(false);
    }
    return status;
}

EXPORT CUresult cuGraphDestroy(CUgraph graph)
{
    ENTER(cuGraphDestroy, (graph));
    (void)control;
    CUresult status = REAL(cuGraphDestroy)(graph);
    graph_memory_settle(false);
    return status;
}

EXPORT CUresult cuDeviceGraphMemTrim(CUdevice device)
{
    ENTER(cuDeviceGraphMemTrim, (device));
    (void)control;
    CUresult status = REAL(cuDeviceGraphMemTrim)(device);
    graph_memory_settle(false);
    return status;
}

/* --- nodes ---------------------------------------------------------------------------------------------------- */

static void mark_used(void)
{
    atomic_store_explicit(&used, true, memory_order_relaxed);
}

/* Returns true if the driver has the functions that are needed to determine a graph's memory. All drivers with memory
 * nodes (CUDA 11.4 or later) have them. */
static bool known(void)
{
    return REAL_HAS(cuDeviceGetGraphMemAttribute) && REAL_HAS(cuGraphGetNodes) && REAL_HAS(cuGraphNodeGetType) &&
           REAL_HAS(cuGraphMemAllocNodeGetParams) && REAL_HAS(cuGraphChildGraphNodeGetGraph) && REAL_HAS(cuGraphExecDestroy);
}

static CUresult admit(enum control control, const char *what)
{
    if (control == CONTROL_BROKEN)
        return memory_broken();
    if (!known())
        return memory_refuse(what);
    mark_used();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphAddMemAllocNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                                       CUDA_MEM_ALLOC_NODE_PARAMS *parameters)
{
    ENTER(cuGraphAddMemAllocNode, (node, graph, dependencies, count, parameters));
    CUresult status = admit(control, "cuGraphAddMemAllocNode");
    return status == CUDA_SUCCESS ? REAL(cuGraphAddMemAllocNode)(node, graph, dependencies, count, parameters) : status;
}

/* The structure CUgraphNodeParams begins with the type of the node, an int. */
EXPORT CUresult cuGraphAddNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count, void *parameters)
{
    ENTER(cuGraphAddNode, (node, graph, dependencies, count, parameters));
    CUresult status = CUDA_SUCCESS;
    if (parameters && *(const int *)parameters == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
        status = admit(control, "cuGraphAddNode with a memory node");
    return status == CUDA_SUCCESS ? REAL(cuGraphAddNode)(node, graph, dependencies, count, parameters) : status;
}

#define ADD_NODE(symbol) \
    EXPORT CUresult symbol(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, const void *edges, size_t count, \
                           void *parameters) \
    { \
        ENTER(symbol, (node, graph, dependencies, edges, count, parameters)); \
        CUresult status = CUDA_SUCCESS; \
        if (parameters && *(const int *)parameters == CU_GRAPH_NODE_TYPE_MEM_ALLOC) \
            status = admit(control, #symbol " with a memory node"); \
        return status == CUDA_SUCCESS ? REAL(symbol)(node, graph, dependencies, edges, count, parameters) : status; \
    }

ADD_NODE(cuGraphAddNode_v2)
ADD_NODE(cuGraphAddNode_v3)

CUresult graph_memory_captured(enum control control)
{
    return admit(control, "stream-ordered allocation in a stream capture");
}

void graph_memory_reset(void)
{
    memset(reserves, 0, sizeof reserves);
    atomic_store(&used, false);
}
