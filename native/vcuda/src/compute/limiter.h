/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Internals of the compute limiter, which keeps a container to its share of the GPU's time. launch.c admits most
 * launches (the fast path: a table look-up and a sum, no system call, no shared write), limiter.c the others (the slow
 * path: charges, waits, fences). settle.c replaces the predicted charge of launches by their measured GPU time.
 * tenant.c maps the pages that the container shares with the arbiter, the service on the node that divides a GPU's time
 * among the containers.
 */
#ifndef VGPU_LIMITER_H
#define VGPU_LIMITER_H

#include "fence.h"
#include "account/account.h"
#include "process.h"

/* --- tenant.c: the limiter's state of a device ------------------------------------------------------------ */

struct limited {
    const struct device *device;
    /* Balance of GPU time of the whole container, in the tenant page. Without a tenant page it belongs to this process
     * alone. */
    struct vgpu_tenant_device *tenant;
    /* Page in which the arbiter says when this container may launch; NULL if there is none. */
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

#define FLOWS 4u

/* A flow is the launches of one thread into one stream since the last fence. */
struct flow {
    uintptr_t stream; /* Stream of the flow, as returned by flow_stream(). */
    bool used;
    /* begin: event at which the segment begins: the end event of the last segment, or an event that was recorded before
     * the first launch; NULL if no event could be recorded. */
    struct mark *begin;
    uint64_t began; /* began: time at which the first launch was admitted. */
    uint64_t chain;
    struct segment segment;
};

struct thread_state {
    /* If this equals (sequence number of the limits file | 1), the thread's device has no compute limit. */
    uint32_t off;
    /* While this equals vgpu_launch_epoch, the fields below describe the thread's current context. */
    uint32_t ready;
    /* The last reading of limiter_ticks() minus `behind`, plus one `gap` for each later launch without a reading. */
    uint32_t ticks;
    /* If two launches are more ticks apart than this, the stream may have been idle in between. */
    uint32_t gap;
    uint32_t behind, window; /* `behind` is LIMITER_GRANTS times `gap`; `window` is one `gap` more. */
    /* open: true if nothing throttled the container when this thread last took the slow path. Then `gap` is longer. */
    bool open;
    uint64_t segment_ns; /* segment_ns: predicted work after which a segment ends. */
    struct flow *current;    /* current: flow of the last launch. */
    struct limited *limited;
    CUcontext context;
    uint64_t number; /* Serial number of the thread. */
    uint32_t segments;
    uint32_t seen; /* seen: value of `ready` before the thread's context may have changed. */
    /* stalled: value of limited->passed + 1 when a launch was last admitted because no queued work had finished for
     * long; 0 if that has not happened. */
    uint32_t stalled;
    uint64_t calibration_ns;
    uint32_t calibration_ticks;
    struct flow flow[FLOWS];
};
/* initial-exec: the library is loaded at program start, and the fast path must not call __tls_get_addr. */
extern __thread struct thread_state vgpu_thread __attribute__((tls_model("initial-exec")));
/* The epoch changes when a context ends or a capture begins, so that each thread checks its state again; it is never
 * 0. */
extern _Atomic uint32_t vgpu_launch_epoch;
extern struct costs vgpu_costs;

/* Reads the processor's counter of constant rate, which needs no system call. The counter wraps within seconds, so a
 * long pause may be missed. Each missed pause costs a little accuracy once. */
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

/* Not every launch reads the counter (segment_looks). A launch that does not is assumed to follow the one before by one
 * gap. */
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

/* Returns the program's stream handle as a number, with an extra bit for functions of the per-thread API. There the
 * default stream has the same handle, but is a different stream in each thread. */
#define FLOW_PER_THREAD ((uintptr_t)1 << (sizeof(uintptr_t) * 8 - 1))
static inline uintptr_t flow_stream(CUstream stream, bool per_thread)
{
    return (uintptr_t)stream | (per_thread ? FLOW_PER_THREAD : 0);
}

static inline unsigned flow_index(uintptr_t bits)
{
    return (unsigned)(bits ^ bits >> 6 ^ bits >> 12) % FLOWS;
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
/* Called after a context has ended. The next context on the thread's stack is now current, perhaps on another
 * device. */
void limiter_context_left(struct leaving *leaving);
/* Called when the current context of any thread may have changed. */
void limiter_forget_all(void);
void limiter_reset(void);
uint64_t limiter_now(void);

/* --- capture.c ------------------------------------------------------------------------------------------- */

/* Returns true if the stream is being captured. Then the limiter must not record an event there, and neither charges
 * nor throttles. */
bool capture_of(CUstream stream, bool per_thread);
/* Sets the thread's capture mode to RELAXED until capture_restore(), so that the library's calls do not break a
 * capture of another stream. Returns false if that failed. */
bool capture_relax(int *mode);
void capture_restore(int mode);

#endif
