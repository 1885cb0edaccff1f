/* SPDX-License-Identifier: Apache-2.0 */
/* Creates and destroys streams, resolves the two kinds of default stream, and submits work to the context's queue. */
#include "hostile.h"

#include <stdlib.h>

#define COPY_LATENCY_NS 2000u
#define DEVICE_COPY_FACTOR 20u /* Speed of copies inside the GPU relative to copies over the bus. */
#define CACHED 8

/* The calling thread's per-thread default streams, one for each context. */
static __thread struct {
    uint64_t context_id;
    CUstream stream;
} per_thread[CACHED];
static __thread unsigned per_thread_next;

static CUstream stream_new(CUcontext context, unsigned flags, int priority)
{
    CUstream stream = calloc(1, sizeof *stream);
    if (!stream)
        return NULL;
    *stream = (struct CUstream_st){.magic = STREAM_MAGIC, .context = context, .flags = flags, .priority = priority,
                                   .id = atomic_fetch_add(&driver.next_id, 1)};
    pthread_mutex_lock(&context->mutex);
    stream->order = context->next_order++ & ~SIM_STREAM_NONBLOCKING;
    if (flags & 1)
        stream->order |= SIM_STREAM_NONBLOCKING;
    stream->next = context->streams;
    context->streams = stream;
    pthread_mutex_unlock(&context->mutex);
    return stream;
}

CUstream stream_of(CUcontext context, CUcontext green, unsigned flags, int priority)
{
    CUstream stream = stream_new(context, flags, priority);
    if (stream)
        stream->green = green;
    return stream;
}

/* Returns the current green context (a part of the GPU's SMs) of this primary context, or NULL. */
static CUcontext green_current(CUcontext home)
{
    CUcontext current = context_current();
    return current && current->home == home ? current : NULL;
}

static CUstream thread_stream(CUcontext context)
{
    for (unsigned i = 0; i < CACHED; i++)
        if (per_thread[i].stream && per_thread[i].context_id == context->id)
            return per_thread[i].stream;
    CUstream stream = stream_new(context, 0, 0);
    per_thread[per_thread_next % CACHED].context_id = context->id;
    per_thread[per_thread_next++ % CACHED].stream = stream;
    return stream;
}

CUresult stream_resolve(CUcontext context, CUstream stream, CUstream *out)
{
    CUcontext green = stream <= CU_STREAM_PER_THREAD ? green_current(context) : NULL;
    if (green)
        *out = green->own;
    else if (stream == NULL || stream == CU_STREAM_LEGACY)
        *out = &context->legacy;
    else if (stream == CU_STREAM_PER_THREAD)
        *out = thread_stream(context);
    else
        *out = stream;
    REQUIRE(*out, CUDA_ERROR_OUT_OF_MEMORY);
    REQUIRE((*out)->magic == STREAM_MAGIC, CUDA_ERROR_INVALID_HANDLE);
    return context_check((*out)->context);
}

static void raise(_Atomic uint64_t *value, uint64_t to)
{
    uint64_t seen = atomic_load_explicit(value, memory_order_relaxed);
    while (seen < to && !atomic_compare_exchange_weak(value, &seen, to))
        ;
}

void stream_queued(CUstream stream, uint64_t seq)
{
    raise(&stream->last, seq);
    raise(&stream->context->last, seq);
}

CUresult stream_submit(CUstream stream, struct sim_work *work, uint64_t *seq)
{
    struct sim_work old;
    CUcontext context = stream->context;
    work->stream = stream->order;
    uint64_t number = sim_submit(context->gpu, context->channel, work, &old);
    REQUIRE(number, CUDA_ERROR_UNKNOWN);
    if (old.kind == SIM_WORK_MARK && old.tag)
        events_keep(context, &old);
    stream_queued(stream, number);
    if (seq)
        *seq = number;
    return CUDA_SUCCESS;
}

CUresult stream_wait(CUstream stream)
{
    CUcontext context = stream->context;
    uint64_t last = atomic_load(&stream->last);
    if (stream == &context->legacy) {
        /* The legacy stream waits for all blocking streams, so an item in the legacy stream is done only after their
         * work. */
        struct sim_work mark = {.kind = SIM_WORK_MARK};
        if (atomic_load(&context->last) <= atomic_load(&context->waited)) {
            pools_trim_if_due(context->device);
            return CUDA_SUCCESS;
        }
        CUresult result = stream_submit(stream, &mark, &last);
        if (result != CUDA_SUCCESS)
            return result;
    }
    if (last <= atomic_load(&context->waited) || sim_work_wait(context->gpu, context->channel, last, NULL)) {
        pools_trim_if_due(context->device);
        return CUDA_SUCCESS;
    }
    return context_check(context) ? context_check(context) : CUDA_ERROR_UNKNOWN;
}

CUresult context_drain(CUcontext context)
{
    uint64_t last = atomic_load_explicit(&context->last, memory_order_acquire);
    if (last <= atomic_load_explicit(&context->waited, memory_order_relaxed)) {
        pools_trim_if_due(context->device);
        return CUDA_SUCCESS;
    }
    if (!sim_channel_wait(context->gpu, context->channel))
        return context_check(context) ? context_check(context) : CUDA_ERROR_UNKNOWN;
    raise(&context->waited, last);
    pools_trim_if_due(context->device);
    return CUDA_SUCCESS;
}

CUresult context_wait(CUcontext context)
{
    bool held = context_lock(context);
    CUresult result = context_drain(context);
    context_unlock(context, held);
    return result;
}

uint64_t copy_cost(uint64_t bytes, bool over_bus)
{
    double rate = (double)sim_state()->copy_bytes_per_ms / 1e6 * (over_bus ? 1 : DEVICE_COPY_FACTOR);
    return COPY_LATENCY_NS + (uint64_t)((double)bytes / rate);
}

void streams_destroy(CUcontext context)
{
    /* Stale handles stay readable: a program that uses a stream of a destroyed context gets an error, not a crash. */
    for (CUstream stream = context->streams; stream; stream = stream->next)
        stream->magic = 0;
    context->streams = NULL;
    context->legacy.magic = 0;
}

/* ---- entry points --------------------------------------------------------------------------------------------------- */

static CUresult create(CUstream *out, unsigned flags, int priority)
{
    ENTER_CONTEXT(context);
    REQUIRE(out && flags <= 1, CUDA_ERROR_INVALID_VALUE);
    priority = priority > 0 ? 0 : priority < -5 ? -5 : priority;
    *out = stream_of(context, green_current(context), flags, priority);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuStreamCreate(CUstream *stream, unsigned flags)
{
    return create(stream, flags, 0);
}

EXPORT CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority)
{
    return create(stream, flags, priority);
}

static CUresult destroy(CUstream stream)
{
    ENTER();
    REQUIRE((uintptr_t)stream > (uintptr_t)CU_STREAM_PER_THREAD && stream->magic == STREAM_MAGIC,
            CUDA_ERROR_INVALID_HANDLE);
    CUcontext context = stream->context;
    REQUIRE(stream != &context->legacy, CUDA_ERROR_INVALID_HANDLE);
    CUresult result = capture_check(stream); /* A stream must not be destroyed while a capture refers to its handle. */
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&context->mutex);
    CUstream *link = &context->streams;
    while (*link && *link != stream)
        link = &(*link)->next;
    if (*link)
        *link = stream->next;
    stream->magic = 0;
    pthread_mutex_unlock(&context->mutex);
    free(stream); /* Queued work continues: the engine knows the stream by its number. */
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamDestroy_v2(CUstream stream)
{
    return destroy(stream);
}

EXPORT CUresult cuStreamDestroy(CUstream stream)
{
    return destroy(stream);
}

static CUresult synchronize(CUstream handle)
{
    ENTER_CONTEXT(context);
    CUstream stream;
    CUresult result = stream_resolve(context, handle, &stream);
    if (result == CUDA_SUCCESS)
        result = capture_check(stream);
    if (result != CUDA_SUCCESS)
        return result;
    context = stream->context; /* Read the fields now, because the stream may be destroyed during the wait. */
    bool held = context_lock(context);
    result = stream_wait(stream);
    context_unlock(context, held);
    return result;
}

EXPORT CUresult cuStreamSynchronize(CUstream stream)
{
    return synchronize(LEGACY_STREAM(stream));
}

EXPORT CUresult cuStreamSynchronize_ptsz(CUstream stream)
{
    return synchronize(PER_THREAD_STREAM(stream));
}

static CUresult query(CUstream handle)
{
    ENTER_CONTEXT(context);
    CUstream stream;
    CUresult result = stream_resolve(context, handle, &stream);
    if (result == CUDA_SUCCESS)
        result = capture_check(stream);
    if (result != CUDA_SUCCESS)
        return result;
    context = stream->context;
    uint64_t last = atomic_load(stream == &context->legacy ? &context->last : &stream->last);
    if (last <= atomic_load(&context->waited))
        return CUDA_SUCCESS;
    bool done = stream == &context->legacy ? sim_channel_idle(context->gpu, context->channel)
                                           : sim_work_done(context->gpu, context->channel, last, NULL);
    return done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

EXPORT CUresult cuStreamQuery(CUstream stream)
{
    return query(LEGACY_STREAM(stream));
}

EXPORT CUresult cuStreamQuery_ptsz(CUstream stream)
{
    return query(PER_THREAD_STREAM(stream));
}

enum field { FIELD_CONTEXT, FIELD_FLAGS, FIELD_PRIORITY, FIELD_ID };

static CUresult get(CUstream handle, enum field field, void *out)
{
    ENTER_CONTEXT(context);
    CUstream stream;
    REQUIRE(out, CUDA_ERROR_INVALID_VALUE);
    CUresult result = stream_resolve(context, handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    switch (field) {
    case FIELD_CONTEXT: *(CUcontext *)out = stream->green ? stream->green : stream->context; break;
    case FIELD_FLAGS: *(unsigned *)out = stream->flags; break;
    case FIELD_PRIORITY: *(int *)out = stream->priority; break;
    case FIELD_ID: *(unsigned long long *)out = stream->id; break;
    }
    return CUDA_SUCCESS;
}

#define GETTER(name, type, field)                       \
    EXPORT CUresult name(CUstream stream, type *out)    \
    {                                                   \
        return get(LEGACY_STREAM(stream), field, out);  \
    }                                                   \
    EXPORT CUresult name##_ptsz(CUstream stream, type *out) \
    {                                                   \
        return get(PER_THREAD_STREAM(stream), field, out); \
    }

GETTER(cuStreamGetCtx, CUcontext, FIELD_CONTEXT)
GETTER(cuStreamGetFlags, unsigned, FIELD_FLAGS)
GETTER(cuStreamGetPriority, int, FIELD_PRIORITY)
GETTER(cuStreamGetId, unsigned long long, FIELD_ID)

/* Only checks its arguments: in the simulation managed memory is always visible everywhere. */
static CUresult attach(CUstream handle, CUdeviceptr pointer, unsigned flags)
{
    ENTER_CONTEXT(context);
    CUstream stream;
    struct block block;
    int device;
    REQUIRE(flags == 1 || flags == 2 || flags == 4, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(memory_find(pointer, &block, &device) && block.kind == BLOCK_MANAGED, CUDA_ERROR_INVALID_VALUE);
    return stream_resolve(context, handle, &stream);
}

EXPORT CUresult cuStreamAttachMemAsync(CUstream stream, CUdeviceptr pointer, size_t length, unsigned flags)
{
    (void)length;
    return attach(LEGACY_STREAM(stream), pointer, flags);
}

EXPORT CUresult cuStreamAttachMemAsync_ptsz(CUstream stream, CUdeviceptr pointer, size_t length, unsigned flags)
{
    (void)length;
    return attach(PER_THREAD_STREAM(stream), pointer, flags);
}
