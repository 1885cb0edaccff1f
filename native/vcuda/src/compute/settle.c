/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Settles fences, which are timing events after groups of launches: reads the times of finished events and replaces the
 * predicted charge of the launches by the measured time. A place is the entry of one context in the list of measured
 * contexts. All times of a context are counted from one event, its anchor, so that time in which several streams run is
 * counted once. The functions that settle need the lock `settling` of the place.
 */
#include "place.h"

#include "context/context.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#define BLOCKED 16
/* Number of unused marks (events) that a context keeps, because a burst of launches may need hundreds at once, and
 * creating an event costs microseconds. */
#define POOLED 1024
#define UNREADABLE CUDA_ERROR_NOT_FOUND
/* Time that is assigned to the first anchor of a context. It is so high that events recorded up to 1000 s before this
 * anchor have positive times too. */
#define FIRST_NS 1e12
/* The driver returns times in milliseconds as a float. Up to this value a float is exact to a quarter of a microsecond.
 * Beyond this value a newer event becomes the anchor. */
#define ANCHOR_MS 4000.0f

/* Reads when the GPU reached the event, in nanoseconds on the context's time scale, and stores it in mark->when.
 * Returns an error if the GPU has not reached the event, or if the time cannot be read. */
static CUresult read_time(const struct place *place, struct mark *mark)
{
    float ms;
    if (mark->when >= 0)
        return CUDA_SUCCESS;
    CUresult status = place->anchor ? REAL(cuEventElapsedTime)(&ms, place->anchor->event, mark->event) : UNREADABLE;
    if (status == CUDA_SUCCESS)
        mark->when = place->anchor_ns + (double)ms * 1e6;
    return status;
}

/* Returns whether the GPU has reached the fence's end event. If the context has an anchor, one driver call returns both
 * this and the time. */
static CUresult ask(const struct place *place, const struct fence *fence)
{
    CUresult status = read_time(place, fence->end);
    return status == CUDA_SUCCESS || status == CUDA_ERROR_NOT_READY ? status : REAL(cuEventQuery)(fence->end->event);
}

/* Makes an event the anchor of its context, from which further times are counted. */
static void set_anchor(struct place *place, struct mark *mark, double when)
{
    lock_take(&vgpu_place_lock);
    mark->holders++;
    lock_drop(&vgpu_place_lock);
    fence_drop_mark(place->anchor);
    place->anchor = mark;
    place->anchor_ns = mark->when = when;
}

/* Corrects the charge of a fence that the GPU has reached. If the times cannot be read, the segment (the fence's
 * launches) stays charged as predicted. The same holds if the begin event is more than 1000 s older than the first
 * anchor, because its time is then negative. */
static void finish(struct place *place, const struct fence *fence)
{
    struct mark *begin = fence->begin, *end = fence->end;
    if (!place->anchor) {
        set_anchor(place, begin ? begin : end, FIRST_NS);
        read_time(place, end);
    }
    if (begin && read_time(place, begin) == CUDA_SUCCESS && begin->when >= 0 && begin->when <= end->when) {
        uint64_t real = segment_settle(&vgpu_costs, &place->settler, &fence->segment, (uint64_t)begin->when, (uint64_t)end->when);
        tenant_correct(place->limited, fence->segment.predicted, real);
    } else if (end->when > (double)place->settler.frontier) {
        /* The time up to this event is charged as predicted, so other streams must not be charged for it again. */
        place->settler.frontier = (uint64_t)end->when;
    }
    if (end->when - place->anchor_ns >= (double)ANCHOR_MS * 1e6)
        set_anchor(place, end, end->when);
}

/* Removes a fence from the list of unsettled fences, whether it was settled or not. */
static void take_off(struct place *place, struct fence **link)
{
    struct fence *fence = *link;
    fence_drop_mark(fence->begin);
    fence_drop_mark(fence->end);
    atomic_fetch_sub_explicit(&place->limited->queued, fence->segment.predicted, memory_order_relaxed);
    atomic_fetch_add_explicit(&place->limited->passed, 1, memory_order_relaxed);
    atomic_fetch_sub_explicit(&vgpu_open_fences, 1, memory_order_seq_cst);
    *link = fence->next;
    if (!*link)
        place->open_last = link;
    free(fence);
}

/* Moves the fences that launches have added to the list of unsettled fences. */
static void take_in(struct place *place)
{
    if (!place->open)
        place->open_last = &place->open;
    lock_take(&vgpu_place_lock);
    if (place->put) {
        *place->open_last = place->put;
        place->open_last = place->last;
        place->put = NULL;
        place->last = &place->put;
    }
    lock_drop(&vgpu_place_lock);
}

/* Removes all unsettled fences; their segments stay charged as predicted. */
static void take_off_all(struct place *place)
{
    take_in(place);
    while (place->open)
        take_off(place, &place->open);
}

/* Frees the place of a context that has ended or is ending. Another context may get the same handle, and it must not
 * find the old events. */
static void leave_place(struct place *place)
{
    fence_drop_mark(place->anchor);
    place->anchor = NULL;
    for (;;) {
        take_off_all(place);
        lock_take(&vgpu_place_lock);
        if (!place->put)
            break;
        /* Another thread may have launched meanwhile and added a fence, which must be removed too. */
        lock_drop(&vgpu_place_lock);
    }
    struct mark *pool = place->pool;
    place->pool = NULL;
    place->pooled = 0;
    place->context = NULL;
    lock_drop(&vgpu_place_lock);
    for (struct mark *next; pool; pool = next) {
        next = pool->next;
        free(pool);
    }
    place->settler = (struct settler){0};
}

/* Updates the predicted end of this process's work on the device, and returns the time of the next check. If the
 * oldest fence is late, the work after it still counts as queued. Otherwise a program could queue slow kernels
 * without limit. */
static uint64_t predict(struct place *place, bool finished, bool fresh, uint64_t now)
{
    struct limited *limited = place->limited;
    uint64_t queued = atomic_load_explicit(&limited->queued, memory_order_relaxed);
    uint64_t oldest = place->open ? place->open->segment.predicted : 0;
    uint64_t until = now + queued, known = atomic_load_explicit(&limited->busy_until, memory_order_relaxed);
    if (finished || fresh) {
        place->soon = FENCE_SOON_NS;
        place->due = now + oldest;
    } else if (now >= place->due && place->soon < FENCE_POLL_NS) {
        place->soon *= 2;
    }
    if (queued && !finished)
        until = now + place->soon + (queued > oldest ? queued - oldest : 0);
    if (!queued || finished || until >= known) {
        atomic_store_explicit(&limited->busy_until, until, memory_order_relaxed);
        /* A value of 0 tells the arbiter (the node's service that divides a GPU's time) that this process has no queued
         * work. */
        __atomic_store_n(limited->busy_lane, queued ? until : 0, __ATOMIC_RELAXED);
    }
    if (!place->open)
        return UINT64_MAX;
    uint64_t all = now + (queued < FENCE_LOOK_NS ? queued : FENCE_LOOK_NS);
    uint64_t again = now >= place->due ? now + place->soon : all > place->due ? all : place->due;
    return again > now + FENCE_SOON_NS ? again : now + FENCE_SOON_NS;
}

/* Settles the finished fences in the order in which they were recorded, and returns their number. If the GPU has not
 * reached a fence, later fences of the same flow (the launches of a thread into one stream) wait. The context is
 * current. `safe` is true if the driver calls cannot break a stream capture. */
static unsigned settle_open(struct place *place, bool safe)
{
    uint64_t blocked[BLOCKED];
    unsigned blocked_count = 0, finished = 0;
    for (struct fence **link = &place->open, *fence; (fence = *link);) {
        bool waits = blocked_count == BLOCKED;
        for (unsigned i = 0; i < blocked_count && !waits; i++)
            waits = blocked[i] == fence->chain;
        CUresult status = waits ? CUDA_ERROR_NOT_READY : safe ? ask(place, fence) : UNREADABLE;
        if (status == CUDA_ERROR_NOT_READY) {
            if (!waits)
                blocked[blocked_count++] = fence->chain;
            link = &fence->next;
            continue;
        }
        /* If the status is not CUDA_SUCCESS, the context is in an error state, or the driver may not be called now.
         * Then the predicted charge stays. */
        if (status == CUDA_SUCCESS)
            finish(place, fence);
        take_off(place, link);
        finished++;
    }
    return finished;
}

static uint64_t settle(struct place *place, uint64_t now, bool *did)
{
    bool had = place->open != NULL;
    int mode;
    CUcontext unused;
    take_in(place);
    if (!place->open)
        return UINT64_MAX;
    unsigned finished = 0;
    bool safe = capture_relax(&mode);
    /* If the context cannot be entered, it has ended together with its events, so their handles must not be used. */
    bool entered = REAL(cuCtxPushCurrent_v2)(green_enters(place->context)) == CUDA_SUCCESS;
    if (entered) {
        finished = settle_open(place, safe);
        place_trim(place, POOLED);
        REAL(cuCtxPopCurrent_v2)(&unused);
    } else {
        leave_place(place);
    }
    capture_restore(mode);
    *did = finished || !entered;
    return predict(place, *did, !had, now);
}

uint64_t fence_settle_place(struct place *place, uint64_t now, bool *did)
{
    *did = false;
    if (!place->limited || !lock_try(&place->settling))
        return UINT64_MAX;
    /* The flag is checked under the lock, because fence_park first sets the flag and then waits for the lock. */
    uint64_t again = atomic_load_explicit(&vgpu_fences_parked, memory_order_seq_cst) ? UINT64_MAX : settle(place, now, did);
    lock_drop(&place->settling);
    return again;
}

void fence_settle_context(CUcontext context, uint64_t now)
{
    lock_take(&vgpu_place_lock);
    struct place *place = place_of(context);
    lock_drop(&vgpu_place_lock);
    bool did;
    if (place)
        fence_settle_place(place, now, &did);
}

bool fence_park(uint64_t patience_ns)
{
    const struct timespec pause = {.tv_nsec = 1000000};
    uint64_t waited = 0; /* Time waited so far, for all places together. */
    bool quiet = true;
    atomic_store_explicit(&vgpu_fences_parked, true, memory_order_seq_cst);
    for (struct place *place = NULL; (place = fence_place_after(place));) {
        bool mine;
        for (; !(mine = lock_try(&place->settling)) && waited < patience_ns; waited += MS)
            clock_nanosleep(CLOCK_MONOTONIC, 0, &pause, NULL);
        if (mine)
            lock_drop(&place->settling);
        quiet &= mine;
    }
    return quiet;
}

/* Destroys the events of a context before it ends. Normally the driver frees them with the context. But if it refuses
 * to end the context, the events would remain without a user. */
static void destroy_events(struct place *place)
{
    CUcontext unused;
    if (REAL(cuCtxPushCurrent_v2)(green_enters(place->context)) != CUDA_SUCCESS)
        return;
    take_off_all(place);
    fence_drop_mark(place->anchor);
    place->anchor = NULL;
    place_trim(place, 0);
    REAL(cuCtxPopCurrent_v2)(&unused);
}

/* Returns true if the place still belongs to the same context. Another thread may have removed that context, and a new
 * context may use the place. */
static bool still(const struct place *place, uint64_t serial)
{
    lock_take(&vgpu_place_lock);
    bool same = place->context && place->serial == serial;
    lock_drop(&vgpu_place_lock);
    return same;
}

void fence_context_leaving(struct leaving *leaving)
{
    lock_take(&vgpu_place_lock);
    struct place *place = place_of(leaving->context);
    uint64_t serial = place ? place->serial : 0;
    lock_drop(&vgpu_place_lock);
    if (place) {
        lock_take(&place->settling);
        uint64_t now = limiter_now();
        bool did, asks = !atomic_load_explicit(&vgpu_fences_parked, memory_order_seq_cst);
        if (asks && still(place, serial))
            settle(place, now, &did);
        if (asks && still(place, serial))
            destroy_events(place);
        if (still(place, serial))
            leave_place(place);
        if (place->limited)
            predict(place, true, false, now);
        lock_drop(&place->settling);
        fence_wake_waiters();
    }
    limiter_forget_all();
}
