/* SPDX-License-Identifier: Apache-2.0 */
/* Events: a mark in a stream, when it was passed, and waiting for it. */
#include "capture.h"
#include "op.h"

#include <stdlib.h>

#define EVENT_MAGIC 0x45565431u
#define BUCKETS 256

struct CUevent_st {
    uint32_t magic;
    unsigned flags;
    CUcontext context; /* of the stream that recorded it last */
    uint64_t id, seq;  /* seq 0: never recorded */
    uint64_t finish;   /* 0: not known yet */
    struct capture *capture; /* recorded in a capturing stream: a node, not a point in time */
    CUgraphNode node;
    CUevent next;
};

struct event_table {
    CUevent buckets[BUCKETS];
};

static CUevent *bucket(CUcontext context, uint64_t id)
{
    return &context->events->buckets[id % BUCKETS];
}

/* The queue entry of a recorded event gives way to a new one: keep its time. */
void events_keep(CUcontext context, const struct sim_work *overwritten)
{
    pthread_mutex_lock(&context->mutex);
    for (CUevent event = context->events ? *bucket(context, overwritten->tag) : NULL; event; event = event->next)
        if (event->id == overwritten->tag && event->seq == overwritten->seq)
            event->finish = overwritten->finish;
    pthread_mutex_unlock(&context->mutex);
}

void events_destroy(CUcontext context)
{
    for (unsigned i = 0; context->events && i < BUCKETS; i++)
        for (CUevent event = context->events->buckets[i]; event; event = event->next)
            event->magic = 0; /* handles stay readable, to be refused */
    free(context->events);
    context->events = NULL;
}

static CUresult check(CUevent event)
{
    return event && event->magic == EVENT_MAGIC ? context_check(event->context) : CUDA_ERROR_INVALID_HANDLE;
}

EXPORT CUresult cuEventCreate(CUevent *out, unsigned flags);
CUresult cuEventCreate(CUevent *out, unsigned flags)
{
    ENTER_CONTEXT(context);
    REQUIRE(out && flags <= 7 && (!(flags & 4) || flags & 2), CUDA_ERROR_INVALID_VALUE);
    CUevent event = calloc(1, sizeof *event);
    REQUIRE(event, CUDA_ERROR_OUT_OF_MEMORY);
    *event = (struct CUevent_st){.magic = EVENT_MAGIC, .flags = flags, .context = context,
                                 .id = atomic_fetch_add(&driver.next_id, 1)};
    pthread_mutex_lock(&context->mutex);
    if (!context->events)
        context->events = calloc(1, sizeof *context->events);
    if (context->events) {
        event->next = *bucket(context, event->id);
        *bucket(context, event->id) = event;
    }
    bool good = context->events != NULL;
    pthread_mutex_unlock(&context->mutex);
    if (!good) {
        free(event);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = event;
    return CUDA_SUCCESS;
}

static CUresult destroy(CUevent event)
{
    ENTER();
    CUresult result = check(event);
    if (result != CUDA_SUCCESS)
        return result;
    CUcontext context = event->context;
    pthread_mutex_lock(&context->mutex);
    CUevent *link = bucket(context, event->id);
    while (*link && *link != event)
        link = &(*link)->next;
    if (*link)
        *link = event->next;
    event->magic = 0;
    pthread_mutex_unlock(&context->mutex);
    free(event);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventDestroy_v2(CUevent event);
CUresult cuEventDestroy_v2(CUevent event)
{
    return destroy(event);
}

EXPORT CUresult cuEventDestroy(CUevent event);
CUresult cuEventDestroy(CUevent event)
{
    return destroy(event);
}

CUresult event_record_now(CUevent event, CUstream stream)
{
    CUresult result = check(event);
    if (result != CUDA_SUCCESS)
        return result;
    struct sim_work mark = {.kind = SIM_WORK_MARK, .tag = event->id};
    uint64_t seq;
    event->capture = NULL;
    result = stream_submit(stream, &mark, &seq);
    if (result == CUDA_SUCCESS) {
        pthread_mutex_lock(&event->context->mutex);
        event->seq = seq;
        event->finish = 0;
        pthread_mutex_unlock(&event->context->mutex);
    }
    return result;
}

CUresult event_wait_now(CUevent event, CUstream stream)
{
    CUresult result = check(event);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&event->context->mutex);
    uint64_t seq = event->finish ? 0 : event->seq;
    pthread_mutex_unlock(&event->context->mutex);
    if (!seq)
        return CUDA_SUCCESS;
    struct sim_work wait = {.kind = SIM_WORK_WAIT, .dep_seq = seq, .dep_gpu = (uint8_t)event->context->gpu,
                            .dep_channel = (uint16_t)event->context->channel};
    return stream_submit(stream, &wait, NULL);
}

static CUresult record(CUevent event, CUstream handle)
{
    ENTER_CONTEXT(context);
    CUstream stream;
    CUresult result = check(event);
    if (result == CUDA_SUCCESS)
        result = stream_resolve(context, handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    REQUIRE(stream->context == event->context, CUDA_ERROR_INVALID_HANDLE);
    if (stream->capture) {
        event->capture = stream->capture;
        return capture_event(stream, &event->node);
    }
    return event_record_now(event, stream);
}

/* Is it passed, and when? */
static bool passed(CUevent event, uint64_t *when)
{
    uint64_t finish;
    pthread_mutex_lock(&event->context->mutex);
    uint64_t known = event->finish, seq = event->seq;
    pthread_mutex_unlock(&event->context->mutex);
    *when = known;
    if (known || !seq)
        return true;
    if (!sim_work_done(event->context->gpu, event->context->channel, seq, &finish))
        return false;
    pthread_mutex_lock(&event->context->mutex);
    if (event->seq == seq && !event->finish)
        event->finish = finish;
    *when = event->finish;
    pthread_mutex_unlock(&event->context->mutex);
    return true;
}

EXPORT CUresult cuEventRecord(CUevent event, CUstream stream);
CUresult cuEventRecord(CUevent event, CUstream stream)
{
    return record(event, LEGACY_STREAM(stream));
}

EXPORT CUresult cuEventRecord_ptsz(CUevent event, CUstream stream);
CUresult cuEventRecord_ptsz(CUevent event, CUstream stream)
{
    return record(event, PER_THREAD_STREAM(stream));
}

EXPORT CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned flags);
CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned flags)
{
    return flags <= 1 ? record(event, LEGACY_STREAM(stream)) : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuEventRecordWithFlags_ptsz(CUevent event, CUstream stream, unsigned flags);
CUresult cuEventRecordWithFlags_ptsz(CUevent event, CUstream stream, unsigned flags)
{
    return flags <= 1 ? record(event, PER_THREAD_STREAM(stream)) : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuEventQuery(CUevent event);
CUresult cuEventQuery(CUevent event)
{
    ENTER();
    uint64_t when;
    CUresult result = check(event);
    if (result != CUDA_SUCCESS)
        return result;
    REQUIRE(!event->capture, CUDA_ERROR_CAPTURED_EVENT);
    REQUIRE(capture_forbids() == CUDA_SUCCESS, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    return passed(event, &when) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

EXPORT CUresult cuEventSynchronize(CUevent event);
CUresult cuEventSynchronize(CUevent event)
{
    ENTER();
    CUresult result = check(event);
    if (result != CUDA_SUCCESS)
        return result;
    REQUIRE(!event->capture, CUDA_ERROR_CAPTURED_EVENT);
    REQUIRE(capture_forbids() == CUDA_SUCCESS, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    if (!event->seq || event->finish)
        return CUDA_SUCCESS;
    if (!sim_work_wait(event->context->gpu, event->context->channel, event->seq, NULL))
        return context_check(event->context) ? context_check(event->context) : CUDA_ERROR_UNKNOWN;
    pools_trim_if_due(event->context->device);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end);
CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end)
{
    ENTER();
    uint64_t from, to;
    REQUIRE(milliseconds, CUDA_ERROR_INVALID_VALUE);
    CUresult result = check(start) ? check(start) : check(end);
    if (result != CUDA_SUCCESS)
        return result;
    REQUIRE(start->seq && end->seq && !(start->flags & 2) && !(end->flags & 2), CUDA_ERROR_INVALID_HANDLE);
    if (!passed(start, &from) || !passed(end, &to))
        return CUDA_ERROR_NOT_READY;
    double microseconds = ((double)to - (double)from) / 1000.0;
    *milliseconds = (float)((double)(int64_t)(microseconds * 2.0) / 2000.0); /* resolution of half a microsecond */
    return CUDA_SUCCESS;
}

static CUresult wait_event(CUstream handle, CUevent event, unsigned flags)
{
    ENTER_CONTEXT(context);
    CUstream stream;
    REQUIRE(flags <= 1, CUDA_ERROR_INVALID_VALUE);
    CUresult result = check(event);
    if (result == CUDA_SUCCESS)
        result = stream_resolve(context, handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (stream->capture || event->capture)
        return capture_wait(stream, event->capture, event->node);
    return event_wait_now(event, stream);
}

EXPORT CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags);
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags)
{
    return wait_event(LEGACY_STREAM(stream), event, flags);
}

EXPORT CUresult cuStreamWaitEvent_ptsz(CUstream stream, CUevent event, unsigned flags);
CUresult cuStreamWaitEvent_ptsz(CUstream stream, CUevent event, unsigned flags)
{
    return wait_event(PER_THREAD_STREAM(stream), event, flags);
}
