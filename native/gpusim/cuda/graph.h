/* SPDX-License-Identifier: Apache-2.0 */
/* Graphs: nodes with dependencies, and the flattened form that a launch runs. */
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
    CUgraphNode origin; /* of a clone: the node it was made from */
    CUgraphNode next;   /* in order of making: a dependency always comes first … */
    unsigned mark;      /* … unless edges were added later: graph_order() sorts */
};

struct CUgraph_st {
    uint32_t magic;
    CUgraphNode first, *end;
    size_t count;
    bool child; /* owned by a node */
};

/* graph.c */
CUresult graph_new(CUgraph *out);
CUresult graph_add(CUgraph graph, const CUgraphNode *dependencies, size_t count, const struct op *op, CUgraphNode *out);
CUresult graph_clone(CUgraph graph, CUgraph *out);
void graph_free(CUgraph graph);
/* The nodes so that each comes after its dependencies; caller frees. NULL if there is a circle or no memory. */
CUgraphNode *graph_order(CUgraph graph);

/* graph_memory.c: memory of allocation nodes. An address from the node's making on, physical from instantiation on. */
CUresult graph_memory_new(int device, uint64_t bytes, CUdeviceptr *out);
CUresult graph_memory_commit(CUdeviceptr pointer);  /* gives it physical memory */
CUresult graph_memory_use(CUdeviceptr pointer);     /* an allocation node runs */
bool graph_memory_unuse(CUdeviceptr pointer);       /* a free node, or cuMemFree: false if it is none of ours */
void graph_memory_retain(CUdeviceptr pointer);      /* one more node names it */
void graph_memory_end(CUdeviceptr pointer);         /* one less */
void graph_memory_end_device(int device);           /* the last context is gone */

#endif
