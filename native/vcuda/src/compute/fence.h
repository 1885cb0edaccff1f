/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fences: what a segment really took. fence.c has the events and settles them, controller.c the thread that does so at
 * the right time. A launch never waits for that thread: it is inside the driver, where another thread may hold a context's
 * lock for seconds.
 */
#ifndef VGPU_FENCE_H
#define VGPU_FENCE_H

#include "pace.h"
#include "account/account.h"

struct limited;
struct flow;
struct leaving;
struct mark; /* an event of ours, and the context that it belongs to */

/* --- fence.c ----------------------------------------------------------------------------------------------- */

/* A pooled event of the context, recorded in the stream; NULL: it could not be, or the stream is being captured. */
struct mark *fence_mark(CUcontext context, CUstream stream, bool per_thread);
/* A mark that is not needed; also one whose context is gone. */
void fence_drop_mark(struct mark *mark);
/* Hands a finished segment over; `end` may be NULL: then it stays charged as predicted. Takes the flow's begin mark. */
void fence_put(struct limited *limited, struct flow *flow, struct mark *end);
/* Before the context is destroyed: its events go with it. */
void fence_context_leaving(struct leaving *leaving);
/* Sleeps until something was settled since `seen`, or until `until`. */
uint32_t fence_settled(void);
void fence_wait(uint32_t seen, uint64_t now, uint64_t until);
void fence_reset(void);

#define FENCE_PLACES 16 /* contexts of a process that are measured */
#define FENCE_SOON_NS (50 * US)
#define FENCE_POLL_NS (2 * MS) /* the longest between two looks at what should be done */
#define FENCE_LOOK_NS (4 * MS) /* between two looks at a queue that is filled again and again */

/* Any fence that nobody has settled? */
bool fence_open(void);
/* Settles what is done in the place, unless another thread is at it; calls the driver, and may wait there. Answers when
 * to look again; UINT64_MAX: nothing is open. */
uint64_t fence_settle_place(unsigned place, uint64_t now);
void fence_settle_context(CUcontext context, uint64_t now);
/* From now on no thread settles anything. False: one has been inside the driver for that for longer than `patience`. */
bool fence_park(uint64_t patience_ns);

/* --- controller.c -------------------------------------------------------------------------------------------- */

/* A fence was put: the thread looks at it in time. It starts with the second one. */
void controller_tell(uint64_t now);
/* Where no thread can be started: settles what is done in the current context. It may have to wait for that one. */
void controller_help(void);
/* The program has waited for something: a look is worth while. */
void fence_waited(bool done);
void controller_reset(void);

/* Wake-ups: so many apart on average, some of them at once. */
#define WAKE_EVERY_NS (5 * MS)
#define WAKE_BURST 8u
struct wakes {
    uint64_t paid; /* up to then wake-ups have been used */
};
/* An earlier one is not allowed. */
static inline uint64_t wakes_from(const struct wakes *wakes)
{
    return wakes->paid > WAKE_BURST * WAKE_EVERY_NS ? wakes->paid - WAKE_BURST * WAKE_EVERY_NS : 0;
}
/* When the thread may wake that wants to at `wanted`; that wake-up is taken for used. */
static inline uint64_t wakes_take(struct wakes *wakes, uint64_t wanted)
{
    uint64_t at = wanted > wakes_from(wakes) ? wanted : wakes_from(wakes);
    wakes->paid = (wakes->paid > at ? wakes->paid : at) + WAKE_EVERY_NS;
    return at;
}

#endif
