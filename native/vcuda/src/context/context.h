/* SPDX-License-Identifier: Apache-2.0 */
/* Contexts and the code in them: what they cost, and what happens when one goes. */
#ifndef VGPU_CONTEXT_H
#define VGPU_CONTEXT_H

#include "account/account.h"

#pragma GCC visibility push(hidden)

/* --- lock.c: contexts and modules of a device are made and ended one at a time, for they are measured ------ */

void context_lock(int device);
bool context_try(int device); /* false: another thread holds it, or this one */
void context_unlock(int device);
void context_locks_reset(void);

/* --- context.c ------------------------------------------------------------------------------------------ */

/* The current context, which may be one that no hook saw: charged as any. An error: nothing may be allocated in it. *known
 * false: it could not be looked at now. */
CUresult context_met(const struct device *device, CUcontext context, CUdevice ordinal, bool *known);
/* With the lock held. The device's primary context as far as it is charged, NULL: none. */
CUcontext context_primary(int device);
void context_used(CUcontext context); /* one more keeps it alive */
/* A context that the driver is about to free, then has freed or not. Device locked. */
enum { COLLECTED_MAPS = 3 };
struct leaving {
    CUcontext context, heir; /* heir: what owns its memory afterwards; NULL: it goes with it */
    bool gone;
    bool ours;    /* it was charged, as block says */
    bool primary; /* one of ours, and its device's primary context */
    struct block block;
    struct collected { /* for release */
        uint64_t owner;
        struct block *blocks;
        size_t count, room;
    } collected[COLLECTED_MAPS];
};
void context_leaving(struct leaving *leaving);
void context_left(struct leaving *leaving);
/* One less: `end` is the driver's call for it; reset: it ends the primary context whatever its users. */
CUresult context_end_use(int device, CUdevice ordinal, CUresult (*end)(void *data), void *data, bool reset);
void context_reset(void);

/* --- green.c ----------------------------------------------------------------------------------------------- */

extern _Atomic bool vgpu_green_any; /* this process has made one */
/* The context that a thread of ours may enter for work of this one: of a green one its primary. */
CUcontext green_enters(CUcontext context);
/* As context_met, of any context. */
CUresult green_context_met(const struct device *device, CUcontext context, CUdevice ordinal, bool *known);
/* The device of a green context's stream, whose context the driver does not tell. */
bool green_ordinal(CUstream stream, CUdevice *ordinal);
/* A primary context goes, and its green ones with it. */
void green_context_leaving(struct leaving *leaving);
void green_context_left(struct leaving *leaving);

/* --- measure.c: what contexts and modules really cost --------------------------------------------------- */

struct measure {
    const struct device *device;
    nvmlDevice_t handle;
    uint64_t own, card, charged;
    bool nvml, quiet;
};
void measure_begin(struct measure *measure, const struct device *device);
enum measured {
    MEASURED_NOT,
    MEASURED_BUSY, /* another thread has been inside an allocation or free for seconds */
    MEASURED_CARD, /* by the card's figure: neighbours may be in it */
    MEASURED_OWN,  /* by this process's own figure */
};
/* Bytes that came to this process since, without what was charged as allocations. */
enum measured measure_end(const struct measure *measure, uint64_t *bytes);
/* Bytes by which this process's own figure fell, without what was uncharged; 0 where NVML does not show it. */
uint64_t measure_fall(const struct measure *measure);
/* The size of a context by creating others next to it, given what the card's figure says (0: nothing). 0: unknown. */
uint64_t measure_by_second(CUcontext context, CUdevice ordinal, uint64_t card);

/* --- code.c ---------------------------------------------------------------------------------------------- */

/* Unloads a module or library, and uncharges what really went with it, in every context. */
CUresult code_unload(enum control control, const void *holder, CUresult (*unload)(const void *holder));
/* The context is gone: what was loaded there must be measured again in another of the same address. */
void code_forget_context(CUcontext context);
void code_context_left(struct leaving *leaving);

/* --- unaccounted.c: what the driver takes without being asked ------------------------------------------------- */

void unaccounted_settle(int device); /* charges what NVML shows beyond the charge */
void unaccounted_begin(const struct device *device); /* a context was made */
/* One was found that was not seen to be made: looks at once. False: that did not tell what it takes. Context lock held. */
bool unaccounted_begin_now(const struct device *device);
void unaccounted_context_left(struct leaving *leaving);
void unaccounted_reset(void);

#pragma GCC visibility pop

#endif
