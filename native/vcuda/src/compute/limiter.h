/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Internals of the compute limiter, which keeps a container to its share of the GPU's time. A fence is a timing event
 * at the end of a group of launches. The arbiter, a service on the node, divides a GPU's time among the containers: its
 * gpu page says when the container may launch. The tenant page has the container's balance of GPU time; the tenant (the
 * container's user) can write it.
 *
 * launch.c is the fast path, which admits most launches with a table look-up and a sum, without a system call or a
 * shared write. limiter.c is the slow path, with charges, waits and fences. settle.c replaces the predicted charge of
 * launches by their measured GPU time. tenant.c maps the two pages; only the arbiter writes the gpu page.
 */
#ifndef VGPU_LIMITER_H
#define VGPU_LIMITER_H

#include "fence.h"
#include "account/account.h"
#include "process.h"

/* --- tenant.c: the limiter's state of a device ------------------------------------------------------------ */

struct limited {
    const struct device *device;
    /* Balance of GPU time of the whole container, in the tenant page. If there is no tenant page, the balance of this
     * process alone. */
    struct vgpu_tenant_device *tenant;
    /* The gpu page, in which the arbiter says when this container may launch; NULL if there is none. */
    _Atomic(const struct vgpu_gpu_page *) page;

    /* Balance of GPU time that only this process changes, so that other processes cannot falsify it. */
    struct vgpu_tenant_device own;
    /* Where this process publishes `busy_until` for the arbiter. */
    uint64_t *busy_lane;
    /* Predicted end of this process's queued work. */
    _Atomic uint64_t busy_until;
    /* Predicted GPU time (ns) of the launches whose fences are not settled yet. */
    _Atomic uint64_t queued;
    /* Number of settled fences. */
    _Atomic uint32_t passed;
    /* True while a waiting launch polls whether the queued work is finished. */
    _Atomic bool watched;
    /* Time of the last search for a missing gpu page. */
    _Atomic uint64_t looked;
};
/* Returns the limiter's state of a device. The first call for a device opens the tenant page and the gpu page. */
struct limited *tenant_limited(const struct device *device);
/* Opens the gpu page if it was missing, at most once a second. */
void tenant_look_again(struct limited *limited, uint64_t now);
/* Copies the gpu page consistently. Returns false if there is no page or the arbiter has not updated it for 200 ms. */
bool tenant_page(const struct limited *limited, uint64_t now, struct vgpu_gpu_page *page);
/* Any process of the container can write the tenant page. So each charge also goes to `own`, and the lower of the two
 * balances counts: a false page can only reduce what a process gets. */
void tenant_charge(struct limited *limited, uint64_t ns);
void tenant_correct(struct limited *limited, uint64_t predicted, uint64_t real);
int64_t tenant_balance(struct limited *limited, uint64_t now, uint32_t rate_ppm, bool busy);
void tenant_reset(void);

/* --- limiter.c: the slow path -------------------------------------------------------------------------- */

/* Number of streams of a thread whose launches are measured. Launches into more streams displace each other's flows. */
#define FLOWS 16u
/* Number of flows in thread-local memory, which is taken from each thread's stack. The others are allocated when a
 * thread uses more streams. Its segments are then shorter, so that its unfinished segments together have as much work
 * as those of this number of streams. */
#define FLOWS_NEAR 4u

/* A flow is the launches of one thread into one stream since the last fence. */
struct flow {
    uintptr_t stream; /* Stream of the flow, as returned by flow_stream(). */
    /* begin: event at which the segment begins. It is the end event of the segment before, or an event that was
     * recorded before the first launch. NULL if no event could be recorded. */
    struct mark *begin;
    uint64_t began; /* began: time at which the first launch was admitted. */
    /* displaced: true if this flow replaced another stream's flow, whose segment had few launches, and has not ended a
     * segment since. */
    bool displaced;
    uint64_t chain;
    struct segment segment;
};

struct thread_state {
    /* Equals the sequence number of the limits file, with the lowest bit set, if the thread's device has no compute
     * limit in this version of the file. With several limits files the highest bit is inverted. */
    uint32_t off;
    /* While this equals vgpu_launch_epoch, the fields below describe the thread's current context. */
    uint32_t ready;
    /* ticks: assumed time of the last launch, minus `behind`. Reading the counter limiter_ticks() costs time, so only
     * some launches read it. Each of the others is assumed to come one `gap` after the launch before. If launches come
     * faster, the assumed time is later than the real time. `behind` is subtracted so that the difference to a new
     * reading is still not negative. */
    uint32_t ticks;
    /* gap: if the launches since the last reading are on average further apart than this (in ticks), the stream may
     * have been idle in between. */
    uint32_t gap;
    /* behind: LIMITER_GRANTS times `gap`, the most by which the assumed time can be later than the real time. window:
     * `behind` plus one `gap`. A reading later than `ticks` plus `window` is more than one gap after the assumed time,
     * so the stream may have been idle. */
    uint32_t behind, window;
    /* open: true if nothing throttled the container when this thread last took the slow path. Then longer pauses are
     * accepted, so `gap` is longer. */
    bool open;
    /* segment_ns: predicted work after which a segment (the launches of a flow up to its fence) ends. */
    uint64_t segment_ns;
    struct flow *current;    /* current: flow of the last launch. */
    struct limited *limited;
    CUcontext context;
    uint64_t number; /* Serial number of the thread. */
    uint32_t segments;
    uint32_t seen; /* seen: value of `ready` before `ready` was cleared. It is restored if the context is unchanged. */
    /* stalled: usually 0. A launch that waits while no queued work finishes for long is let through in the end. Then
     * this is set to limited->passed plus 1. As long as limited->passed stays the same, the next launches are let
     * through after a much shorter wait. */
    uint32_t stalled;
    uint64_t calibration_ns;
    uint32_t calibration_ticks;
    uint32_t used;   /* used: number of flows in use. They are the first ones. */
    uint32_t random; /* random: pseudo-random number that selects the flow to replace if all are in use. */
    struct flow near[FLOWS_NEAR], *far; /* far: the other FLOWS - FLOWS_NEAR flows, or NULL. */
};
/* initial-exec: the library is loaded at program start, and the fast path must not call __tls_get_addr. */
extern __thread struct thread_state vgpu_thread __attribute__((tls_model("initial-exec")));
/* Changes when a context ends or a capture begins, so that each thread checks its state again. It is never 0. */
extern _Atomic uint32_t vgpu_launch_epoch;
extern struct costs vgpu_costs;

/* Reads the processor's counter of constant rate, without a system call. The counter wraps around within seconds, so a
 * long pause may be missed. Each missed pause makes one measurement a little less accurate. */
static inline uint32_t limiter_ticks(void)
{
#if defined(__x86_64__)
    uint32_t low;
    /* The compiler's builtin would first join the two halves of the counter, which costs instructions. */
    __asm__ volatile("rdtsc" : "=a"(low) : : "rdx");
    return low;
#elif defined(__aarch64__)
    uint64_t ticks;
    __asm__ volatile("mrs %0, cntvct_el0" : "=r"(ticks));
    return (uint32_t)ticks;
#else
    return 0;
#endif
}

/* The largest number of launches between two readings of the counter. In each flow, at least one of
 * SEGMENT_LOOK_LAUNCHES launches reads it (segment_looks). */
#define LIMITER_GRANTS (FLOWS * (SEGMENT_LOOK_LAUNCHES - 1))
static inline void limiter_set_gap(struct thread_state *thread, uint32_t gap)
{
    gap *= thread->open ? SEGMENT_OPEN : 1;
    thread->gap = gap;
    thread->behind = LIMITER_GRANTS * gap;
    thread->window = thread->behind + gap;
}

static inline void limiter_unlooked(struct thread_state *thread)
{
    thread->ticks += thread->gap;
}

/* Called with a new reading of the counter. Returns false if the launches since the last reading were on average more
 * than a gap apart. */
static inline bool limiter_looked(struct thread_state *thread, uint32_t ticks)
{
    uint32_t passed = ticks - thread->ticks;
    if (passed > thread->window)
        return false;
    passed -= thread->behind;
    /* Prevents the compiler from keeping values from memory in registers, which it would have to save on the stack. */
    __asm__("" : "+r"(passed) : : "memory");
    thread->ticks += passed;
    return true;
}

/* Returns the program's stream handle as a number. For functions of the per-thread API an extra bit is set, because
 * there the same handle of the default stream means a different stream in each thread. */
#define FLOW_PER_THREAD ((uintptr_t)1 << (sizeof(uintptr_t) * 8 - 1))
static inline uintptr_t flow_stream(CUstream stream, bool per_thread)
{
    return (uintptr_t)stream | (per_thread ? FLOW_PER_THREAD : 0);
}

static inline struct flow *flow_at(struct thread_state *thread, unsigned index)
{
    return index < FLOWS_NEAR ? &thread->near[index] : &thread->far[index - FLOWS_NEAR];
}

/* Returns the flow of a stream, as returned by flow_stream(); NULL if the thread has none. */
static inline struct flow *flow_find(struct thread_state *thread, uintptr_t stream)
{
    for (unsigned i = 0; i < thread->used; i++)
        if (flow_at(thread, i)->stream == stream)
            return flow_at(thread, i);
    return NULL;
}

/* State of one launch between limiter_before(), which may wait, and limiter_after(), which gets the driver's return
 * value. */
struct ticket {
    struct flow *flow;
    unsigned item;
    uint64_t ns;
    bool fence_after;
};
void limiter_before(struct ticket *ticket, uint32_t key, CUstream stream, bool per_thread);
void limiter_after(struct ticket *ticket, CUresult status);
/* Called when the thread's current context has changed or may have changed, so that the thread checks it at its next
 * launch. */
void limiter_forget_thread(void);
/* Called after a context has ended. The next context on the thread's stack of contexts is now current, perhaps on
 * another device. */
void limiter_context_left(struct leaving *leaving);
/* Called when the current context of any thread may have changed. */
void limiter_forget_all(void);
void limiter_reset(void);
uint64_t limiter_now(void);

/* --- capture.c ------------------------------------------------------------------------------------------- */

/* Returns true if the stream is being captured. Then the limiter must not record an event there, and neither charges
 * nor throttles. */
bool capture_of(CUstream stream, bool per_thread);

#endif
