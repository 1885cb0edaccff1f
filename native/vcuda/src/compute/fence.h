/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Measures how long launches really took. A segment is a group of launches in one stream, and a fence is a timing event
 * at its end. A launch is first charged a predicted time. To settle a fence means to replace the predicted charge of
 * its segment by the measured time. fence.c creates the events and settle.c settles fences. controller.c has the thread
 * that calls settle.c at the right time. A launch never waits for that thread, because the thread may wait inside the
 * driver for seconds for a context that another thread has locked.
 */
#ifndef VGPU_FENCE_H
#define VGPU_FENCE_H

#include "pace.h"
#include "account/account.h"

struct limited;
struct flow;
struct leaving;
struct mark;  /* A mark is a timing event that the library created, with its bookkeeping (place.h). */
struct place; /* A place is the entry of a context whose launches are measured (place.h). */

/* --- fence.c ----------------------------------------------------------------------------------------------- */

/* Takes an event from the context's pool and records it in the stream. NULL: that failed, or the stream is being
 * captured. */
struct mark *fence_mark(CUcontext context, CUstream stream, bool per_thread);
/* Gives up a use of a mark. The last use returns the mark to the pool, or frees it if its context has ended. */
void fence_drop_mark(struct mark *mark);
/* Returns true if so many fences are open that the library should record no more events. */
bool fence_crowded(void);
/* Hands over a finished segment of a flow (the launches of a thread into a stream) and its marks to be settled. If
 * `end` is NULL, the segment stays charged as predicted. `goes_on` is true if the next segment begins at once. In this
 * case flow->begin becomes `end`, or NULL if the segment will not be measured. */
void fence_put(struct limited *limited, struct flow *flow, struct mark *end, bool goes_on);
/* Called before the context is destroyed, because the driver destroys its events with it. */
void fence_context_leaving(struct leaving *leaving);
/* fence_settled returns a counter of settled fences. fence_wait sleeps as long as the counter is `seen`, but not beyond
 * the time `until`. */
uint32_t fence_settled(void);
void fence_wait(uint32_t seen, uint64_t now, uint64_t until);
void fence_reset(void);

/* Returns true if any fence is not settled. */
bool fence_open(void);
/* Returns the place after this one in the list of all places; after NULL the first; NULL: there is no further one. Needs
 * no lock, because places are never freed. */
struct place *fence_place_after(const struct place *place);
/* Settles the finished fences of a place's context. Does nothing if another thread is settling them. Calls the driver
 * and may wait there. Returns the time of the next check; UINT64_MAX: no fence is open. *did is true if a fence was
 * settled. Then the caller must wake waiting threads. */
uint64_t fence_settle_place(struct place *place, uint64_t now, bool *did);
/* Settles the fences of a context, on behalf of a thread that has to wait for its launch anyway. Does not wake other
 * waiting threads, because otherwise each of many waiting threads would wake all the others. */
void fence_settle_context(CUcontext context, uint64_t now);
/* Wakes the threads in fence_wait after a fence was settled. */
void fence_wake_waiters(void);
/* Stops settling in all threads, for the exit of the process. Returns false if a thread is still inside the driver
 * after `patience_ns`. */
bool fence_park(uint64_t patience_ns);

/* --- controller.c -------------------------------------------------------------------------------------------- */

/* Reports a new fence, so that the settling thread wakes in time. The second fence of the process starts that
 * thread. */
void controller_tell(uint64_t now);
/* Settles the finished fences of the current context, but only if `waits` is true (the caller has to wait anyway) or if
 * no settling thread could be started. */
void controller_help(bool waits);
/* Called after the program has waited for the GPU, because then fences are probably finished. */
void fence_waited(bool done);
void controller_reset(void);

#endif
