/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Implements executable graphs. A launch runs the nodes one after another in the stream, in an order that respects the
 * edges. Concurrent branches, as on hardware, would not change the context's share of the GPU.
 */
#include "graph.h"

#include <stdlib.h>

#define FLAG_AUTO_FREE 1u

struct CUgraphExec_st {
    uint32_t magic;
    /* The executable graph's copy of the graph. */
    CUgraph graph;
    /* Nodes of that copy in order of execution. */
    CUgraphNode *order;
    bool *disabled;
    uint64_t flags;
};

static bool valid(CUgraphExec exec)
{
    return exec && exec->magic == EXEC_MAGIC;
}

static CUresult commit_memory(CUgraph graph)
{
    for (CUgraphNode node = graph->first; node; node = node->next) {
        CUresult result = node->op.kind == OP_ALLOC ? graph_memory_commit(node->op.as.memory.pointer) : CUDA_SUCCESS;
        if (result != CUDA_SUCCESS)
            return result;
    }
    return CUDA_SUCCESS;
}

static void exec_free(CUgraphExec exec)
{
    if (exec->graph)
        graph_free(exec->graph);
    free(exec->order);
    free(exec->disabled);
    exec->magic = 0;
    free(exec);
}

static CUresult instantiate(CUgraphExec *out, CUgraph graph, uint64_t flags)
{
    ENTER();
    REQUIRE(out && graph && graph->magic == GRAPH_MAGIC && flags <= 15, CUDA_ERROR_INVALID_VALUE);
    CUgraphExec exec = calloc(1, sizeof *exec);
    REQUIRE(exec, CUDA_ERROR_OUT_OF_MEMORY);
    exec->magic = EXEC_MAGIC;
    exec->flags = flags;
    CUresult result = graph_clone(graph, &exec->graph);
    if (result == CUDA_SUCCESS) {
        exec->order = graph_order(exec->graph);
        exec->disabled = calloc(graph->count + 1, sizeof *exec->disabled);
        result = exec->order && exec->disabled ? commit_memory(exec->graph) : CUDA_ERROR_INVALID_VALUE;
    }
    if (result != CUDA_SUCCESS) {
        exec_free(exec);
        return result;
    }
    *out = exec;
    return CUDA_SUCCESS;
}

#define INSTANTIATE_OLD(name)                                                                           \
    EXPORT CUresult name(CUgraphExec *exec, CUgraph graph, CUgraphNode *bad, char *log, size_t size)    \
    {                                                                                                   \
        if (bad)                                                                                        \
            *bad = NULL;                                                                                \
        if (log && size)                                                                                \
            *log = 0;                                                                                   \
        return instantiate(exec, graph, 0);                                                             \
    }
INSTANTIATE_OLD(cuGraphInstantiate)
INSTANTIATE_OLD(cuGraphInstantiate_v2)

EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags)
{
    return instantiate(exec, graph, flags);
}

struct instantiate_params {
    uint64_t flags;
    CUstream upload;
    CUgraphNode bad;
    int result;
};

static CUresult with_params(CUgraphExec *exec, CUgraph graph, struct instantiate_params *p)
{
    REQUIRE(p, CUDA_ERROR_INVALID_VALUE);
    CUresult result = instantiate(exec, graph, p->flags);
    p->bad = NULL;
    p->result = result == CUDA_SUCCESS ? 0 : 1;
    return result;
}

EXPORT CUresult cuGraphInstantiateWithParams(CUgraphExec *exec, CUgraph graph, struct instantiate_params *p)
{
    return with_params(exec, graph, p);
}

EXPORT CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec *exec, CUgraph graph, struct instantiate_params *p)
{
    return with_params(exec, graph, p);
}

EXPORT CUresult cuGraphExecDestroy(CUgraphExec exec)
{
    ENTER();
    REQUIRE(valid(exec), CUDA_ERROR_INVALID_VALUE);
    exec_free(exec);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphExecGetFlags(CUgraphExec exec, uint64_t *flags)
{
    ENTER();
    REQUIRE(valid(exec) && flags, CUDA_ERROR_INVALID_VALUE);
    *flags = exec->flags;
    return CUDA_SUCCESS;
}

/* ---- launching ------------------------------------------------------------------------------------------------------------- */

static CUresult run_all(CUgraph graph, CUgraphNode *order, const bool *disabled, CUstream stream);

static CUresult run_node(const struct op *op, CUstream stream)
{
    switch (op->kind) {
    case OP_ALLOC: return graph_memory_use(op->as.memory.pointer);
    case OP_FREE: return memory_free(op->as.memory.pointer);
    case OP_CHILD: {
        CUgraphNode *order = graph_order(op->as.child);
        REQUIRE(order, CUDA_ERROR_INVALID_VALUE);
        CUresult result = run_all(op->as.child, order, NULL, stream);
        free(order);
        return result;
    }
    default: return op_run(stream, op);
    }
}

static CUresult run_all(CUgraph graph, CUgraphNode *order, const bool *disabled, CUstream stream)
{
    for (size_t i = 0; i < graph->count; i++) {
        CUresult result = disabled && disabled[i] ? CUDA_SUCCESS : run_node(&order[i]->op, stream);
        if (result != CUDA_SUCCESS)
            return result;
    }
    return CUDA_SUCCESS;
}

static CUresult launch(CUgraphExec exec, CUstream handle)
{
    ENTER_CONTEXT(context);
    CUstream stream;
    REQUIRE(valid(exec), CUDA_ERROR_INVALID_VALUE);
    CUresult result = stream_resolve(context, handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (stream->capture) {
        struct op op = {.kind = OP_CHILD};
        result = graph_clone(exec->graph, &op.as.child);
        return result == CUDA_SUCCESS ? capture_op(stream, &op) : result;
    }
    for (CUgraphNode node = exec->graph->first; node && exec->flags & FLAG_AUTO_FREE; node = node->next)
        if (node->op.kind == OP_ALLOC)
            graph_memory_unuse(node->op.as.memory.pointer);
    /* A trim may have freed the graph's memory. If it cannot be allocated again, fail before any node runs. */
    result = commit_memory(exec->graph);
    return result == CUDA_SUCCESS ? run_all(exec->graph, exec->order, exec->disabled, stream) : result;
}

static CUresult upload(CUgraphExec exec, CUstream handle)
{
    ENTER_CONTEXT(context);
    CUstream stream;
    REQUIRE(valid(exec), CUDA_ERROR_INVALID_VALUE);
    CUresult result = stream_resolve(context, handle, &stream);
    return result == CUDA_SUCCESS ? commit_memory(exec->graph) : result;
}

#define IN_STREAM(name, body)                                          \
    EXPORT CUresult name(CUgraphExec exec, CUstream stream)            \
    {                                                                  \
        return body(exec, LEGACY_STREAM(stream));                      \
    }                                                                  \
    EXPORT CUresult name##_ptsz(CUgraphExec exec, CUstream stream)     \
    {                                                                  \
        return body(exec, PER_THREAD_STREAM(stream));                  \
    }
IN_STREAM(cuGraphLaunch, launch)
IN_STREAM(cuGraphUpload, upload)

/* ---- changing an executable graph ------------------------------------------------------------------------------------------- */

static bool position(CUgraphExec exec, CUgraphNode node, size_t *out)
{
    for (size_t i = 0; valid(exec) && i < exec->graph->count; i++)
        if (exec->order[i]->origin == node) {
            *out = i;
            return true;
        }
    return false;
}

EXPORT CUresult cuGraphNodeSetEnabled(CUgraphExec exec, CUgraphNode node, unsigned enabled)
{
    ENTER();
    size_t at;
    REQUIRE(position(exec, node, &at) && exec->order[at]->op.kind <= OP_SET, CUDA_ERROR_INVALID_VALUE);
    exec->disabled[at] = !enabled;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphNodeGetEnabled(CUgraphExec exec, CUgraphNode node, unsigned *enabled)
{
    ENTER();
    size_t at;
    REQUIRE(enabled && position(exec, node, &at), CUDA_ERROR_INVALID_VALUE);
    *enabled = !exec->disabled[at];
    return CUDA_SUCCESS;
}

CUresult cuGraphKernelNodeSetParams(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *p);
CUresult cuGraphKernelNodeSetParams_v2(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *p);

EXPORT CUresult cuGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *p)
{
    size_t at;
    return position(exec, node, &at) ? cuGraphKernelNodeSetParams(exec->order[at], p) : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *p)
{
    size_t at;
    return position(exec, node, &at) ? cuGraphKernelNodeSetParams_v2(exec->order[at], p) : CUDA_ERROR_INVALID_VALUE;
}
