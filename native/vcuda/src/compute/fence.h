/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fences measure the time that a segment really took. fence.c creates the events, settle.c settles them, and
 * controller.c has the thread that settles at the right time. A launch never waits for that thread, because inside the
 * driver the thread may wait for seconds for a context that another thread has locked.
 */
#ifndef VGPU_FENCE_H
#define VGPU_FENCE_H

#include "pace.h"
#include "account/account.h"

struct limited;
struct flow;
struct leaving;
struct mark; /* A mark is an event of the library, together with its context. */

/* --- fence.c ----------------------------------------------------------------------------------------------- */

/* Records a pooled event of the context in the stream. NULL: that failed, or the stream is being captured. */
struct mark *fence_mark(CUcontext context, CUstream stream, bool per_thread);
/* Gives up a use of a mark. The last one returns it to the pool, or frees it if its context has ended. */
void fence_drop_mark(struct mark *mark);
/* Hands over a finished segment and its marks. If `end` is NULL, it stays charged as predicted. `goes_on`: the next
 * segment begins at once, so flow->begin becomes `end` too if the segment will be measured; otherwise it becomes NULL. */
void fence_put(struct limited *limited, struct flow *flow, struct mark *end, bool goes_on);
/* Called before the context is destroyed, because its events are destroyed with it. */
void fence_context_leaving(struct leaving *leaving);
/* fence_wait sleeps until something was settled since `seen` (a value of fence_settled), or until `until`. */
uint32_t fence_settled(void);
void fence_wait(uint32_t seen, uint64_t now, uint64_t until);
void fence_reset(void);

#define FENCE_PLACES 16 /* Maximum number of contexts of a process that can be measured. */

/* Returns true if any fence is not settled. */
bool fence_open(void);
/* Settles the finished fences of the place, unless another thread is doing so. Calls the driver and may wait there.
 * Returns the time of the next check; UINT64_MAX: no fence is open. *did is true if a fence was settled; then the
 * caller must wake waiting threads. */
uint64_t fence_settle_place(unsigned place, uint64_t now, bool *did);
/* Does the same for a thread that waits anyway. Wakes no other thread, because otherwise each of many waiting threads
 * would wake all others. */
void fence_settle_context(CUcontext context, uint64_t now);
/* Wakes waiting threads after something was settled. */
void fence_wake_waiters(void);
/* Stops all settling. Returns false if a thread has been inside the driver for longer than `patience`. */
bool fence_park(uint64_t patience_ns);

/* --- controller.c -------------------------------------------------------------------------------------------- */

/* Reports a new fence, so that the thread settles it in time. The thread starts with the second fence. */
void controller_tell(uint64_t now);
/* Settles finished fences of the current context, if the caller `waits` anyway or no settling thread can be started. */
void controller_help(bool waits);
/* Called after the program has waited for the GPU, because fences may be finished. */
void fence_waited(bool done);
void controller_reset(void);

#endif
