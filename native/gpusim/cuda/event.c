/* SPDX-License-Identifier: Apache-2.0 */
/* Records events in streams, reads their time of completion, and waits for them. */
#include "event.h"
#include "op.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define BUCKETS 256
#define SEQ_MASK (((uint64_t)1 << 40) - 1)

struct event_table {
    CUevent buckets[BUCKETS];
};

static CUevent *bucket(CUcontext context, uint64_t id)
{
    return &context->events->buckets[id % BUCKETS];
}

/* Called before the queue entry of a recorded event is overwritten. Stores the completion time in the event. */
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
            event->magic = 0; /* A stale handle must stay readable, so that it can be refused. */
    free(context->events);
    context->events = NULL;
}

CUresult event_check(CUevent event)
{
    return event && event->magic == EVENT_MAGIC ? context_check(event->context) : CUDA_ERROR_INVALID_HANDLE;
}

CUresult event_new(CUcontext context, unsigned flags, CUevent *out)
{
    CUevent event = calloc(1, sizeof *event);
    REQUIRE(event, CUDA_ERROR_OUT_OF_MEMORY);
    *event = (struct CUevent_st){.magic = EVENT_MAGIC, .flags = flags, .context = context, .shared_fd = -1,
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

EXPORT CUresult cuEventCreate(CUevent *out, unsigned flags)
{
    ENTER_CONTEXT(context);
    REQUIRE(out && flags <= 7 && (!(flags & EVENT_INTERPROCESS) || flags & EVENT_DISABLE_TIMING),
            CUDA_ERROR_INVALID_VALUE);
    return event_new(context, flags, out);
}

static CUresult destroy(CUevent event)
{
    ENTER();
    CUresult result = event_check(event);
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
    if (event->shared) {
        munmap(event->shared, 4096);
        close(event->shared_fd);
    }
    free(event);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventDestroy_v2(CUevent event)
{
    return destroy(event);
}

EXPORT CUresult cuEventDestroy(CUevent event)
{
    return destroy(event);
}

CUresult event_record_now(CUevent event, CUstream stream)
{
    CUresult result = event_check(event);
    if (result != CUDA_SUCCESS)
        return result;
    struct sim_work mark = {.kind = SIM_WORK_MARK, .tag = event->id};
    uint64_t seq;
    event->capture = 0;
    result = stream_submit(stream, &mark, &seq);
    if (result == CUDA_SUCCESS) {
        pthread_mutex_lock(&event->context->mutex);
        event->seq = seq;
        event->finish = 0;
        pthread_mutex_unlock(&event->context->mutex);
        if (event->shared)
            atomic_store(&event->shared->place, (uint64_t)event->context->gpu << 56 |
                                                    (uint64_t)event->context->channel << 40 | (seq & SEQ_MASK));
    }
    return result;
}

struct place {
    int gpu, channel;
    /* Number of the queue item; 0 if the event was never recorded. */
    uint64_t seq;
    /* Time of completion; 0 if unknown. */
    uint64_t finish;
};

static struct place place_of(CUevent event)
{
    if (event->shared) {
        uint64_t word = atomic_load(&event->shared->place);
        return (struct place){.gpu = (int)(word >> 56), .channel = (int)(word >> 40 & 0xffff), .seq = word & SEQ_MASK};
    }
    struct place place = {.gpu = event->context->gpu, .channel = event->context->channel};
    pthread_mutex_lock(&event->context->mutex);
    place.seq = event->seq;
    place.finish = event->finish;
    pthread_mutex_unlock(&event->context->mutex);
    return place;
}

CUresult event_wait_now(CUevent event, CUstream stream)
{
    CUresult result = event_check(event);
    if (result != CUDA_SUCCESS)
        return result;
    struct place at = place_of(event);
    if (!at.seq || at.finish)
        return CUDA_SUCCESS;
    struct sim_work wait = {.kind = SIM_WORK_WAIT, .dep_seq = at.seq, .dep_gpu = (uint8_t)at.gpu,
                            .dep_channel = (uint16_t)at.channel};
    return stream_submit(stream, &wait, NULL);
}

static CUresult record(CUevent event, CUstream handle)
{
    ENTER_CONTEXT(context);
    CUstream stream;
    CUresult result = event_check(event);
    if (result == CUDA_SUCCESS)
        result = stream_resolve(context, handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (stream->context != event->context) {
        capture_spoil(stream);
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (stream->capture)
        return capture_event(stream, &event->node, &event->capture);
    return event_record_now(event, stream);
}

/* True if the event is complete; *when receives the time. */
static bool passed(CUevent event, uint64_t *when)
{
    uint64_t finish;
    struct place at = place_of(event);
    *when = at.finish;
    if (at.finish || !at.seq)
        return true;
    if (!sim_work_done(at.gpu, at.channel, at.seq, &finish))
        return false;
    pthread_mutex_lock(&event->context->mutex);
    if (!event->shared && event->seq == at.seq && !event->finish)
        event->finish = finish;
    *when = event->finish;
    pthread_mutex_unlock(&event->context->mutex);
    return true;
}

EXPORT CUresult cuEventRecord(CUevent event, CUstream stream)
{
    return record(event, LEGACY_STREAM(stream));
}

EXPORT CUresult cuEventRecord_ptsz(CUevent event, CUstream stream)
{
    return record(event, PER_THREAD_STREAM(stream));
}

EXPORT CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned flags)
{
    return flags <= 1 ? record(event, LEGACY_STREAM(stream)) : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuEventRecordWithFlags_ptsz(CUevent event, CUstream stream, unsigned flags)
{
    return flags <= 1 ? record(event, PER_THREAD_STREAM(stream)) : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuEventQuery(CUevent event)
{
    ENTER();
    uint64_t when;
    CUresult result = event_check(event);
    if (result != CUDA_SUCCESS)
        return result;
    if (event->capture)
        return capture_asked(event->capture);
    REQUIRE(capture_forbids() == CUDA_SUCCESS, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    return passed(event, &when) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

EXPORT CUresult cuEventSynchronize(CUevent event)
{
    ENTER();
    CUresult result = event_check(event);
    if (result != CUDA_SUCCESS)
        return result;
    if (event->capture)
        return capture_asked(event->capture);
    REQUIRE(capture_forbids() == CUDA_SUCCESS, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    struct place at = place_of(event);
    if (!at.seq || at.finish)
        return CUDA_SUCCESS;
    if (!sim_work_wait(at.gpu, at.channel, at.seq, NULL)) {
        result = event_check(event);
        return result == CUDA_SUCCESS ? CUDA_ERROR_UNKNOWN : result;
    }
    pools_trim_if_due(event->context->device);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end)
{
    ENTER();
    uint64_t from, to;
    REQUIRE(milliseconds, CUDA_ERROR_INVALID_VALUE);
    CUresult result = event_check(start) ? event_check(start) : event_check(end);
    if (result != CUDA_SUCCESS)
        return result;
    REQUIRE(start->seq && end->seq && !(start->flags & 2) && !(end->flags & 2), CUDA_ERROR_INVALID_HANDLE);
    if (!passed(start, &from) || !passed(end, &to))
        return CUDA_ERROR_NOT_READY;
    double microseconds = ((double)to - (double)from) / 1000.0;
    /* CUDA's resolution is half a microsecond. */
    *milliseconds = (float)((double)(int64_t)(microseconds * 2.0) / 2000.0);
    return CUDA_SUCCESS;
}

static CUresult wait_event(CUstream handle, CUevent event, unsigned flags)
{
    ENTER_CONTEXT(context);
    CUstream stream;
    REQUIRE(flags <= 1, CUDA_ERROR_INVALID_VALUE);
    CUresult result = event_check(event);
    if (result == CUDA_SUCCESS)
        result = stream_resolve(context, handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (stream->capture || event->capture)
        return capture_wait(stream, event->capture, event->node);
    return event_wait_now(event, stream);
}

EXPORT CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags)
{
    return wait_event(LEGACY_STREAM(stream), event, flags);
}

EXPORT CUresult cuStreamWaitEvent_ptsz(CUstream stream, CUevent event, unsigned flags)
{
    return wait_event(PER_THREAD_STREAM(stream), event, flags);
}
