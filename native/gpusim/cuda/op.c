/* SPDX-License-Identifier: Apache-2.0 */
/* Runs one operation (kernel, copy, memset, host function, event) in a stream, or captures it into a graph. */
#include "op.h"

#include "capture.h"

CUresult op_check(CUcontext context, const struct op *op)
{
    (void)context;
    switch (op->kind) {
    case OP_COPY: return copy_check(&op->as.copy);
    case OP_SET: return set_check(&op->as.set);
    case OP_HOST: return op->as.host.function ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    default: return CUDA_SUCCESS;
    }
}

static CUresult run_copy(CUstream stream, const CUDA_MEMCPY3D *copy)
{
    bool over_bus;
    CUresult result = copy_move(copy, &over_bus);
    if (result != CUDA_SUCCESS)
        return result;
    return copy_queue(stream, (uint64_t)copy->width * copy->height * copy->depth, over_bus);
}

CUresult op_run(CUstream stream, const struct op *op)
{
    CUresult result = op_check(stream->context, op);
    if (result != CUDA_SUCCESS)
        return result;
    switch (op->kind) {
    case OP_KERNEL: return launch_submit(stream, op->as.kernel.function, op->as.kernel.grid, op->as.kernel.block);
    case OP_COPY: return run_copy(stream, &op->as.copy);
    case OP_SET:
        set_fill(&op->as.set);
        return copy_queue(stream, (uint64_t)op->as.set.element_size * op->as.set.width * op->as.set.height, false);
    case OP_HOST: return callback_add(stream, op->as.host.function, NULL, op->as.host.data);
    case OP_RECORD: return event_record_now(op->as.event, stream);
    case OP_WAIT: return event_wait_now(op->as.event, stream);
    default: return CUDA_SUCCESS; /* graph_exec.c runs the other kinds of operations. */
    }
}

CUresult op_issue(CUstream handle, const struct op *op)
{
    ENTER_CONTEXT(context);
    CUstream stream;
    CUresult result = stream_resolve(context, handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (stream == &stream->context->legacy)
        REQUIRE(capture_forbids() == CUDA_SUCCESS, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    if (stream->capture) {
        result = op_check(context, op);
        return result == CUDA_SUCCESS ? capture_op(stream, op) : result;
    }
    return op_run(stream, op);
}
