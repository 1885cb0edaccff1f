/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One operation of a stream, in a form that can be run now, captured into a graph, or stored as a graph node. All
 * copies are 3D copies, all memsets are 2D.
 *
 * The bytes of a copy move at once when the program issues the copy, but the copy's time passes later, in the queue.
 * Kernels compute nothing, so a program sees a difference from hardware only if it reads a buffer before it has waited
 * for the copy into the buffer.
 */
#ifndef GPUSIM_OP_H
#define GPUSIM_OP_H

#include "driver.h"

enum op_kind { /* The first values are those of CUgraphNodeType. */
    OP_KERNEL = 0,
    OP_COPY = 1,
    OP_SET = 2,
    OP_HOST = 3,
    OP_CHILD = 4,
    OP_EMPTY = 5,
    OP_WAIT = 6,
    OP_RECORD = 7,
    OP_ALLOC = 10,
    OP_FREE = 11,
};

struct op {
    enum op_kind kind;
    union {
        struct {
            CUfunction function;
            unsigned grid[3], block[3], shared;
        } kernel;
        CUDA_MEMCPY3D copy;
        CUDA_MEMSET_NODE_PARAMS set;
        CUDA_HOST_NODE_PARAMS host;
        CUgraph child;
        CUevent event;
        struct {
            CUdeviceptr pointer;
            uint64_t bytes;
        } memory;
    } as;
};

/* op.c: checks the operation's arguments */
CUresult op_check(CUcontext context, const struct op *op);
/* Runs the operation now. */
CUresult op_run(CUstream stream, const struct op *op);
/* Runs the operation or, in a capture, adds it to the graph; resolves the stream's handle. */
CUresult op_issue(CUstream handle, const struct op *op);

/* Defined in copy.c: */
CUresult copy_check(const CUDA_MEMCPY3D *copy);
CUresult copy_move(const CUDA_MEMCPY3D *copy, bool *over_bus); /* Moves the bytes. */
CUresult set_check(const CUDA_MEMSET_NODE_PARAMS *set);
void set_fill(const CUDA_MEMSET_NODE_PARAMS *set);
bool range_valid(uintptr_t address, uint64_t bytes);

/* Defined in array.c: */
bool array_address(CUarray array, uintptr_t *base, size_t *pitch, size_t *height, size_t *depth);

/* Defined in capture.c: */
CUresult capture_op(CUstream stream, const struct op *op);

/* Defined in event.c: */
CUresult event_record_now(CUevent event, CUstream stream);
CUresult event_wait_now(CUevent event, CUstream stream);

#endif
