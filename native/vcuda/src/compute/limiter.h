/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The compute limiter, inside. A launch is let through by launch.c (the fast path: a look-up and a sum, no system call and
 * no shared write), or by limiter.c (the slow path: charges, waits, fences). fence.c settles what was charged by what the
 * GPU really took, tenant.c holds the pages that the container and the arbiter share.
 */
#ifndef VGPU_LIMITER_H
#define VGPU_LIMITER_H

#include "fence.h"
#include "account/account.h"
#include "process.h"

/* --- tenant.c: a device of this process that has a share ------------------------------------------------ */

struct limited {
    const struct device *device;
    struct vgpu_tenant_device *tenant;       /* the container's; this process's own where there is no tenant page */
    _Atomic(const struct vgpu_gpu_page *) page; /* NULL: there is none */
    struct vgpu_tenant_device own;           /* the same bucket as this process alone would fill and empty it */
    uint64_t *busy_lane;
    _Atomic uint64_t busy_until; /* end of what this process has queued, as predicted */
    _Atomic uint64_t queued;     /* predicted work in open fences */
    _Atomic uint32_t passed;     /* fences that are open no more */
    _Atomic bool watched;        /* a launch that waits looks when what is queued is done */
    _Atomic uint64_t looked;     /* when the page was last looked for */
};
/* The limiter's state of a device; the pages are opened with the first call. */
struct limited *tenant_limited(const struct device *device);
/* Looks for a gpu page that was not there; at most once a second. */
void tenant_look_again(struct limited *limited, uint64_t now);
/* A consistent copy of the page. false: there is none, or its arbiter is silent. */
bool tenant_page(const struct limited *limited, uint64_t now, struct vgpu_gpu_page *page);
/* The page can be written by any process of its container, so what it says is believed only against the container: no
 * process has more in hand than by its own count, which is in its own memory. */
void tenant_charge(struct limited *limited, uint64_t ns);
void tenant_correct(struct limited *limited, uint64_t predicted, uint64_t real);
int64_t tenant_balance(struct limited *limited, uint64_t now, uint32_t rate_ppm, bool busy);
void tenant_reset(void);

/* --- limiter.c: the slow path -------------------------------------------------------------------------- */

#define FLOWS 4u

/* What a thread has launched into one stream since the last fence. */
struct flow {
    uintptr_t stream; /* flow_stream() */
    bool used;
    struct mark *begin; /* recorded before the segment's first launch; NULL: it could not be */
    uint64_t began; /* when it was recorded */
    uint64_t chain;
    struct segment segment;
};

struct thread_state {
    uint32_t off;    /* sequence of the limits file | 1 for which this thread's device has no limit */
    uint32_t ready;  /* equals vgpu_launch_epoch while what follows is true of the current context */
    uint32_t ticks;  /* `behind` before the clock was last read for a launch, and a gap later for each launch since */
    uint32_t gap;    /* launches so many ticks apart: the stream may have run dry */
    uint32_t behind, window; /* so many gaps that what all flows are granted fits; a gap more */
    struct flow *current; /* of the last launch */
    struct limited *limited;
    CUcontext context;
    uint64_t number; /* tells threads apart */
    uint32_t segments;
    uint32_t seen;   /* `ready` as it was before the thread's context may have changed */
    uint32_t stalled; /* `passed`, plus 1, at which a launch of this thread was let through although nothing got done; 0: none */
    uint64_t calibration_ns;
    uint32_t calibration_ticks;
    struct flow flow[FLOWS];
};
/* initial-exec: the library is there from the start, and the fast path must not call __tls_get_addr. */
extern __thread struct thread_state vgpu_thread __attribute__((tls_model("initial-exec")));
extern _Atomic uint32_t vgpu_launch_epoch; /* never 0; changes when a context goes or a capture begins or ends */
extern struct costs vgpu_costs;

/* A counter that runs evenly and costs no system call. It wraps within seconds: a pause that is mistaken for none costs a
 * little accuracy, once. */
static inline uint32_t limiter_ticks(void)
{
#if defined(__x86_64__)
    uint32_t low;
    __asm__ volatile("rdtsc" : "=a"(low) : : "rdx"); /* the builtin puts both halves together first */
    return low;
#elif defined(__aarch64__)
    uint64_t ticks;
    __asm__ volatile("mrs %0, cntvct_el0" : "=r"(ticks));
    return (uint32_t)ticks;
#else
    return 0;
#endif
}

/* The clock is not read before each launch (segment_looks): one that goes unlooked is granted a gap. */
#define LIMITER_GRANTS (FLOWS * (SEGMENT_LOOK_LAUNCHES - 1))
static inline void limiter_set_gap(struct thread_state *thread, uint32_t gap)
{
    thread->gap = gap;
    thread->behind = LIMITER_GRANTS * gap;
    thread->window = thread->behind + gap;
}

static inline void limiter_unlooked(struct thread_state *thread)
{
    thread->ticks += thread->gap;
}

/* It is read now. False: the launches since it was last read were further apart than a gap. */
static inline bool limiter_looked(struct thread_state *thread, uint32_t ticks)
{
    uint32_t passed = ticks - thread->ticks;
    if (passed > thread->window)
        return false;
    passed -= thread->behind;
    __asm__("" : "+r"(passed) : : "memory"); /* to keep what memory has as well takes registers, and pushes for them */
    thread->ticks += passed;
    return true;
}

/* The stream as the program names it. The same name is another stream where default streams are per thread. */
#define FLOW_PER_THREAD ((uintptr_t)1 << (sizeof(uintptr_t) * 8 - 1))
static inline uintptr_t flow_stream(CUstream stream, bool per_thread)
{
    return (uintptr_t)stream | (per_thread ? FLOW_PER_THREAD : 0);
}

static inline unsigned flow_index(uintptr_t bits)
{
    return (unsigned)(bits ^ bits >> 6 ^ bits >> 12) % FLOWS;
}

/* Around one launch. before() may wait; after() gets what the driver answered. */
struct ticket {
    struct flow *flow;
    unsigned item;
    uint64_t ns;
    bool fence_after;
};
void limiter_before(struct ticket *ticket, uint32_t key, CUstream stream, bool per_thread);
void limiter_after(struct ticket *ticket, CUresult status);
/* The thread's current context has changed, or may have. */
void limiter_forget_thread(void);
void limiter_context_left(struct leaving *leaving); /* the one below it on the stack is current now, perhaps of another device */
/* Every thread's. */
void limiter_forget_all(void);
void limiter_reset(void);
uint64_t limiter_now(void);

/* --- capture.c ------------------------------------------------------------------------------------------- */

/* Is the stream being captured? Nothing may be recorded, charged or throttled then. */
bool capture_of(CUstream stream, bool per_thread);
/* Our own calls must not break a capture of another stream: RELAXED until capture_restore(). False: it could not be set. */
bool capture_relax(int *mode);
void capture_restore(int mode);

#endif
