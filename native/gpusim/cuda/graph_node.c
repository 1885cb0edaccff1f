/* SPDX-License-Identifier: Apache-2.0 */
/* Adds nodes of each kind to CUDA graphs, and reads and changes the parameters of nodes. */
#include "graph.h"

typedef const CUgraphNode *deps;
#define NODE_ARGS CUgraphNode *node, CUgraph graph, deps on, size_t count

static CUresult add(NODE_ARGS, const struct op *op)
{
    ENTER();
    return graph_add(graph, on, count, op, node);
}

static CUresult kernel_op(const CUDA_KERNEL_NODE_PARAMS *p, bool second, struct op *op)
{
    REQUIRE(p, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(p->grid_x && p->grid_y && p->grid_z && p->block_x && p->block_y && p->block_z, CUDA_ERROR_INVALID_VALUE);
    *op = (struct op){.kind = OP_KERNEL, .as.kernel = {.grid = {p->grid_x, p->grid_y, p->grid_z},
                                                       .block = {p->block_x, p->block_y, p->block_z},
                                                       .shared = p->shared}};
    const void *handle = p->function;
    if (!handle && second)
        handle = p->kernel;
    return function_of(handle, &op->as.kernel.function);
}

#define ADD_KERNEL(name, second)                                            \
    EXPORT CUresult name(NODE_ARGS, const CUDA_KERNEL_NODE_PARAMS *p)       \
    {                                                                       \
        struct op op;                                                       \
        ENTER();                                                            \
        CUresult result = kernel_op(p, second, &op);                        \
        return result == CUDA_SUCCESS ? add(node, graph, on, count, &op) : result; \
    }
ADD_KERNEL(cuGraphAddKernelNode, false)
ADD_KERNEL(cuGraphAddKernelNode_v2, true)

EXPORT CUresult cuGraphAddEmptyNode(NODE_ARGS)
{
    return add(node, graph, on, count, &(struct op){.kind = OP_EMPTY});
}

EXPORT CUresult cuGraphAddMemcpyNode(NODE_ARGS, const CUDA_MEMCPY3D *copy, CUcontext context)
{
    ENTER();
    REQUIRE(copy && context_check(context) == CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE);
    struct op op = {.kind = OP_COPY, .as.copy = *copy};
    CUresult result = op_check(context, &op);
    return result == CUDA_SUCCESS ? add(node, graph, on, count, &op) : result;
}

EXPORT CUresult cuGraphAddMemsetNode(NODE_ARGS, const CUDA_MEMSET_NODE_PARAMS *set, CUcontext context)
{
    ENTER();
    REQUIRE(set && context_check(context) == CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE);
    struct op op = {.kind = OP_SET, .as.set = *set};
    CUresult result = op_check(context, &op);
    return result == CUDA_SUCCESS ? add(node, graph, on, count, &op) : result;
}

EXPORT CUresult cuGraphAddHostNode(NODE_ARGS, const CUDA_HOST_NODE_PARAMS *p)
{
    REQUIRE(p && p->function, CUDA_ERROR_INVALID_VALUE);
    return add(node, graph, on, count, &(struct op){.kind = OP_HOST, .as.host = *p});
}

EXPORT CUresult cuGraphAddEventRecordNode(NODE_ARGS, CUevent event)
{
    REQUIRE(event, CUDA_ERROR_INVALID_VALUE);
    return add(node, graph, on, count, &(struct op){.kind = OP_RECORD, .as.event = event});
}

EXPORT CUresult cuGraphAddEventWaitNode(NODE_ARGS, CUevent event)
{
    REQUIRE(event, CUDA_ERROR_INVALID_VALUE);
    return add(node, graph, on, count, &(struct op){.kind = OP_WAIT, .as.event = event});
}

EXPORT CUresult cuGraphAddChildGraphNode(NODE_ARGS, CUgraph child)
{
    ENTER();
    REQUIRE(child && child->magic == GRAPH_MAGIC && child != graph, CUDA_ERROR_INVALID_VALUE);
    for (CUgraphNode n = child->first; n; n = n->next)
        REQUIRE(n->op.kind != OP_ALLOC && n->op.kind != OP_FREE, CUDA_ERROR_NOT_SUPPORTED);
    struct op op = {.kind = OP_CHILD};
    CUresult result = graph_clone(child, &op.as.child);
    return result == CUDA_SUCCESS ? add(node, graph, on, count, &op) : result;
}

EXPORT CUresult cuGraphAddMemAllocNode(NODE_ARGS, CUDA_MEM_ALLOC_NODE_PARAMS *p)
{
    ENTER();
    REQUIRE(p && p->bytes && p->pool.alloc_type == 1 && p->pool.location.type == 1, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_valid(p->pool.location.id), CUDA_ERROR_INVALID_DEVICE);
    struct op op = {.kind = OP_ALLOC, .as.memory = {.bytes = p->bytes}};
    CUresult result = graph_memory_new(p->pool.location.id, p->bytes, &op.as.memory.pointer);
    if (result != CUDA_SUCCESS)
        return result;
    result = add(node, graph, on, count, &op);
    if (result == CUDA_SUCCESS)
        p->pointer = op.as.memory.pointer;
    else
        graph_memory_end(op.as.memory.pointer);
    return result;
}

EXPORT CUresult cuGraphAddMemFreeNode(NODE_ARGS, CUdeviceptr pointer)
{
    REQUIRE(pointer, CUDA_ERROR_INVALID_VALUE);
    return add(node, graph, on, count, &(struct op){.kind = OP_FREE, .as.memory = {.pointer = pointer}});
}

/* CUgraphNodeParams of CUDA 12.2: the type, three reserved words, then the parameters of that type. */
struct node_params {
    int type, reserved[3];
    union {
        CUDA_KERNEL_NODE_PARAMS kernel;
        struct {
            int flags, reserved;
            CUcontext context;
            CUDA_MEMCPY3D copy;
        } copy;
        struct {
            CUDA_MEMSET_NODE_PARAMS set;
            CUcontext context;
        } set;
        CUDA_HOST_NODE_PARAMS host;
        CUgraph child;
        CUevent event;
        CUDA_MEM_ALLOC_NODE_PARAMS alloc;
        CUdeviceptr free;
        long long room[29];
    } as;
    long long reserved2;
};
_Static_assert(sizeof(struct node_params) == 256, "CUgraphNodeParams");

EXPORT CUresult cuGraphAddNode(NODE_ARGS, struct node_params *p)
{
    ENTER();
    REQUIRE(p, CUDA_ERROR_INVALID_VALUE);
    switch (p->type) {
    case OP_KERNEL: return cuGraphAddKernelNode_v2(node, graph, on, count, &p->as.kernel);
    case OP_COPY: return cuGraphAddMemcpyNode(node, graph, on, count, &p->as.copy.copy, p->as.copy.context);
    case OP_SET: return cuGraphAddMemsetNode(node, graph, on, count, &p->as.set.set, p->as.set.context);
    case OP_HOST: return cuGraphAddHostNode(node, graph, on, count, &p->as.host);
    case OP_CHILD: return cuGraphAddChildGraphNode(node, graph, on, count, p->as.child);
    case OP_EMPTY: return cuGraphAddEmptyNode(node, graph, on, count);
    case OP_WAIT: return cuGraphAddEventWaitNode(node, graph, on, count, p->as.event);
    case OP_RECORD: return cuGraphAddEventRecordNode(node, graph, on, count, p->as.event);
    case OP_ALLOC: return cuGraphAddMemAllocNode(node, graph, on, count, &p->as.alloc);
    case OP_FREE: return cuGraphAddMemFreeNode(node, graph, on, count, p->as.free);
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
}

/* ---- parameters ------------------------------------------------------------------------------------------------------------ */

static bool of_kind(CUgraphNode node, enum op_kind kind)
{
    return node && node->magic == NODE_MAGIC && node->op.kind == kind;
}

static CUresult get_kernel(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS *p, bool second)
{
    ENTER();
    REQUIRE(p && of_kind(node, OP_KERNEL), CUDA_ERROR_INVALID_VALUE);
    const struct op *op = &node->op;
    p->function = op->as.kernel.function;
    p->grid_x = op->as.kernel.grid[0], p->grid_y = op->as.kernel.grid[1], p->grid_z = op->as.kernel.grid[2];
    p->block_x = op->as.kernel.block[0], p->block_y = op->as.kernel.block[1], p->block_z = op->as.kernel.block[2];
    p->shared = op->as.kernel.shared;
    p->params = p->extra = NULL; /* Simulated kernels never read their arguments, so the arguments are not stored. */
    if (second) {
        p->kernel = NULL;
        p->context = NULL;
    }
    return CUDA_SUCCESS;
}

static CUresult set_kernel(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *p, bool second)
{
    ENTER();
    struct op op;
    REQUIRE(of_kind(node, OP_KERNEL), CUDA_ERROR_INVALID_VALUE);
    CUresult result = kernel_op(p, second, &op);
    if (result == CUDA_SUCCESS)
        node->op = op;
    return result;
}

#define KERNEL_PARAMS(suffix, second)                                                              \
    EXPORT CUresult cuGraphKernelNodeGetParams##suffix(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS *p) \
    {                                                                                              \
        return get_kernel(node, p, second);                                                        \
    }                                                                                              \
    EXPORT CUresult cuGraphKernelNodeSetParams##suffix(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *p) \
    {                                                                                              \
        return set_kernel(node, p, second);                                                        \
    }
KERNEL_PARAMS(, false)
KERNEL_PARAMS(_v2, true)

#define SIMPLE_PARAMS(base, type, op_kind, member, check)                    \
    EXPORT CUresult base##GetParams(CUgraphNode node, type *p)               \
    {                                                                        \
        ENTER();                                                             \
        REQUIRE(p && of_kind(node, op_kind), CUDA_ERROR_INVALID_VALUE);      \
        *p = node->op.as.member;                                             \
        return CUDA_SUCCESS;                                                 \
    }                                                                        \
    EXPORT CUresult base##SetParams(CUgraphNode node, const type *p)         \
    {                                                                        \
        ENTER();                                                             \
        REQUIRE(p && of_kind(node, op_kind) && (check), CUDA_ERROR_INVALID_VALUE); \
        node->op.as.member = *p;                                             \
        return CUDA_SUCCESS;                                                 \
    }
SIMPLE_PARAMS(cuGraphMemcpyNode, CUDA_MEMCPY3D, OP_COPY, copy, copy_check(p) == CUDA_SUCCESS)
SIMPLE_PARAMS(cuGraphMemsetNode, CUDA_MEMSET_NODE_PARAMS, OP_SET, set, set_check(p) == CUDA_SUCCESS)
SIMPLE_PARAMS(cuGraphHostNode, CUDA_HOST_NODE_PARAMS, OP_HOST, host, p->function != NULL)

EXPORT CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode node, CUgraph *graph)
{
    ENTER();
    REQUIRE(graph && of_kind(node, OP_CHILD), CUDA_ERROR_INVALID_VALUE);
    *graph = node->op.as.child;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphMemAllocNodeGetParams(CUgraphNode node, CUDA_MEM_ALLOC_NODE_PARAMS *p)
{
    ENTER();
    struct block block;
    int device = 0;
    REQUIRE(p && of_kind(node, OP_ALLOC), CUDA_ERROR_INVALID_VALUE);
    memory_find(node->op.as.memory.pointer, &block, &device);
    *p = (CUDA_MEM_ALLOC_NODE_PARAMS){.pool = {.alloc_type = 1, .location = {1, device}},
                                      .bytes = node->op.as.memory.bytes, .pointer = node->op.as.memory.pointer};
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphMemFreeNodeGetParams(CUgraphNode node, CUdeviceptr *pointer)
{
    ENTER();
    REQUIRE(pointer && of_kind(node, OP_FREE), CUDA_ERROR_INVALID_VALUE);
    *pointer = node->op.as.memory.pointer;
    return CUDA_SUCCESS;
}
