/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Internals of the compute limiter. A launch is admitted by launch.c (the fast path: a table look-up and a sum, no
 * system call, no shared write) or by limiter.c (the slow path: charges, waits, fences). settle.c replaces a predicted
 * charge by the measured GPU time. tenant.c manages the pages that the container and the arbiter share.
 */
#ifndef VGPU_LIMITER_H
#define VGPU_LIMITER_H

#include "fence.h"
#include "account/account.h"
#include "process.h"

/* --- tenant.c: the limiter's state of a device ------------------------------------------------------------ */

struct limited {
    const struct device *device;
    /* The container's bucket. Without a tenant page it is this process's bucket. */
    struct vgpu_tenant_device *tenant;
    _Atomic(const struct vgpu_gpu_page *) page; /* NULL if there is no gpu page. */

    /* A bucket that only this process fills and empties. */
    struct vgpu_tenant_device own;
    uint64_t *busy_lane;
    /* Predicted end of this process's queued work. */
    _Atomic uint64_t busy_until;
    /* Predicted GPU time (ns) of the work before unfinished fences. */
    _Atomic uint64_t queued;
    /* Number of finished fences. */
    _Atomic uint32_t passed;
    /* True while a waiting launch polls whether the queued work is finished. */
    _Atomic bool watched;
    /* Time of the last search for the gpu page. */
    _Atomic uint64_t looked;
};
/* Returns the limiter's state of a device. The first call opens the pages. */
struct limited *tenant_limited(const struct device *device);
/* Searches for a missing gpu page, at most once a second. */
void tenant_look_again(struct limited *limited, uint64_t now);
/* Copies the page consistently. Returns false if there is no page or its arbiter is silent. */
bool tenant_page(const struct limited *limited, uint64_t now, struct vgpu_gpu_page *page);
/* Any process of the container can write the tenant page. So the page can only reduce a process's balance: no process
 * gets more than the balance of `own` allows. */
void tenant_charge(struct limited *limited, uint64_t ns);
void tenant_correct(struct limited *limited, uint64_t predicted, uint64_t real);
int64_t tenant_balance(struct limited *limited, uint64_t now, uint32_t rate_ppm, bool busy);
void tenant_reset(void);

/* --- limiter.c: the slow path -------------------------------------------------------------------------- */

#define FLOWS 4u

/* The launches of a thread into one stream since the last fence. */
struct flow {
    uintptr_t stream; /* The value of flow_stream(). */
    bool used;
    /* begin: the last segment's end event, or an event that was recorded before the first launch; NULL if no event could
     * be recorded. */
    struct mark *begin;
    uint64_t began; /* began: time at which the first launch was admitted. */
    uint64_t chain;
    struct segment segment;
};

struct thread_state {
    /* The thread's device has no compute limit if this equals (sequence of the limits file | 1). */
    uint32_t off;
    /* The fields below describe the current context while this equals vgpu_launch_epoch. */
    uint32_t ready;
    /* The last reading of limiter_ticks() minus `behind`, plus one `gap` for each later launch without a reading. */
    uint32_t ticks;
    /* If two launches are more ticks apart than this, the stream may have been idle in between. */
    uint32_t gap;
    uint32_t behind, window; /* behind is LIMITER_GRANTS gaps; window is one gap more. */
    /* open: nothing throttled the container when this thread last took the slow path. Then `gap` is longer. */
    bool open;
    uint64_t segment_ns; /* segment_ns: predicted work after which a segment ends. */
    struct flow *current;    /* current: the flow of the last launch. */
    struct limited *limited;
    CUcontext context;
    uint64_t number; /* Serial number of the thread. */
    uint32_t segments;
    uint32_t seen; /* seen: value of `ready` before the thread's context may have changed. */
    /* stalled: value of `passed` + 1 when a launch was last admitted although no queued work had finished; 0 if that
     * has not happened. */
    uint32_t stalled;
    uint64_t calibration_ns;
    uint32_t calibration_ticks;
    struct flow flow[FLOWS];
};
/* initial-exec: the library is loaded at program start, and the fast path must not call __tls_get_addr. */
extern __thread struct thread_state vgpu_thread __attribute__((tls_model("initial-exec")));
/* This number changes when a context ends or a capture begins, and is never 0. */
extern _Atomic uint32_t vgpu_launch_epoch;
extern struct costs vgpu_costs;

/* Reads a counter of constant rate without a system call. The counter wraps within seconds, so a long pause may be
 * missed. Each missed pause costs a little accuracy once. */
static inline uint32_t limiter_ticks(void)
{
#if defined(__x86_64__)
    uint32_t low;
    /* The compiler's builtin would first join the two halves of the counter. */
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

/* A launch that does not read the counter (segment_looks) is assumed to follow its predecessor by one gap. */
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

/* Called with a new reading of the counter. Returns false if launches since the last reading were more than a gap
 * apart. */
static inline bool limiter_looked(struct thread_state *thread, uint32_t ticks)
{
    uint32_t passed = ticks - thread->ticks;
    if (passed > thread->window)
        return false;
    passed -= thread->behind;
    /* Prevents the compiler from keeping values of memory in registers, which it would have to save on the stack. */
    __asm__("" : "+r"(passed) : : "memory");
    thread->ticks += passed;
    return true;
}

/* Returns the program's stream handle, with an extra bit for the per-thread API, where the default stream has the same
 * handle but is a different stream in each thread. */
#define FLOW_PER_THREAD ((uintptr_t)1 << (sizeof(uintptr_t) * 8 - 1))
static inline uintptr_t flow_stream(CUstream stream, bool per_thread)
{
    return (uintptr_t)stream | (per_thread ? FLOW_PER_THREAD : 0);
}

static inline unsigned flow_index(uintptr_t bits)
{
    return (unsigned)(bits ^ bits >> 6 ^ bits >> 12) % FLOWS;
}

/* State of one launch. limiter_before() may wait; limiter_after() gets the driver's return value. */
struct ticket {
    struct flow *flow;
    unsigned item;
    uint64_t ns;
    bool fence_after;
};
void limiter_before(struct ticket *ticket, uint32_t key, CUstream stream, bool per_thread);
void limiter_after(struct ticket *ticket, CUresult status);
/* The thread's current context has changed, or may have changed. */
void limiter_forget_thread(void);
/* Called after a context has ended: the next context on the stack is now current, perhaps on another device. */
void limiter_context_left(struct leaving *leaving);
/* Every thread's current context has changed, or may have changed. */
void limiter_forget_all(void);
void limiter_reset(void);
uint64_t limiter_now(void);

/* --- capture.c ------------------------------------------------------------------------------------------- */

/* Returns true if the stream is being captured. Then nothing may be recorded, charged or throttled. */
bool capture_of(CUstream stream, bool per_thread);
/* Sets the thread's capture mode to RELAXED until capture_restore(), so that the library's calls do not break a
 * capture of another stream. Returns false if that failed. */
bool capture_relax(int *mode);
void capture_restore(int mode);

#endif
