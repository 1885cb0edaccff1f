/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fences are timing events that measure how long a segment (a group of launches into one stream) really took. This file
 * records them, only inside the program's launch calls and in the stream of that launch, because later the stream may
 * no longer exist. settle.c reads the times and corrects the charges. A mark is an event with its bookkeeping, and a
 * place is the entry of one context in the list of measured contexts.
 */
#include "place.h"

#include <errno.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* A real driver's queue has room for about a thousand items, and a launch waits while it is full. Events are items too.
 * A program may have queued work that waits for its next launches, so events must leave most of the queue free. A
 * fence that is not yet settled (an open fence) has at most two events in the queue. */
#define OPEN_MAX 128

static struct place *_Atomic places;
struct lock vgpu_place_lock;
static uint64_t serials;
_Atomic unsigned vgpu_open_fences;
static _Atomic uint32_t settled, waiters;
_Atomic bool vgpu_fences_parked;

static uint32_t futex(_Atomic uint32_t *word, int operation, uint32_t value, const struct timespec *timeout)
{
    return (uint32_t)syscall(SYS_futex, word, operation, value, timeout, NULL, 0);
}

bool fence_open(void)
{
    return atomic_load_explicit(&vgpu_open_fences, memory_order_seq_cst) != 0;
}

bool fence_crowded(void)
{
    return atomic_load_explicit(&vgpu_open_fences, memory_order_relaxed) >= OPEN_MAX;
}

/* --- places and marks ---------------------------------------------------------------------------------------- */

struct place *fence_place_after(const struct place *place)
{
    return place ? place->next : atomic_load_explicit(&places, memory_order_acquire);
}

struct place *place_of(CUcontext context)
{
    struct place *place = NULL;
    while ((place = fence_place_after(place)) && place->context != context)
        continue;
    return place;
}

/* Adds a free place to the list. The caller holds vgpu_place_lock, which is not held during the allocation: that may be
 * a function of the program, which may launch. */
static void add_place(void)
{
    lock_drop(&vgpu_place_lock);
    struct place *place = calloc(1, sizeof *place);
    lock_take(&vgpu_place_lock);
    if (!place)
        return;
    place->next = atomic_load_explicit(&places, memory_order_relaxed);
    atomic_store_explicit(&places, place, memory_order_release);
}

/* Returns the context's place, which is made if there is none. The caller holds vgpu_place_lock. NULL: there is no
 * memory. */
static struct place *make_place(CUcontext context)
{
    struct place *place = place_of(context);
    if (!place && !place_of(NULL)) {
        add_place();
        place = place_of(context);
    }
    if (place || !(place = place_of(NULL)))
        return place;
    place->context = context;
    place->serial = ++serials;
    place->last = &place->put;
    return place;
}

static bool usable(void)
{
    return REAL_HAS(cuEventCreate) && REAL_HAS(cuEventRecord) && REAL_HAS(cuEventQuery) && REAL_HAS(cuEventElapsedTime) &&
           REAL_HAS(cuEventDestroy_v2);
}

void fence_drop_mark(struct mark *mark)
{
    if (!mark)
        return;
    lock_take(&vgpu_place_lock);
    struct place *place = mark->place;
    bool alive = mark->serial == place->serial && place->context, held = --mark->holders;
    if (alive && !held) {
        mark->next = place->pool;
        place->pool = mark;
        place->pooled++;
    }
    lock_drop(&vgpu_place_lock);
    /* The driver has destroyed the event together with its context, so only the mark's own memory is freed. */
    if (!alive && !held)
        free(mark);
}

/* Takes an unused mark from the pool, or creates one without an event. NULL: there is no memory. */
static struct mark *take_mark(CUcontext context)
{
    lock_take(&vgpu_place_lock);
    struct place *place = make_place(context);
    struct mark *mark = place ? place->pool : NULL;
    uint64_t serial = place ? place->serial : 0;
    if (mark) {
        place->pool = mark->next;
        place->pooled--;
    }
    lock_drop(&vgpu_place_lock);
    if (place && !mark && (mark = malloc(sizeof *mark)))
        *mark = (struct mark){.place = place, .serial = serial};
    if (mark) {
        mark->holders = 1;
        mark->when = -1;
    }
    return mark;
}

struct mark *fence_mark(CUcontext context, CUstream stream, bool per_thread)
{
    if (!usable() || atomic_load_explicit(&vgpu_fences_parked, memory_order_relaxed) || capture_of(stream, per_thread))
        return NULL;
    struct mark *mark = take_mark(context);
    CUresult status = CUDA_SUCCESS;
    int mode;
    if (!mark)
        return NULL;
    capture_relax(&mode);
    if (!mark->event)
        status = REAL(cuEventCreate)(&mark->event, 0);
    if (status != CUDA_SUCCESS) {
        free(mark);
        mark = NULL;
    } else if (per_thread && REAL_HAS(cuEventRecord_ptsz)) {
        status = REAL(cuEventRecord_ptsz)(mark->event, stream);
    } else {
        status = REAL(cuEventRecord)(mark->event, stream);
    }
    capture_restore(mode);
    if (status == CUDA_SUCCESS)
        return mark;
    fence_drop_mark(mark);
    return NULL;
}

void place_trim(struct place *place, unsigned keep)
{
    for (;;) {
        lock_take(&vgpu_place_lock);
        struct mark *mark = place->pooled > keep ? place->pool : NULL;
        if (mark) {
            place->pool = mark->next;
            place->pooled--;
        }
        lock_drop(&vgpu_place_lock);
        if (!mark)
            return;
        REAL(cuEventDestroy_v2)(mark->event);
        free(mark);
    }
}

/* --- handing over a segment ----------------------------------------------------------------------------------- */

void fence_put(struct limited *limited, struct flow *flow, struct mark *end, bool goes_on)
{
    struct mark *begin = flow->begin;
    struct fence *fence = NULL;
    flow->begin = NULL;
    if (end)
        fence = malloc(sizeof *fence);
    if (fence) {
        *fence = (struct fence){.begin = begin, .end = end, .chain = flow->chain, .segment = flow->segment};
        lock_take(&vgpu_place_lock);
        struct place *place = end->place;
        bool alive = end->serial == place->serial && place->context;
        bool same = begin && begin->serial == end->serial;
        if (!same) /* The begin event belongs to a context that has ended, so the event must not be read. */
            fence->begin = NULL;
        if (alive) {
            end->holders += goes_on;
            place->limited = limited;
            *place->last = fence;
            place->last = &fence->next;
            atomic_fetch_add_explicit(&limited->queued, flow->segment.predicted, memory_order_relaxed);
            atomic_fetch_add_explicit(&vgpu_open_fences, 1, memory_order_seq_cst);
        }
        lock_drop(&vgpu_place_lock);
        if (alive) {
            flow->begin = goes_on ? end : NULL;
            if (!same)
                fence_drop_mark(begin);
            controller_tell(limiter_now());
            return;
        }
        free(fence);
    }
    fence_drop_mark(begin);
    fence_drop_mark(end);
}

/* --- waiting threads ------------------------------------------------------------------------------------------- */

void fence_wake_waiters(void)
{
    atomic_fetch_add_explicit(&settled, 1, memory_order_release);
    if (atomic_load_explicit(&waiters, memory_order_relaxed))
        futex(&settled, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL);
}

uint32_t fence_settled(void)
{
    return atomic_load_explicit(&settled, memory_order_acquire);
}

void fence_wait(uint32_t seen, uint64_t now, uint64_t until)
{
    uint64_t left = until > now ? until - now : 0;
    struct timespec timeout = {.tv_sec = (time_t)(left / 1000000000u), .tv_nsec = (long)(left % 1000000000u)};
    int saved = errno;
    atomic_fetch_add_explicit(&waiters, 1, memory_order_relaxed);
    futex(&settled, FUTEX_WAIT_PRIVATE, seen, &timeout);
    atomic_fetch_sub_explicit(&waiters, 1, memory_order_relaxed);
    errno = saved;
}

void fence_reset(void)
{
    /* A forked child has no driver, no settling thread and none of the parent's events, so it starts without fences. */
    for (struct place *place = NULL, *next; (place = fence_place_after(place)); place->next = next) {
        next = place->next;
        memset(place, 0, sizeof *place);
    }
    atomic_store_explicit(&vgpu_place_lock.word, 0, memory_order_relaxed);
    atomic_store_explicit(&vgpu_open_fences, 0, memory_order_relaxed);
    atomic_store_explicit(&waiters, 0, memory_order_relaxed);
    atomic_store_explicit(&vgpu_fences_parked, false, memory_order_relaxed);
    controller_reset();
}
