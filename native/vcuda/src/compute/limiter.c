/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The slow path of a launch. It charges the launches since the last fence (timing event), decides whether this launch
 * may start, and waits if it may not. A segment is the group of launches between two fences. The arbiter is the node's
 * service that divides a GPU's time. It writes the gpu page, which shows whether the container's gate is open, that is,
 * whether the container may launch.
 *
 * A launch takes this path after 250 microseconds of predicted work (2 ms while nothing throttles the container; less in
 * a thread that uses more than four streams), after 64 launches, after a pause of the host, or if its kernel was never
 * measured.
 */
#include "limiter.h"

#include "context/context.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define GAP_US 20u
/* One in this many segments consists of a single launch, so that the time of this launch is measured exactly. In a
 * longer segment the stream may have waited for the host most of the time. */
#define SAMPLE 8u
/* A segment with fewer launches than this is short. If another stream's launch ends a short segment, the next segment
 * will probably end in the same way, before its second event is recorded. */
#define FEW 4u
#define STALL_NS (500 * MS)
#define STALL_AGAIN_NS (10 * MS)
#define WAKE_ON 2 /* When the gate opens, each thread that was woken wakes this number of further threads. */

__thread struct thread_state vgpu_thread;
_Atomic uint32_t vgpu_launch_epoch = 1;
struct costs vgpu_costs;

/* Starts with a value that is used until the speed of the counter has been measured. */
static _Atomic uint32_t gap_ticks = GAP_US * 2000;
static _Atomic bool calibrated;

static _Atomic uint64_t thread_count;
static struct lock end_lock;

uint64_t limiter_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Measures the counter's speed from two readings of one thread, 10 to 500 ms apart. */
static void calibrate(struct thread_state *thread, uint32_t ticks, uint64_t now)
{
    if (!atomic_load_explicit(&calibrated, memory_order_relaxed)) {
        uint64_t passed = now - thread->calibration_ns;
        if (passed > 500 * MS) {
            thread->calibration_ns = now;
            thread->calibration_ticks = ticks;
        } else if (passed > 10 * MS) {
            uint64_t counted = ticks - thread->calibration_ticks;
            atomic_store_explicit(&gap_ticks, (uint32_t)(counted * GAP_US * US / passed), memory_order_relaxed);
            atomic_store_explicit(&calibrated, true, memory_order_relaxed);
        }
    }
    limiter_set_gap(thread, atomic_load_explicit(&gap_ticks, memory_order_relaxed));
}

/* --- segments ------------------------------------------------------------------------------------------ */

static void charge(struct limited *limited, struct segment *segment, uint64_t now)
{
    uint64_t uncharged = segment->predicted - segment->charged;
    if (!uncharged)
        return;
    tenant_charge(limited, uncharged);
    uint64_t until = atomic_load_explicit(&limited->busy_until, memory_order_relaxed);
    until = (until > now ? until : now) + uncharged;
    atomic_store_explicit(&limited->busy_until, until, memory_order_relaxed);
    __atomic_store_n(limited->busy_lane, until, __ATOMIC_RELAXED);
}

/* Empties the flow (the launches of a thread into one stream) so that its next launch takes the slow path. */
static void rest(struct flow *flow)
{
    segment_start(&flow->segment);
    flow->segment.predicted = SEGMENT_NS * SEGMENT_OPEN;
}

static struct mark *mark(const struct thread_state *thread, const struct flow *flow)
{
    return fence_mark(thread->context, (CUstream)(flow->stream & ~FLOW_PER_THREAD), (flow->stream & FLOW_PER_THREAD) != 0);
}

/* Ends a segment and charges it as predicted. Records no fence, because this function is not called during a launch
 * into the stream, and the stream may no longer exist. */
static void drop(struct thread_state *thread, struct flow *flow, uint64_t now)
{
    if (flow->segment.count && thread->limited)
        charge(thread->limited, &flow->segment, now);
    fence_drop_mark(flow->begin);
    flow->begin = NULL;
    rest(flow);
}

/* Ends the segments of all flows. The first flow becomes the current one, and lets no launch pass on the fast path. */
static void drop_all(struct thread_state *thread)
{
    uint64_t now = limiter_now();
    for (unsigned i = 0; i < thread->used; i++)
        drop(thread, flow_at(thread, i), now);
    thread->used = 0;
    thread->current = &thread->near[0];
    rest(thread->current);
}

/* Called for a stream that is being captured into a graph. Launches that the fast path counted since the capture began
 * ran nothing. They are charged all the same, because their number is unknown. This number is small, because each
 * further launch into the stream takes the slow path. */
static void captured(struct thread_state *thread, uintptr_t stream)
{
    struct flow *flow = flow_find(thread, stream);
    if (thread->ready && flow)
        drop(thread, flow, limiter_now());
}

/* Ends a segment, charges it and records its fence. `goes_on` means that the next launch of the flow follows at once,
 * so the end of this segment is the begin of the next. If too many fences are open, the segment is charged and goes
 * on. */
static void close_segment(struct thread_state *thread, struct flow *flow, uint64_t now, bool goes_on)
{
    if (!flow->segment.count)
        return;
    charge(thread->limited, &flow->segment, now);
    flow->displaced = false;
    if (fence_crowded()) {
        segment_prolong(&flow->segment);
        return;
    }
    struct mark *end = mark(thread, flow);
    /* The event was recorded now, not at the last launch. The stream may have been idle since that launch, so the host
     * time in between counts as possible idle time. */
    flow->segment.host_ns = limiter_now() - flow->began;
    fence_put(thread->limited, flow, end, goes_on);
    rest(flow);
}

void limiter_forget_thread(void)
{
    struct thread_state *thread = &vgpu_thread;
    if (!thread->ready && !thread->off)
        return;
    /* Programs often set the context that is already current. So unfinished segments are kept, and the next launch ends
     * them only if the context is a different one. */
    if (thread->ready)
        thread->seen = thread->ready;
    thread->ready = 0;
    thread->off = 0;
}

void limiter_context_left(struct leaving *leaving)
{
    (void)leaving;
    limiter_forget_thread();
}

void limiter_forget_all(void)
{
    if (atomic_fetch_add_explicit(&vgpu_launch_epoch, 1, memory_order_acq_rel) == UINT32_MAX)
        atomic_store_explicit(&vgpu_launch_epoch, 1, memory_order_relaxed);
}

/* --- the state of the launching thread and of its streams ------------------------------------------------ */

/* Called at thread exit. Charges the launches since the last fence as predicted. Otherwise a program whose threads are
 * short-lived would not be charged. */
static void at_end(void *state)
{
    struct thread_state *thread = state;
    drop_all(thread);
    free(thread->far);
    thread->far = NULL;
}

/* Registers at_end for this thread. If the program has no pthread functions, it has no other threads, and nothing is
 * registered. */
static void watch_end(struct thread_state *thread)
{
    static pthread_key_t key;
    static thread_set_type set; /* A forked child inherits this value together with the key. */
    static bool tried;
    lock_take(&end_lock);
    if (!tried && vgpu_threads.key_create && vgpu_threads.key_create(&key, at_end) == 0)
        set = vgpu_threads.set;
    tried = true;
    lock_drop(&end_lock);
    if (set)
        set(key, thread);
}

static bool resolve(struct thread_state *thread)
{
    uint32_t epoch = atomic_load_explicit(&vgpu_launch_epoch, memory_order_acquire);
    if (thread->ready == epoch)
        return true;
    CUcontext context;
    CUresult status;
    const struct device *device = device_current(&context, &status);
    if (!device)
        return false;
    struct limited *limited = tenant_limited(device);
    if (thread->seen == epoch && thread->limited == limited && thread->context == context) {
        thread->ready = epoch;
        return true;
    }
    drop_all(thread);
    if (!thread->number) {
        thread->number = atomic_fetch_add_explicit(&thread_count, 1, memory_order_relaxed) + 1;
        watch_end(thread);
    }
    thread->limited = limited;
    thread->context = context;
    thread->ready = epoch;
    return true;
}

static struct flow *flow_of(struct thread_state *thread, uintptr_t stream)
{
    struct flow *flow = flow_find(thread, stream);
    if (flow)
        return thread->current = flow;
    if (thread->used == FLOWS_NEAR && !thread->far)
        thread->far = calloc(FLOWS - FLOWS_NEAR, sizeof *thread->far);
    bool all = thread->used == (thread->far ? FLOWS : FLOWS_NEAR);
    /* Chosen at random, the replaced flow is sometimes that of a stream which no longer exists. Chosen by age, none would
     * ever stay if the program launches into one stream after the other. */
    thread->random = thread->random * 1664525u + 1013904223u;
    flow = thread->current = flow_at(thread, all ? (thread->random >> 16) % thread->used : thread->used++);
    flow->displaced = all && (flow->segment.prolonged || flow->segment.count < FEW);
    drop(thread, flow, limiter_now());
    flow->stream = stream;
    flow->chain = (((uintptr_t)thread->context ^ stream * 31) * 0x9e3779b97f4a7c15ull ^ thread->number * 977);
    return flow;
}

/*
 * Waits until the arbiter changes the gpu page. The arbiter wakes a few waiting threads, and each of them wakes some
 * more. A thread wakes others only if the page has changed, because otherwise two threads would wake each other for
 * ever. If the chain breaks because a process in it was stopped or killed, the others wake at their timeout
 * (LOOK_AGAIN_NS).
 */
static void wait_gate(const struct limited *limited, uint32_t wake, uint64_t now, uint64_t until)
{
    const struct vgpu_gpu_page *page = atomic_load_explicit(&limited->page, memory_order_acquire);
    struct timespec timeout = {.tv_nsec = (long)(until - now)};
    int saved = errno;
    /* The futex is shared with the arbiter process, so the operations are not the _PRIVATE ones. */
    if (page && syscall(SYS_futex, &page->wake, FUTEX_WAIT, wake, &timeout, NULL, 0) == 0 &&
        __atomic_load_n(&page->wake, __ATOMIC_ACQUIRE) != wake)
        syscall(SYS_futex, &page->wake, FUTEX_WAKE, WAKE_ON, NULL, NULL, 0);
    errno = saved;
}

/*
 * Returns true if no queued work has finished for much longer than it should take. The queued work may then depend on
 * what this thread does next (another launch, a callback, another stream's event), so throttling the thread further
 * could last for ever.
 */
static bool stalled(const struct thread_state *thread, uint32_t passed, uint64_t waited)
{
    uint64_t queued = atomic_load_explicit(&thread->limited->queued, memory_order_relaxed);
    return queued && waited > (thread->stalled == passed + 1 ? STALL_AGAIN_NS : STALL_NS + 2 * queued);
}

/* Waits until a launch of this cost may start. Returns pace_exclusive() for the launch. */
static uint64_t admit(struct thread_state *thread, struct flow *flow, uint64_t cost, uint64_t *now)
{
    struct limited *limited = thread->limited;
    bool asked = false, waited = false;
    uint64_t throttled = 0;
    uint64_t began = *now, since = *now;
    uint32_t before = atomic_load_explicit(&limited->passed, memory_order_relaxed);
    for (;;) {
        /* Only one of several waiting launches checks whether the queued work is finished. */
        bool watches = !atomic_exchange_explicit(&limited->watched, true, memory_order_relaxed);
        controller_help(waited);
        uint32_t passed = atomic_load_explicit(&limited->passed, memory_order_relaxed);
        if (passed != before)
            since = *now;
        before = passed;
        bool stuck = stalled(thread, passed, *now - since);
        struct vgpu_gpu_page page = {.gate = VGPU_GATE_NONE};
        unsigned percent = limits_sm_percent(limited->device->uuid, limited->device->nvml_index);
        uint32_t share = limits_core_policy() == VGPU_CORE_DISABLE || !percent ? PPM : percent * (PPM / 100);
        uint32_t seen = fence_settled();
        bool arbiter = tenant_page(limited, *now, &page);
        bool lowered = limits_sm_lowered(limited->device->uuid, limited->device->nvml_index);
        uint32_t rate = pace_rate(share, limits_core_policy() == VGPU_CORE_FORCE, lowered, arbiter, &page);
        uint64_t busy = atomic_load_explicit(&limited->busy_until, memory_order_relaxed), until;
        /* An idle container has a lower maximum balance. That maximum does not apply while a launch waits, so the
         * container loses nothing if the launch's thread wakes late. */
        bool working = waited || bucket_busy_until(limited->tenant) > *now;
        struct pace_view view = {
            .now = *now, .waited = *now - began, .gate = arbiter ? page.gate : VGPU_GATE_NONE, .rate_ppm = rate,
            .turn_start = page.turn_start_ns, .turn_end = page.turn_end_ns,
            .outstanding_max = arbiter && page.outstanding_max_us ? page.outstanding_max_us * US : PACE_OUTSTANDING_NS,
            .busy_until = stuck ? 0 : busy, .watches = watches, .balance = tenant_balance(limited, *now, rate, working)};
        enum pace pace = pace_decide(&view, cost, &until);
        thread->open = view.gate == VGPU_GATE_OPEN && rate == PPM;
        thread->segment_ns = segment_longest(thread->open, view.outstanding_max);
        if (thread->used > FLOWS_NEAR)
            thread->segment_ns = thread->segment_ns * FLOWS_NEAR / thread->used;
        __atomic_store_n(&limited->tenant->active_ns, *now, __ATOMIC_RELAXED);
        if (pace == PACE_GO) {
            if (watches)
                atomic_store_explicit(&limited->watched, false, memory_order_relaxed);
            if (stuck)
                thread->stalled = passed + 1;
            if (asked)
                __atomic_store_n(&limited->tenant->waiting_ns, 0, __ATOMIC_RELAXED);
            if (throttled)
                vgpu_log(LOG_TRACE, "a launch on %s was throttled for %llu us", limited->device->uuid,
                         (unsigned long long)(throttled / US));
            return pace_exclusive(&view, page.flags);
        }
        waited = true;
        /* End the segment now. This gives the launched work an exact end, and shows the arbiter when it is finished. */
        close_segment(thread, flow, *now, false);
        /* The stream may become idle during the wait, so the end of this segment cannot serve as the begin of the
         * next. */
        if (!flow->segment.count) {
            fence_drop_mark(flow->begin);
            flow->begin = NULL;
        }
        if (!arbiter)
            tenant_look_again(limited, *now);
        if (pace == PACE_WAIT_GATE) {
            asked = true;
            __atomic_store_n(&limited->tenant->waiting_ns, *now, __ATOMIC_RELAXED);
            wait_gate(limited, page.wake, *now, until);
        } else {
            fence_wait(seen, *now, until);
        }
        if (watches)
            atomic_store_explicit(&limited->watched, false, memory_order_relaxed);
        limits_control(); /* Read the limits again, so that a live change also applies to a waiting launch. */
        uint64_t then = *now;
        *now = limiter_now();
        /* While nothing throttles the container, the launch waits only for the program's own work, so the wait is not
         * counted as throttling. */
        if (thread->open)
            continue;
        throttled += *now - then;
        /* Add the waited time after each wait, so that little of it is lost if the process is killed during a long
         * wait. */
        __atomic_fetch_add(&limited->tenant->throttled_ns, *now - then, __ATOMIC_RELAXED);
    }
}

/* Returns the value of thread->off for a device without a compute limit. With several limits files no single sequence
 * number shows all changes. So the value is then one that off() (launch.c) never finds, and each launch gets here after
 * vgpu_enter() has compared all files. */
static uint32_t off_now(void)
{
    uint32_t sequence = __atomic_load_n(vgpu_limits_sequence, __ATOMIC_ACQUIRE) | 1;
    return limits_shares() > 1 ? sequence ^ 0x80000000u : sequence;
}

void limiter_before(struct ticket *ticket, uint32_t key, CUstream stream, bool per_thread)
{
    struct thread_state *thread = &vgpu_thread;
    enum control control = vgpu_enter();
    uint32_t off = off_now();
    ticket->flow = NULL;
    if (control == CONTROL_OFF)
        thread->off = off;
    if (control != CONTROL_ON || thread->off == off)
        return;
    if (capture_of(stream, per_thread)) {
        captured(thread, flow_stream(stream, per_thread));
        return;
    }
    if (!resolve(thread))
        return;
    struct limited *limited = thread->limited;
    if (limits_core_policy() == VGPU_CORE_DISABLE || !limits_sm_percent(limited->device->uuid, limited->device->nvml_index)) {
        limiter_forget_thread();
        thread->off = off;
        return;
    }
    if (limits_priority() != 0 && !(__atomic_load_n(&limited->tenant->requests, __ATOMIC_RELAXED) & VGPU_TENANT_LOW))
        __atomic_fetch_or(&limited->tenant->requests, VGPU_TENANT_LOW, __ATOMIC_RELAXED);
    uint64_t now = limiter_now(), cost;
    uint32_t ticks = limiter_ticks();
    bool known;
    struct flow *flow = flow_of(thread, flow_stream(stream, per_thread));
    unsigned item = cost_find(&vgpu_costs, key, &cost, &known);
    calibrate(thread, ticks, now);
    bool alone = !known, gap = ticks - thread->ticks > thread->window;
    if (alone || gap || !flow->segment.known || flow->segment.count >= SEGMENT_LAUNCHES ||
        flow->segment.predicted + cost >= thread->segment_ns)
        close_segment(thread, flow, now, true);
    uint64_t exclusive_ns = admit(thread, flow, cost, &now);
    limiter_set_gap(thread, atomic_load_explicit(&gap_ticks, memory_order_relaxed));
    if (!flow->segment.count) {
        segment_start(&flow->segment);
        flow->segment.exclusive_ns = exclusive_ns;
        flow->began = now;
        alone = alone || ++thread->segments % SAMPLE == 0;
        if (!flow->begin && !(flow->displaced && (!alone || fence_crowded())))
            flow->begin = mark(thread, flow);
    }
    flow->segment.known = flow->segment.known && known;
    *ticket = (struct ticket){.flow = flow, .item = item, .ns = cost, .fence_after = alone || cost >= SEGMENT_NS};
}

void limiter_after(struct ticket *ticket, CUresult status)
{
    struct thread_state *thread = &vgpu_thread;
    struct flow *flow = ticket->flow;
    if (!flow)
        return;
    thread->ticks = limiter_ticks() - thread->behind;
    if (status != CUDA_SUCCESS) {
        drop(thread, flow, limiter_now());
        return;
    }
    segment_add(&flow->segment, ticket->item, ticket->ns);
    if (ticket->fence_after)
        close_segment(thread, flow, limiter_now(), false);
}

void limiter_reset(void)
{
    memset(&vgpu_thread, 0, sizeof vgpu_thread);
    atomic_store_explicit(&end_lock.word, 0, memory_order_relaxed);
    limiter_forget_all();
}
