/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A simulated driver for fences.c. It knows the context of each event, and aborts the program if an event of a
 * destroyed context is used. It counts the live events, so that leaked events are found. This file also has stubs of
 * the library's functions that fence.c calls.
 */
#ifndef FENCE_DRIVER_H
#define FENCE_DRIVER_H

#include "check.h"
#include "compute/limiter.h"
#include "context/context.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- the driver ------------------------------------------------------------------------------------------------ */

struct CUctx_st {
    bool alive;
    CUresult broken;
    struct CUevent_st *events;
};
struct CUevent_st {
    struct CUevent_st *next;
    CUcontext context;
    double ms; /* GPU time at which the event was recorded; negative if it was not recorded */
};

enum { POOL = 1024 }; /* The most unused events that the library keeps for a context. */

static bool capturing, relaxes = true;
static int relaxed; /* 1 if the thread's capture mode is RELAXED */
static CUcontext current;
static CUresult record_answer, time_answer;
static double gpu_ms = 1; /* GPU time that the next recorded event gets. */
static double done_ms = 1e9; /* Events recorded after this GPU time are still pending. */
static int live_events;

static CUresult use(CUevent event)
{
    CHECK(event->context->alive);
    return event->context->broken;
}

static CUresult create(CUevent *event, unsigned flags)
{
    (void)flags;
    CHECK(current && current->alive);
    if (current->broken)
        return current->broken;
    *event = malloc(sizeof **event);
    **event = (struct CUevent_st){.next = current->events, .context = current, .ms = -1};
    current->events = *event;
    live_events++;
    return CUDA_SUCCESS;
}

static CUresult destroy(CUevent event)
{
    CHECK(event->context->alive);
    struct CUevent_st **link = &event->context->events;
    while (*link && *link != event)
        link = &(*link)->next;
    CHECK(*link == event);
    *link = event->next;
    free(event);
    live_events--;
    return CUDA_SUCCESS;
}

static CUresult record(CUevent event, CUstream stream)
{
    (void)stream;
    CHECK(!capturing); /* In the real driver this event would become a node of the program's graph. */
    CUresult status = use(event);
    if (status == CUDA_SUCCESS && (status = record_answer) == CUDA_SUCCESS)
        event->ms = gpu_ms;
    return status;
}

static int queries; /* Number of event queries. */

static CUresult query(CUevent event)
{
    CUresult status = use(event);
    CHECK(relaxed == 1 && event->ms >= 0);
    queries++;
    return status ? status : event->ms <= done_ms ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

static CUresult elapsed(float *ms, CUevent from, CUevent to)
{
    CUresult status = use(from) ? use(from) : use(to);
    CHECK(relaxed == 1 && to->ms >= 0);
    queries++;
    if (status || (status = time_answer))
        return status;
    if (from->ms > done_ms || to->ms > done_ms)
        return CUDA_ERROR_NOT_READY;
    *ms = (float)(to->ms - from->ms);
    return CUDA_SUCCESS;
}

static CUcontext pushed;
static CUresult push(CUcontext context)
{
    if (!context || !context->alive)
        return CUDA_ERROR_INVALID_CONTEXT;
    pushed = current;
    current = context;
    return CUDA_SUCCESS;
}

static CUresult pop(CUcontext *context)
{
    *context = current;
    current = pushed;
    return CUDA_SUCCESS;
}

static CUcontext begin_context(void)
{
    CUcontext context = calloc(1, sizeof *context);
    context->alive = true;
    return current = context;
}

/* Destroys a context. Like the real driver, it also destroys the context's events. */
static void end_context(CUcontext context)
{
    while (context->events)
        destroy(context->events);
    context->alive = false;
}

/* --- stubs of the rest of the library ---------------------------------------------------------------------- */

void *vgpu_real[FUNCTION_COUNT];
struct costs vgpu_costs;
static uint64_t clock_ns = 1000 * MS;
static int64_t charged; /* Charged GPU time in ns, with all corrections. */

uint64_t limiter_now(void)
{
    return clock_ns;
}
void limiter_forget_all(void)
{
}
CUcontext green_enters(CUcontext context)
{
    return context; /* In this program no context is a green context. */
}

/* Returns whether a simulated capture is active. The library calls this function before it records an event. */
bool capture_of(CUstream stream, bool per_thread)
{
    (void)stream;
    (void)per_thread;
    return capturing;
}
/* Stub of the function that relaxes the thread's capture mode. If it fails, the library must query no event. */
bool capture_relax(int *mode)
{
    relaxed += relaxes;
    *mode = relaxes ? 0 : -1;
    return relaxes;
}
void capture_restore(int mode)
{
    relaxed -= mode >= 0;
}
void controller_tell(uint64_t now)
{
    (void)now; /* No controller thread starts, because this program calls fence_settle() in its place. */
}
void controller_reset(void)
{
}
void tenant_correct(struct limited *limited, uint64_t predicted, uint64_t real)
{
    (void)limited;
    charged += (int64_t)(real - predicted);
}
struct thread_calls vgpu_threads; /* This table stays empty, because there is no controller thread to wake. */
_Atomic int vgpu_log_level = LOG_ERROR;
void vgpu_log_line(enum log_level level, const char *format, ...)
{
    (void)level;
    (void)format;
}
void lock_wait(struct lock *lock)
{
    (void)lock;
    CHECK(!"a lock is taken twice");
}
void lock_wake(struct lock *lock)
{
    (void)lock;
}

#endif
