/* SPDX-License-Identifier: Apache-2.0 */
/* Builds CUDA graphs: adds nodes and dependencies, and clones graphs. */
#include "graph.h"

#include <stdlib.h>
#include <string.h>

static bool valid(CUgraph graph)
{
    return graph && graph->magic == GRAPH_MAGIC;
}

static bool node_valid(CUgraphNode node)
{
    return node && node->magic == NODE_MAGIC;
}

CUresult graph_new(CUgraph *out)
{
    CUgraph graph = calloc(1, sizeof *graph);
    REQUIRE(graph, CUDA_ERROR_OUT_OF_MEMORY);
    graph->magic = GRAPH_MAGIC;
    graph->end = &graph->first;
    *out = graph;
    return CUDA_SUCCESS;
}

static CUresult depend(CUgraphNode node, const CUgraphNode *on, size_t count)
{
    CUgraphNode *more = realloc(node->dependencies, (node->dependency_count + count + 1) * sizeof *more);
    REQUIRE(more, CUDA_ERROR_OUT_OF_MEMORY);
    node->dependencies = more;
    for (size_t i = 0; i < count; i++)
        more[node->dependency_count++] = on[i];
    return CUDA_SUCCESS;
}

CUresult graph_add(CUgraph graph, const CUgraphNode *dependencies, size_t count, const struct op *op, CUgraphNode *out)
{
    REQUIRE(valid(graph) && out && (count == 0 || dependencies), CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; i < count; i++)
        REQUIRE(node_valid(dependencies[i]) && dependencies[i]->graph == graph, CUDA_ERROR_INVALID_VALUE);
    CUgraphNode node = calloc(1, sizeof *node);
    REQUIRE(node, CUDA_ERROR_OUT_OF_MEMORY);
    *node = (struct CUgraphNode_st){.magic = NODE_MAGIC, .graph = graph, .op = *op};
    CUresult result = depend(node, dependencies, count);
    if (result != CUDA_SUCCESS) {
        free(node);
        return result;
    }
    *graph->end = node;
    graph->end = &node->next;
    graph->count++;
    *out = node;
    return CUDA_SUCCESS;
}

static void node_free(CUgraphNode node)
{
    if (node->op.kind == OP_CHILD)
        graph_free(node->op.as.child);
    if (node->op.kind == OP_ALLOC)
        graph_memory_end(node->op.as.memory.pointer);
    node->magic = 0;
    free(node->dependencies);
    free(node);
}

void graph_free(CUgraph graph)
{
    for (CUgraphNode node = graph->first, next; node; node = next) {
        next = node->next;
        node_free(node);
    }
    graph->magic = 0;
    free(graph);
}

CUresult graph_clone(CUgraph graph, CUgraph *out)
{
    CUgraph copy;
    CUresult result = graph_new(&copy);
    if (result != CUDA_SUCCESS)
        return result;
    for (CUgraphNode node = graph->first; node && result == CUDA_SUCCESS; node = node->next) {
        struct op op = node->op;
        CUgraphNode made;
        if (op.kind == OP_CHILD)
            result = graph_clone(node->op.as.child, &op.as.child);
        if (result == CUDA_SUCCESS)
            result = graph_add(copy, NULL, 0, &op, &made);
        if (result == CUDA_SUCCESS)
            made->origin = node;
        if (result == CUDA_SUCCESS && op.kind == OP_ALLOC)
            graph_memory_retain(op.as.memory.pointer);
    }
    for (CUgraphNode made = copy->first; made && result == CUDA_SUCCESS; made = made->next)
        for (size_t i = 0; i < made->origin->dependency_count && result == CUDA_SUCCESS; i++)
            for (CUgraphNode on = copy->first; on; on = on->next)
                if (on->origin == made->origin->dependencies[i])
                    result = depend(made, &on, 1);
    if (result != CUDA_SUCCESS) {
        graph_free(copy);
        return result;
    }
    *out = copy;
    return CUDA_SUCCESS;
}

CUgraphNode *graph_order(CUgraph graph)
{
    CUgraphNode *order = calloc(graph->count + 1, sizeof *order);
    size_t placed = 0;
    bool moved = true;
    for (CUgraphNode node = graph->first; node; node = node->next)
        node->mark = 0;
    while (order && placed < graph->count && moved) {
        moved = false;
        for (CUgraphNode node = graph->first; node; node = node->next) {
            bool ready = !node->mark;
            for (size_t i = 0; ready && i < node->dependency_count; i++)
                ready = node->dependencies[i]->mark;
            if (ready) {
                node->mark = 1;
                order[placed++] = node;
                moved = true;
            }
        }
    }
    if (order && placed < graph->count) {
        free(order);
        return NULL;
    }
    return order;
}

/* ---- entry points ------------------------------------------------------------------------------------------------------- */

EXPORT CUresult cuGraphCreate(CUgraph *graph, unsigned flags)
{
    ENTER();
    REQUIRE(graph && flags == 0, CUDA_ERROR_INVALID_VALUE);
    return graph_new(graph);
}

EXPORT CUresult cuGraphDestroy(CUgraph graph)
{
    ENTER();
    REQUIRE(valid(graph), CUDA_ERROR_INVALID_VALUE);
    graph_free(graph);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphClone(CUgraph *copy, CUgraph graph)
{
    ENTER();
    REQUIRE(copy && valid(graph), CUDA_ERROR_INVALID_VALUE);
    return graph_clone(graph, copy);
}

EXPORT CUresult cuGraphNodeFindInClone(CUgraphNode *out, CUgraphNode original, CUgraph clone)
{
    ENTER();
    REQUIRE(out && node_valid(original) && valid(clone), CUDA_ERROR_INVALID_VALUE);
    for (CUgraphNode node = clone->first; node; node = node->next)
        if (node->origin == original) {
            *out = node;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count)
{
    ENTER();
    REQUIRE(valid(graph) && count, CUDA_ERROR_INVALID_VALUE);
    size_t room = nodes ? *count : 0, n = 0;
    for (CUgraphNode node = graph->first; node; node = node->next, n++)
        if (n < room)
            nodes[n] = node;
    for (size_t i = n; i < room; i++)
        nodes[i] = NULL;
    if (!nodes || n < room)
        *count = n;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphGetRootNodes(CUgraph graph, CUgraphNode *nodes, size_t *count)
{
    ENTER();
    REQUIRE(valid(graph) && count, CUDA_ERROR_INVALID_VALUE);
    size_t room = nodes ? *count : 0, n = 0;
    for (CUgraphNode node = graph->first; node; node = node->next)
        if (node->dependency_count == 0) {
            if (n < room)
                nodes[n] = node;
            n++;
        }
    if (!nodes || n < room)
        *count = n;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphGetEdges(CUgraph graph, CUgraphNode *from, CUgraphNode *to, size_t *count)
{
    ENTER();
    REQUIRE(valid(graph) && count && !from == !to, CUDA_ERROR_INVALID_VALUE);
    size_t room = from ? *count : 0, n = 0;
    for (CUgraphNode node = graph->first; node; node = node->next)
        for (size_t i = 0; i < node->dependency_count; i++, n++)
            if (n < room) {
                from[n] = node->dependencies[i];
                to[n] = node;
            }
    if (!from || n < room)
        *count = n;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphNodeGetType(CUgraphNode node, int *type)
{
    ENTER();
    REQUIRE(node_valid(node) && type, CUDA_ERROR_INVALID_VALUE);
    *type = (int)node->op.kind;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphNodeGetDependencies(CUgraphNode node, CUgraphNode *nodes, size_t *count)
{
    ENTER();
    REQUIRE(node_valid(node) && count, CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; nodes && i < *count; i++)
        nodes[i] = i < node->dependency_count ? node->dependencies[i] : NULL;
    if (!nodes || node->dependency_count < *count)
        *count = node->dependency_count;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphNodeGetDependentNodes(CUgraphNode node, CUgraphNode *nodes, size_t *count)
{
    ENTER();
    REQUIRE(node_valid(node) && count, CUDA_ERROR_INVALID_VALUE);
    size_t room = nodes ? *count : 0, n = 0;
    for (CUgraphNode other = node->graph->first; other; other = other->next)
        for (size_t i = 0; i < other->dependency_count; i++)
            if (other->dependencies[i] == node) {
                if (n < room)
                    nodes[n] = other;
                n++;
            }
    if (!nodes || n < room)
        *count = n;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphAddDependencies(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, size_t count)
{
    ENTER();
    REQUIRE(valid(graph) && (count == 0 || (from && to)), CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; i < count; i++) {
        REQUIRE(node_valid(from[i]) && node_valid(to[i]) && from[i]->graph == graph && to[i]->graph == graph,
                CUDA_ERROR_INVALID_VALUE);
        CUresult result = depend(to[i], &from[i], 1);
        if (result != CUDA_SUCCESS)
            return result;
    }
    return CUDA_SUCCESS;
}

static bool undepend(CUgraphNode node, CUgraphNode on)
{
    for (size_t i = 0; i < node->dependency_count; i++)
        if (node->dependencies[i] == on) {
            node->dependencies[i] = node->dependencies[--node->dependency_count];
            return true;
        }
    return false;
}

EXPORT CUresult cuGraphRemoveDependencies(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, size_t count)
{
    ENTER();
    REQUIRE(valid(graph) && (count == 0 || (from && to)), CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; i < count; i++)
        REQUIRE(node_valid(to[i]) && undepend(to[i], from[i]), CUDA_ERROR_INVALID_VALUE);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphDestroyNode(CUgraphNode node)
{
    ENTER();
    REQUIRE(node_valid(node), CUDA_ERROR_INVALID_VALUE);
    REQUIRE(node->op.kind != OP_ALLOC && node->op.kind != OP_FREE, CUDA_ERROR_NOT_SUPPORTED);
    CUgraph graph = node->graph;
    CUgraphNode *link = &graph->first;
    while (*link != node)
        link = &(*link)->next;
    *link = node->next;
    if (graph->end == &node->next)
        graph->end = link;
    graph->count--;
    for (CUgraphNode other = graph->first; other; other = other->next)
        while (undepend(other, node))
            ;
    node_free(node);
    return CUDA_SUCCESS;
}
