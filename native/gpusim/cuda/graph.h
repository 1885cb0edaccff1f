/* SPDX-License-Identifier: Apache-2.0 */
/* Types and functions of CUDA graphs: nodes with dependencies, and the ordered list of nodes that a launch runs. */
#ifndef GPUSIM_GRAPH_H
#define GPUSIM_GRAPH_H

#include "op.h"

#define GRAPH_MAGIC 0x47524631u
#define NODE_MAGIC 0x4e4f4431u
#define EXEC_MAGIC 0x45584331u

struct CUgraphNode_st {
    uint32_t magic;
    CUgraph graph;
    struct op op;
    CUgraphNode *dependencies;
    size_t dependency_count;
    /* For a node of a clone: the original node. */
    CUgraphNode origin;
    /* Next node in order of creation. A node comes after its dependencies, except for edges that were added later. */
    CUgraphNode next;
    /* Used by graph_order() for sorting. */
    unsigned mark;
};

struct CUgraph_st {
    uint32_t magic;
    CUgraphNode first, *end;
    size_t count;
    bool child; /* True if the graph belongs to a child node. */
};

/* Defined in graph.c: */
CUresult graph_new(CUgraph *out);
CUresult graph_add(CUgraph graph, const CUgraphNode *dependencies, size_t count, const struct op *op, CUgraphNode *out);
CUresult graph_clone(CUgraph graph, CUgraph *out);
void graph_free(CUgraph graph);
/* Returns the nodes, each after its dependencies; the caller frees the array. Returns NULL if the graph has a cycle or
 * host memory is used up. */
CUgraphNode *graph_order(CUgraph graph);

/* graph_memory.c: memory of allocation nodes. The memory has an address from the node's creation on, and is allocated
 * when the graph is instantiated. */
CUresult graph_memory_new(int device, uint64_t bytes, CUdeviceptr *out);
/* Allocates the physical memory. */
CUresult graph_memory_commit(CUdeviceptr pointer);
/* Called when an allocation node runs. */
CUresult graph_memory_use(CUdeviceptr pointer);
/* Called when a free node runs and by cuMemFree. Marks the memory as free. Returns false if pointer is not in graph
 * memory. */
bool graph_memory_unuse(CUdeviceptr pointer);
/* Adds a reference of a node. */
void graph_memory_retain(CUdeviceptr pointer);
/* Removes a reference of a node. */
void graph_memory_end(CUdeviceptr pointer);
/* Frees all graph memory after the last context was destroyed. */
void graph_memory_end_device(int device);

#endif
