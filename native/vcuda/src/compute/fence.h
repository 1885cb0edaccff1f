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

/* Any fence that nobody has settled? */
bool fence_open(void);
/* Settles what is done in the place, unless another thread is at it; calls the driver, and may wait there. Answers when
 * to look again; UINT64_MAX: nothing is open. *did: something was settled, and who waits for that is to be woken. */
uint64_t fence_settle_place(unsigned place, uint64_t now, bool *did);
/* The same by a thread that waits anyway. It wakes nobody: each of many that wait would wake all the others. */
void fence_settle_context(CUcontext context, uint64_t now);
/* Something was settled: who waits looks again. */
void fence_wake_waiters(void);
/* From now on no thread settles anything. False: one has been inside the driver for that for longer than `patience`. */
bool fence_park(uint64_t patience_ns);

/* --- controller.c -------------------------------------------------------------------------------------------- */

/* A fence was put: the thread looks at it in time. It starts with the second one. */
void controller_tell(uint64_t now);
/* Settles what is done in the current context, by a thread that `waits` anyway, or where no other can be started. */
void controller_help(bool waits);
/* The program has waited for something: a look is worth while. */
void fence_waited(bool done);
void controller_reset(void);

#endif
