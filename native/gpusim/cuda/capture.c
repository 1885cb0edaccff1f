/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Implements stream capture. A capture is an unfinished graph. Each stream in it has a frontier, the nodes on which the
 * stream's next node depends. A stream joins the capture when it waits for a captured event. Before the capture ends,
 * the stream that began it must wait for all joined streams.
 */
#include "capture.h"

#include "graph.h"
#include "hostile.h"

#include <stdlib.h>

enum { STATUS_NONE = 0, STATUS_ACTIVE = 1, STATUS_INVALIDATED = 2 };

struct member {
    CUstream stream;
    CUgraphNode *frontier;
    size_t count;
    struct member *next;
};

struct capture {
    CUgraph graph, into; /* into: an existing graph that the capture updates, or NULL. */
    CUstream origin;
    int mode;
    bool invalid;
    uint64_t id;
    pthread_t thread;
    struct member *members;
    struct capture *next;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct capture *captures;
static _Atomic unsigned active;
static __thread int thread_mode = MODE_GLOBAL;

static struct member *member_of(const struct capture *capture, CUstream stream)
{
    struct member *member = capture->members;
    while (member && member->stream != stream)
        member = member->next;
    return member;
}

static CUresult set_frontier(struct member *member, const CUgraphNode *nodes, size_t count, bool keep)
{
    size_t kept = keep ? member->count : 0;
    CUgraphNode *more = realloc(member->frontier, (kept + count + 1) * sizeof *more);
    REQUIRE(more, CUDA_ERROR_OUT_OF_MEMORY);
    member->frontier = more;
    for (size_t i = 0; i < count; i++)
        more[kept + i] = nodes[i];
    member->count = kept + count;
    return CUDA_SUCCESS;
}

static CUresult join(struct capture *capture, CUstream stream)
{
    struct member *member = calloc(1, sizeof *member);
    REQUIRE(member, CUDA_ERROR_OUT_OF_MEMORY);
    member->stream = stream;
    member->next = capture->members;
    capture->members = member;
    stream->capture = capture;
    return CUDA_SUCCESS;
}

CUresult capture_op(CUstream stream, const struct op *op)
{
    CUgraphNode node;
    pthread_mutex_lock(&mutex);
    struct capture *capture = stream->capture;
    CUresult result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (capture && !capture->invalid) {
        struct member *member = member_of(capture, stream);
        result = graph_add(capture->graph, member->frontier, member->count, op, &node);
        if (result == CUDA_SUCCESS)
            result = set_frontier(member, &node, 1, false);
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

CUresult capture_event(CUstream stream, CUgraphNode *node, uint64_t *id)
{
    CUresult result = CUDA_SUCCESS;
    *node = NULL;
    pthread_mutex_lock(&mutex);
    struct capture *capture = stream->capture;
    struct member *member = capture ? member_of(capture, stream) : NULL;
    if (!capture || capture->invalid) {
        result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    } else if (member->count == 1) {
        *node = member->frontier[0];
    /* The frontier does not have exactly one node, so add an empty node that depends on all nodes of the frontier. */
    } else {
        struct op op = {.kind = OP_EMPTY};
        result = graph_add(capture->graph, member->frontier, member->count, &op, node);
        if (result == CUDA_SUCCESS)
            result = set_frontier(member, node, 1, false);
    }
    if (result == CUDA_SUCCESS)
        *id = capture->id;
    pthread_mutex_unlock(&mutex);
    return result;
}

/* Returns the capture, or NULL if it has ended. The caller must hold the mutex. */
static struct capture *capture_of(uint64_t id)
{
    struct capture *capture = captures;
    while (capture && capture->id != id)
        capture = capture->next;
    return capture;
}

CUresult capture_asked(uint64_t id)
{
    pthread_mutex_lock(&mutex);
    struct capture *capture = hostile(SIM_HOSTILE_CAPTURE_QUERY) ? capture_of(id) : NULL;
    if (capture)
        capture->invalid = true;
    pthread_mutex_unlock(&mutex);
    return CUDA_ERROR_CAPTURED_EVENT;
}

void capture_spoil(CUstream stream)
{
    if (hostile(SIM_HOSTILE_CAPTURE_QUERY))
        capture_check(stream);
}

CUresult capture_wait(CUstream stream, uint64_t id, CUgraphNode node)
{
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&mutex);
    struct capture *from = id ? capture_of(id) : NULL;
    if (stream->capture && stream->capture != from) {
        stream->capture->invalid = true; /* Refused, because the node would depend on work outside of the capture. */
        result = CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    } else if (!from) {
        result = CUDA_ERROR_CAPTURED_EVENT; /* Refused, because the event was recorded in a capture that has ended. */
    } else if (from->invalid) {
        result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    } else {
        if (!stream->capture)
            result = join(from, stream);
        if (result == CUDA_SUCCESS)
            result = set_frontier(member_of(from, stream), &node, 1, true);
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

CUresult capture_check(CUstream stream)
{
    if (__builtin_expect(!stream->capture, 1))
        return CUDA_SUCCESS;
    pthread_mutex_lock(&mutex);
    if (stream->capture)
        stream->capture->invalid = true;
    pthread_mutex_unlock(&mutex);
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult capture_forbids(void)
{
    if (__builtin_expect(!atomic_load_explicit(&active, memory_order_relaxed), 1) || thread_mode == MODE_RELAXED)
        return CUDA_SUCCESS;
    bool hit = false;
    pthread_mutex_lock(&mutex);
    for (struct capture *c = captures; c; c = c->next) {
        bool own = pthread_equal(c->thread, pthread_self());
        if ((c->mode == MODE_GLOBAL && (own || thread_mode == MODE_GLOBAL)) || (c->mode == MODE_THREAD_LOCAL && own))
            hit = c->invalid = true;
    }
    pthread_mutex_unlock(&mutex);
    return hit ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

CUresult capture_forbids_also(void)
{
    return hostile(SIM_HOSTILE_CAPTURE_QUERY) ? capture_forbids() : CUDA_SUCCESS;
}

/* ---- begin and end -------------------------------------------------------------------------------------------------------- */

CUresult capture_begin(CUstream handle, int mode, CUgraph into)
{
    ENTER_CONTEXT(context);
    CUstream stream;
    REQUIRE(mode >= MODE_GLOBAL && mode <= MODE_RELAXED, CUDA_ERROR_INVALID_VALUE);
    CUresult result = stream_resolve(context, handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    REQUIRE(stream != &stream->context->legacy, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    REQUIRE(!stream->capture, CUDA_ERROR_ILLEGAL_STATE);
    struct capture *capture = calloc(1, sizeof *capture);
    REQUIRE(capture, CUDA_ERROR_OUT_OF_MEMORY);
    *capture = (struct capture){.into = into, .origin = stream, .mode = mode, .id = atomic_fetch_add(&driver.next_id, 1),
                                .thread = pthread_self()};
    result = graph_new(&capture->graph);
    pthread_mutex_lock(&mutex);
    if (result == CUDA_SUCCESS)
        result = join(capture, stream);
    if (result == CUDA_SUCCESS) {
        capture->next = captures;
        captures = capture;
        atomic_fetch_add(&active, 1);
    }
    pthread_mutex_unlock(&mutex);
    if (result != CUDA_SUCCESS) {
        if (capture->graph)
            graph_free(capture->graph);
        free(capture);
    }
    return result;
}

static void mark_back(CUgraphNode node)
{
    if (node->mark)
        return;
    node->mark = 1;
    for (size_t i = 0; i < node->dependency_count; i++)
        mark_back(node->dependencies[i]);
}

/* True if the frontier of the stream that began the capture depends on all nodes of the other streams. */
static bool joined(const struct capture *capture)
{
    const struct member *origin = member_of(capture, capture->origin);
    for (CUgraphNode node = capture->graph->first; node; node = node->next)
        node->mark = 0;
    for (size_t i = 0; i < origin->count; i++)
        mark_back(origin->frontier[i]);
    for (const struct member *member = capture->members; member; member = member->next)
        for (size_t i = 0; i < member->count; i++)
            if (!member->frontier[i]->mark)
                return false;
    return true;
}

static void dissolve(struct capture *capture)
{
    struct capture **link = &captures;
    while (*link != capture)
        link = &(*link)->next;
    *link = capture->next;
    atomic_fetch_sub(&active, 1);
    for (struct member *member = capture->members, *next; member; member = next) {
        next = member->next;
        member->stream->capture = NULL;
        free(member->frontier);
        free(member);
    }
    free(capture);
}

/* Copies the operations of a graph into a graph of the same shape. Fails for another shape, and for operations that own
 * resources (child graphs, allocations, frees). */
static CUresult recapture(CUgraph from, CUgraph into)
{
    REQUIRE(from->count == into->count, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    for (CUgraphNode a = from->first, b = into->first; a; a = a->next, b = b->next)
        REQUIRE(a->op.kind == b->op.kind && a->dependency_count == b->dependency_count && a->op.kind != OP_CHILD &&
                    a->op.kind != OP_ALLOC && a->op.kind != OP_FREE,
                CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    for (CUgraphNode a = from->first, b = into->first; a; a = a->next, b = b->next)
        b->op = a->op;
    return CUDA_SUCCESS;
}

CUresult capture_end(CUstream handle, CUgraph *out)
{
    ENTER_CONTEXT(context);
    CUstream stream;
    REQUIRE(out, CUDA_ERROR_INVALID_VALUE);
    CUresult result = stream_resolve(context, handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    *out = NULL;
    pthread_mutex_lock(&mutex);
    struct capture *capture = stream->capture;
    if (!capture)
        result = CUDA_ERROR_ILLEGAL_STATE;
    else if (capture->origin != stream)
        result = CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    else if (capture->mode != MODE_RELAXED && !pthread_equal(capture->thread, pthread_self()))
        result = CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    if (result == CUDA_SUCCESS) {
        CUgraph graph = capture->graph, into = capture->into;
        result = capture->invalid      ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
                 : !joined(capture)    ? CUDA_ERROR_STREAM_CAPTURE_UNJOINED
                                       : CUDA_SUCCESS;
        dissolve(capture);
        if (result == CUDA_SUCCESS && into)
            result = recapture(graph, into);
        if (result == CUDA_SUCCESS)
            *out = into ? into : graph;
        if (*out != graph)
            graph_free(graph);
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

/* Returns the state of a stream's capture; id, graph, nodes and count may be NULL. */
static CUresult info(CUstream handle, int *status, uint64_t *id, CUgraph *graph, const CUgraphNode **nodes, size_t *count)
{
    ENTER_CONTEXT(context);
    CUstream stream;
    REQUIRE(status, CUDA_ERROR_INVALID_VALUE);
    CUresult result = stream_resolve(context, handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&mutex);
    const struct capture *capture = stream->capture;
    *status = !capture ? STATUS_NONE : capture->invalid ? STATUS_INVALIDATED : STATUS_ACTIVE;
    if (*status == STATUS_ACTIVE) {
        const struct member *member = member_of(capture, stream);
        if (id)
            *id = capture->id;
        if (graph)
            *graph = capture->graph;
        if (nodes)
            *nodes = member->frontier;
        if (count)
            *count = member->count;
    }
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

static CUresult update(CUstream handle, CUgraphNode *nodes, size_t count, unsigned flags)
{
    ENTER_CONTEXT(context);
    CUstream stream;
    REQUIRE(flags <= 1 && (count == 0 || nodes), CUDA_ERROR_INVALID_VALUE);
    CUresult result = stream_resolve(context, handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&mutex);
    if (!stream->capture || stream->capture->invalid)
        result = CUDA_ERROR_ILLEGAL_STATE;
    else
        /* The flag 0 adds dependencies, 1 replaces them. */
        result = set_frontier(member_of(stream->capture, stream), nodes, count, flags == 0);
    pthread_mutex_unlock(&mutex);
    return result;
}

#define BOTH(name, parameters, legacy, per_thread)  \
    EXPORT CUresult name parameters                 \
    {                                               \
        return legacy;                              \
    }                                               \
    EXPORT CUresult name##_ptsz parameters          \
    {                                               \
        return per_thread;                          \
    }
#define L LEGACY_STREAM(s)
#define P PER_THREAD_STREAM(s)

BOTH(cuStreamBeginCapture, (CUstream s), capture_begin(L, MODE_GLOBAL, NULL), capture_begin(P, MODE_GLOBAL, NULL))
BOTH(cuStreamBeginCapture_v2, (CUstream s, int mode), capture_begin(L, mode, NULL),
     capture_begin(P, mode, NULL))
BOTH(cuStreamEndCapture, (CUstream s, CUgraph *graph), capture_end(L, graph), capture_end(P, graph))
BOTH(cuStreamIsCapturing, (CUstream s, int *status), info(L, status, NULL, NULL, NULL, NULL),
     info(P, status, NULL, NULL, NULL, NULL))
BOTH(cuStreamGetCaptureInfo, (CUstream s, int *status, uint64_t *id), info(L, status, id, NULL, NULL, NULL),
     info(P, status, id, NULL, NULL, NULL))
BOTH(cuStreamGetCaptureInfo_v2,
     (CUstream s, int *status, uint64_t *id, CUgraph *graph, const CUgraphNode **nodes, size_t *count),
     info(L, status, id, graph, nodes, count), info(P, status, id, graph, nodes, count))
BOTH(cuStreamUpdateCaptureDependencies, (CUstream s, CUgraphNode *nodes, size_t count, unsigned flags),
     update(L, nodes, count, flags), update(P, nodes, count, flags))

EXPORT CUresult cuThreadExchangeStreamCaptureMode(int *mode)
{
    ENTER();
    REQUIRE(mode && *mode >= MODE_GLOBAL && *mode <= MODE_RELAXED, CUDA_ERROR_INVALID_VALUE);
    int before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}
