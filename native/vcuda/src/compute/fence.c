/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fences: timing events that say what a segment really took. They are recorded inside the program's own launch calls and
 * on the very stream handle of the launch (never later: the stream may be gone), and looked at by one controller thread,
 * which sleeps while none is open. Times of one context have one base, so that overlap between streams is counted once.
 */
#include "limiter.h"

#include "context/context.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define POLL_NS (200 * US)
#define POLL_SOON_NS (50 * US)
#define CONTEXTS 16
#define CHAINS 256u
#define POOLED 64
#define OPEN_MAX 8192
#define ANCHOR_MS 4000.0f /* a float of milliseconds is exact to a quarter of a microsecond up to here */

struct fence {
    struct fence *next;
    struct limited *limited;
    struct place *place;
    CUevent begin, end;
    uint64_t chain, put;
    struct segment segment;
};

/* A context's base of time, its events at rest, and what has been counted of it. */
static struct place {
    CUcontext context;
    CUevent anchor, pool[POOLED];
    double anchor_ns;
    int pooled;
    bool gone; /* it cannot be entered any more: none of its handles may be used */
    struct settler settler;
} places[CONTEXTS];

/* Where the last segment of a flow ended. One that lost its place counts as it was predicted. */
static struct {
    uint64_t id, end;
} chains[CHAINS];

static struct lock lock;
static struct fence *first, **last = &first, *spare;
static _Atomic unsigned open_count; /* changed under the lock, and looked at without it */
static _Atomic uint32_t settled, sleeping, waiters;
static enum { NOT_TRIED, RUNS, CANNOT } controller_state;

static uint32_t futex(_Atomic uint32_t *word, int operation, uint32_t value, const struct timespec *timeout)
{
    return (uint32_t)syscall(SYS_futex, word, operation, value, timeout, NULL, 0);
}

/* --- places and events; lock held ------------------------------------------------------------------------ */

static struct place *place_of(CUcontext context, bool make)
{
    struct place *free_place = NULL;
    for (int i = 0; i < CONTEXTS; i++) {
        if (places[i].context == context)
            return &places[i];
        if (!places[i].context && !free_place)
            free_place = &places[i];
    }
    if (!make || !free_place)
        return NULL;
    *free_place = (struct place){.context = context};
    return free_place;
}

static void give_back(struct place *place, CUevent event)
{
    if (event && place->pooled < POOLED)
        place->pool[place->pooled++] = event;
    else if (event)
        REAL(cuEventDestroy_v2)(event);
}

static bool usable(void)
{
    return REAL_HAS(cuEventCreate) && REAL_HAS(cuEventRecord) && REAL_HAS(cuEventQuery) && REAL_HAS(cuEventElapsedTime) &&
           REAL_HAS(cuEventDestroy_v2);
}

CUevent fence_mark(CUcontext context, CUstream stream, bool per_thread)
{
    CUevent event = NULL;
    if (!usable())
        return NULL;
    int mode = capture_relax();
    lock_take(&lock);
    struct place *place = place_of(context, true);
    if (place && place->pooled)
        event = place->pool[--place->pooled];
    lock_drop(&lock);
    if (!event && place && REAL(cuEventCreate)(&event, 0) != CUDA_SUCCESS)
        event = NULL;
    CUresult status = CUDA_SUCCESS;
    if (event)
        status = per_thread && REAL_HAS(cuEventRecord_ptsz) ? REAL(cuEventRecord_ptsz)(event, stream)
                                                            : REAL(cuEventRecord)(event, stream);
    if (event && status != CUDA_SUCCESS) {
        fence_drop_mark(context, event);
        event = NULL;
    }
    capture_restore(mode);
    return event;
}

void fence_drop_mark(CUcontext context, CUevent event)
{
    lock_take(&lock);
    struct place *place = place_of(context, false);
    if (place)
        give_back(place, event);
    lock_drop(&lock);
}

/* --- settling; lock held ---------------------------------------------------------------------------------- */

/* When the event was passed, in nanoseconds of the context's base; an event that is passed. */
static double time_of(struct place *place, CUevent event)
{
    float ms;
    if (!place->anchor || REAL(cuEventElapsedTime)(&ms, place->anchor, event) != CUDA_SUCCESS)
        return -1;
    return place->anchor_ns + (double)ms * 1e6;
}

/* From its first event on a context has a base; a later one takes over before floats grow coarse. */
static void move_anchor(struct place *place, CUevent event, double when)
{
    if (place->anchor && when - place->anchor_ns < (double)ANCHOR_MS * 1e6) {
        give_back(place, event);
        return;
    }
    give_back(place, place->anchor);
    place->anchor = event;
    place->anchor_ns = when;
}

static void finish(struct fence *fence)
{
    struct place *place = fence->place;
    struct limited *limited = fence->limited;
    const struct segment *segment = &fence->segment;
    if (!place->anchor) {
        place->anchor = fence->begin ? fence->begin : fence->end;
        place->anchor_ns = 1e12;
        if (fence->begin)
            fence->begin = NULL;
        else
            fence->end = NULL;
    }
    double end = fence->end ? time_of(place, fence->end) : 1e12;
    double begin = fence->begin ? time_of(place, fence->begin) : segment->begun ? place->anchor_ns : -1;
    uint64_t slot = fence->chain % CHAINS;
    if (begin < 0 && chains[slot].id == fence->chain)
        begin = (double)chains[slot].end;
    if (begin < 0 || begin > end)
        begin = end - (double)segment->predicted;
    if (end > 0) {
        uint64_t real = segment_settle(&vgpu_costs, &place->settler, segment, (uint64_t)begin, (uint64_t)end);
        tenant_correct(limited, segment->predicted, real);
        chains[slot].id = fence->chain;
        chains[slot].end = (uint64_t)end;
    }
    give_back(place, fence->begin);
    if (fence->end)
        move_anchor(place, fence->end, end);
}

/* Nobody waits for it any longer, whatever became of it. */
static void take_off(struct fence **link)
{
    struct fence *fence = *link;
    atomic_fetch_sub_explicit(&fence->limited->queued, fence->segment.predicted, memory_order_relaxed);
    atomic_fetch_add_explicit(&fence->limited->passed, 1, memory_order_relaxed);
    *link = fence->next;
    if (!*link)
        last = link;
    fence->next = spare;
    spare = fence;
    atomic_fetch_sub_explicit(&open_count, 1, memory_order_relaxed);
}

/* Places whose context went without a word. A new context may get the same handle, and must not meet the old one's events. */
static void leave_places(void)
{
    for (int i = 0; i < CONTEXTS; i++) {
        bool used = false;
        for (const struct fence *fence = first; places[i].gone && fence && !used; fence = fence->next)
            used = fence->place == &places[i];
        if (places[i].gone && !used)
            memset(&places[i], 0, sizeof places[i]);
    }
}

static void wake_waiters(void)
{
    atomic_fetch_add_explicit(&settled, 1, memory_order_release);
    if (atomic_load_explicit(&waiters, memory_order_relaxed))
        futex(&settled, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL);
}

/* How long this process is still busy on the device, now that more is known. `oldest`: predicted work of the oldest open
 * fence. It may be overdue; those behind it are not done for that, or a program could queue slow kernels without end. */
static void predict(struct limited *limited, bool finished, uint64_t oldest, uint64_t now)
{
    uint64_t queued = atomic_load_explicit(&limited->queued, memory_order_relaxed);
    uint64_t until = now + queued, known = atomic_load_explicit(&limited->busy_until, memory_order_relaxed);
    if (queued && !finished)
        until = now + POLL_SOON_NS + (queued > oldest ? queued - oldest : 0);
    if (queued && !finished && until < known)
        return;
    atomic_store_explicit(&limited->busy_until, until, memory_order_relaxed);
    __atomic_store_n(limited->busy_lane, queued ? until : 0, __ATOMIC_RELAXED); /* 0: the arbiter need not wait */
}

/* Settles in the order of the records; a flow whose fence is not passed yet keeps its later ones waiting. Answers when to
 * look again; UINT64_MAX: nothing is open. */
static uint64_t settle_all(uint64_t now)
{
    uint64_t blocked[16], again = UINT64_MAX;
    unsigned blocked_count = 0, finished = 0;
    bool gone = false;
    struct limited *touched[VGPU_MAX_DEVICES] = {NULL};
    uint64_t oldest[VGPU_MAX_DEVICES] = {0};
    CUcontext current = NULL;
    int mode = capture_relax();
    for (struct fence **link = &first, *fence; (fence = *link);) {
        bool waits = blocked_count == 16;
        for (unsigned i = 0; i < blocked_count && !waits; i++)
            waits = blocked[i] == fence->chain;
        if (!waits && current != fence->place->context) {
            CUcontext unused;
            if (current)
                REAL(cuCtxPopCurrent_v2)(&unused);
            current = REAL(cuCtxPushCurrent_v2)(green_enters(fence->place->context)) == CUDA_SUCCESS ? fence->place->context : NULL;
        }
        /* A context that cannot be entered is gone, and its events with it: their handles must not be used. */
        CUresult status = waits      ? CUDA_ERROR_NOT_READY
                          : !current ? CUDA_ERROR_NO_DEVICE
                                     : REAL(cuEventQuery)(fence->end);
        if (status == CUDA_ERROR_NOT_READY) {
            if (!waits && blocked_count < 16)
                blocked[blocked_count++] = fence->chain;
            touched[fence->limited->device->ledger] = fence->limited;
            if (!oldest[fence->limited->device->ledger])
                oldest[fence->limited->device->ledger] = fence->segment.predicted;
            again = now + POLL_NS;
            link = &fence->next;
            continue;
        }
        touched[fence->limited->device->ledger] = fence->limited;
        if (status == CUDA_SUCCESS) {
            finish(fence);
        } else if (current) { /* the context is in error: what was charged stays charged */
            give_back(fence->place, fence->begin);
            give_back(fence->place, fence->end);
        } else {
            fence->place->gone = gone = true;
        }
        take_off(link);
        finished++;
    }
    if (current) {
        CUcontext unused;
        REAL(cuCtxPopCurrent_v2)(&unused);
    }
    capture_restore(mode);
    for (int i = 0; i < VGPU_MAX_DEVICES; i++) {
        if (!touched[i])
            continue;
        predict(touched[i], finished != 0, oldest[i], now);
        uint64_t until = atomic_load_explicit(&touched[i]->busy_until, memory_order_relaxed);
        if (until > now && until < again)
            again = until;
    }
    if (gone)
        leave_places();
    if (finished)
        wake_waiters();
    return again == UINT64_MAX ? again : again < now + POLL_SOON_NS ? now + POLL_SOON_NS : again;
}

void fence_settle(void)
{
    if (atomic_load_explicit(&open_count, memory_order_relaxed) == 0)
        return;
    lock_take(&lock);
    settle_all(limiter_now());
    lock_drop(&lock);
}

void fence_waited(bool done)
{
    (void)done;
    fence_settle();
}

/* --- the controller thread --------------------------------------------------------------------------------- */

static void *control(void *unused)
{
    int mode = 2; /* RELAXED: a query of ours must not break a capture of the program's */
    (void)unused;
    prctl(PR_SET_NAME, "vgpu-limiter", 0, 0, 0);
    prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
    if (REAL_HAS(cuThreadExchangeStreamCaptureMode))
        REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    for (;;) {
        lock_take(&lock);
        uint64_t now = limiter_now(), again = settle_all(now);
        uint32_t asleep = again == UINT64_MAX;
        atomic_store_explicit(&sleeping, asleep, memory_order_relaxed);
        lock_drop(&lock);
        if (asleep) {
            futex(&sleeping, FUTEX_WAIT_PRIVATE, 1, NULL);
        } else {
            struct timespec until = {.tv_sec = (time_t)(again / 1000000000u), .tv_nsec = (long)(again % 1000000000u)};
            clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
        }
    }
    return NULL;
}

static void start_controller(void)
{
    uint64_t all = ~0ull, before;
    pthread_t thread;
    controller_state = CANNOT;
    if (!vgpu_threads.create)
        return;
    /* The program's signals are not for this thread. By number: pthread_sigmask has a new version in new libraries. */
    syscall(SYS_rt_sigprocmask, SIG_SETMASK, &all, &before, sizeof all);
    if (vgpu_threads.create(&thread, NULL, control, NULL) == 0)
        controller_state = RUNS;
    syscall(SYS_rt_sigprocmask, SIG_SETMASK, &before, NULL, sizeof before);
    if (controller_state == CANNOT)
        vgpu_log(LOG_WARN, "no thread to settle compute time: it counts as predicted until the program waits for the GPU");
}

void fence_put(struct limited *limited, CUcontext context, struct flow *flow, CUevent end)
{
    struct fence *fence = NULL;
    lock_take(&lock);
    struct place *place = end ? place_of(context, true) : NULL;
    if (place && atomic_load_explicit(&open_count, memory_order_relaxed) < OPEN_MAX) {
        fence = spare;
        if (fence)
            spare = fence->next;
        else
            fence = malloc(sizeof *fence);
    }
    if (!fence) {
        if (place || (place = place_of(context, false))) {
            give_back(place, end);
            give_back(place, flow->begin);
        }
        flow->begin = NULL;
        lock_drop(&lock);
        return;
    }
    *fence = (struct fence){.limited = limited, .place = place, .begin = flow->begin, .end = end, .chain = flow->chain,
                            .segment = flow->segment};
    flow->begin = NULL;
    *last = fence;
    last = &fence->next;
    atomic_fetch_add_explicit(&open_count, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&limited->queued, flow->segment.predicted, memory_order_relaxed);
    if (controller_state == NOT_TRIED)
        start_controller();
    bool wake = atomic_load_explicit(&sleeping, memory_order_relaxed);
    atomic_store_explicit(&sleeping, 0, memory_order_relaxed);
    lock_drop(&lock);
    if (wake)
        futex(&sleeping, FUTEX_WAKE_PRIVATE, 1, NULL);
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

void fence_context_leaving(struct leaving *leaving)
{
    CUcontext unused, context = leaving->context;
    lock_take(&lock);
    uint64_t now = limiter_now();
    settle_all(now);
    struct place *place = place_of(context, false);
    /* The driver frees the events with the context; but it may refuse to end it, and they would be there for good. */
    bool entered = place && REAL(cuCtxPushCurrent_v2)(green_enters(context)) == CUDA_SUCCESS;
    for (struct fence **link = &first, *fence; place && (fence = *link);) {
        struct limited *limited = fence->limited;
        if (fence->place != place) {
            link = &fence->next;
            continue;
        }
        if (entered) {
            give_back(place, fence->begin);
            give_back(place, fence->end);
        }
        take_off(link);
        predict(limited, true, 0, now);
    }
    if (entered) {
        for (int i = 0; i < place->pooled; i++)
            REAL(cuEventDestroy_v2)(place->pool[i]);
        if (place->anchor)
            REAL(cuEventDestroy_v2)(place->anchor);
        REAL(cuCtxPopCurrent_v2)(&unused);
    }
    if (place)
        memset(place, 0, sizeof *place);
    wake_waiters();
    lock_drop(&lock);
    limiter_forget_all();
}

void fence_reset(void)
{
    /* A child has no driver, no thread and none of the parent's events. */
    memset(places, 0, sizeof places);
    memset(chains, 0, sizeof chains);
    atomic_store_explicit(&lock.word, 0, memory_order_relaxed);
    first = spare = NULL;
    last = &first;
    atomic_store_explicit(&open_count, 0, memory_order_relaxed);
    atomic_store_explicit(&sleeping, 0, memory_order_relaxed);
    atomic_store_explicit(&waiters, 0, memory_order_relaxed);
    controller_state = NOT_TRIED;
}
