/* SPDX-License-Identifier: Apache-2.0 */
/* Contexts and their code: what they cost, and what happens when a context ends. */
#ifndef VGPU_CONTEXT_H
#define VGPU_CONTEXT_H

#include "account/account.h"

#pragma GCC visibility push(hidden)

/* --- lock.c: contexts of a device are created and destroyed one at a time, because they are measured ----------- */

/* Returns false if this thread holds the lock already, or another thread has held it for a second. Then the call
 * goes on unmeasured. context_unlock must be called in either case. */
bool context_lock(int device);
/* Takes the lock without waiting. After false, context_unlock must not be called. */
bool context_try(int device);
void context_unlock(int device, bool locked);
/* Begins a load of code without the lock, until context_unlock(device, false). Returns false inside a call of this
 * thread that has the lock. Then the load counts as part of that call's cost. */
bool context_pass(int device);
/* context_alone returns true if no unlocked call was active at the time `since` (a value of context_passing) and
 * none has begun since. */
uint64_t context_passing(int device);
bool context_alone(int device, uint64_t since);
void context_locks_reset(void);

/* --- measure.c: what contexts really cost --------------------------------------------------------------- */

struct measure {
    const struct device *device;
    nvmlDevice_t handle;
    uint64_t own, card, charged;
    uint64_t passing; /* Value of context_passing() before the first reading. */
    bool nvml;
    /* True if the figures were read while no thread was inside an allocation. */
    bool quiet;
    /* True if a thread was inside a free meanwhile: then `own` may be lower than the charge. */
    bool frees;
};
/* Reads all figures except `card`. */
void measure_now(struct measure *measure, const struct device *device);
void measure_begin(struct measure *measure, const struct device *device);
enum measured {
    /* The size is unknown: no quiet moment was found, or the figure includes another thread's bytes. */
    MEASURED_NOT,
    /* The size is from the card's figure, which may include other containers' bytes. */
    MEASURED_CARD,
    /* The size is from this process's own figure. */
    MEASURED_OWN,
};
/* Reads the bytes that this process gained since measure_begin, without charged allocations. */
enum measured measure_end(const struct measure *measure, uint64_t *bytes);
/* Returns the size of a context, measured by creating others next to it. `card`: the size by the card's figure, 0:
 * unknown. Returns 0 if unknown. */
uint64_t measure_by_second(CUcontext context, CUdevice ordinal, uint64_t card);

/* --- opening.c: creation of a context --------------------------------------------------------------------------- */

struct opening {
    const struct device *device;
    struct measure measure;
    uint64_t charged;
    int measuring; /* Handle of the lock of the whole container; -1 if the size is known or cannot be measured now. */
    bool counted, locked;
    int former_users; /* Number of users of this context if another thread created the same context at the same time. */
};
/* Returns whether the device may have a context; if not, writes a line on stderr. */
bool context_permitted(const struct device *device);
/* Returns the device if a context may be created there. NULL: *status is the caller's error. */
const struct device *context_admit(enum control control, CUdevice ordinal, CUresult *status);
/* Call opening_begin before the driver's call and, if it returns CUDA_SUCCESS, opening_end after it. `undo` destroys
 * a context that does not fit. */
CUresult opening_begin(struct opening *opening, const struct device *device, bool locked);
CUresult opening_end(struct opening *opening, CUresult status, CUcontext context, CUdevice ordinal,
                     CUresult (*undo)(CUcontext context, CUdevice ordinal));

/* --- context.c ------------------------------------------------------------------------------------------ */

/* Checks the current context and charges it, as far as the limit has room, if no hook saw its creation. Returns an
 * error while this process's memory exceeds the limit: then it may allocate nothing more. *known false: the context
 * must be checked again. */
CUresult context_met(const struct device *device, CUcontext context, CUdevice ordinal, bool *known);
/* Returns the device's primary context if it is charged, else NULL. The caller holds the lock. */
CUcontext context_primary(int device);
void context_used(CUcontext context); /* Adds a user that keeps the context alive. */
enum { COLLECTED_MAPS = 2 };
/* Describes a context before and after the driver's call that may free it. The device is locked. */
struct leaving {
    CUcontext context, heir; /* heir: the context that owns the memory afterwards; NULL if the memory is freed. */
    bool gone;
    /* True if this library charged the context; then `block` has the charge. */
    bool ours;
    /* True if the context is charged and is its device's primary context. */
    bool primary;
    struct block block;
    struct collected { /* Bytes to uncharge. */
        uint64_t owner;
        struct block *blocks;
        size_t count, room;
    } collected[COLLECTED_MAPS];
};
void context_leaving(struct leaving *leaving);
void context_left(struct leaving *leaving);
/* Removes a user by the driver's call `end`. reset: the call ends the primary context even if it has users. */
CUresult context_end_use(int device, CUdevice ordinal, CUresult (*end)(void *data), void *data, bool reset);
void context_reset(void);

/* --- green.c ----------------------------------------------------------------------------------------------- */

extern _Atomic bool vgpu_green_any; /* vgpu_green_any: this process has created a green context. */
/* green_enters returns the context that a thread of the library must enter to work for `context`. For a green context
 * it is the primary context. */
CUcontext green_enters(CUcontext context);
/* Does the same as context_met, for a green or an ordinary context. */
CUresult green_context_met(const struct device *device, CUcontext context, CUdevice ordinal, bool *known);
/* Finds the device of a green context's stream: the driver does not report its context. */
bool green_ordinal(CUstream stream, CUdevice *ordinal);
/* Called when a primary context ends: its green contexts end with it. */
void green_context_leaving(struct leaving *leaving);
void green_context_left(struct leaving *leaving);

/* --- unaccounted.c: memory that the driver uses beyond the allocations ---------------------------------------- */

enum looked {
    LOOKED_NOT,    /* NOT: nothing was compared, because a thread was in flight the whole time. */
    LOOKED_HIDDEN, /* HIDDEN: NVML does not show this process, so only the addresses of its memory are known. */
    LOOKED_AT,
};
/* Called after a context was created. */
void unaccounted_begin(const struct device *device);
/* Charges the memory that this process uses on the card beyond its charge, as far as the limit has room. Needs the
 * context lock. */
enum looked unaccounted_look_locked(const struct device *device);
/* Takes the context lock and calls unaccounted_look_locked(). If another thread has the lock, a later call does this.
 * Returns the value of unaccounted_over(). */
uint64_t unaccounted_look(const struct device *device);
/* Calls unaccounted_look() for a device with `due` set, but not soon after a comparison that failed. */
void unaccounted_settle(int device);
/* Sets `due`, so that the thread that ends the next flight calls unaccounted_settle(). */
void unaccounted_due(int device);
/* Called when any launch may load code from now on: threads that wait for launches then compare at intervals. */
void unaccounted_late(void);
void unaccounted_waited(bool done);
/* Returns true if this process uses memory of the device and a limit applies. */
bool unaccounted_any(int device);
/* Returns the bytes of this process on the card that exceed the limit. Every allocation fails while this is not 0. */
uint64_t unaccounted_over(int device);
/* Adds to (or subtracts from) the bytes of contexts that no hook saw, where NVML hides this process. */
void unaccounted_unseen(int device, uint64_t bytes, bool more);
void unaccounted_context_left(struct leaving *leaving);
void unaccounted_reset(void);

#pragma GCC visibility pop

#endif
