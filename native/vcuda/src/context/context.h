/* SPDX-License-Identifier: Apache-2.0 */
/* Contexts and the code in them: what they cost, and what happens when one goes. */
#ifndef VGPU_CONTEXT_H
#define VGPU_CONTEXT_H

#include "account/account.h"

#pragma GCC visibility push(hidden)

/* --- lock.c: contexts of a device are made and ended one at a time, for they are measured ------------------ */

/* False: this thread holds it already, or another one has for a second. Then the call goes on unmeasured, until the unlock all the
 * same. */
bool context_lock(int device);
bool context_try(int device); /* the same without waiting; false: there is no unlock */
void context_unlock(int device, bool locked);
/* Code is loaded without the lock, until context_unlock(device, false). False: inside a call of this thread that has the lock, and
 * part of what that one costs. */
bool context_pass(int device);
/* Was nothing of that kind under way at that time, and has nothing begun since? */
uint64_t context_passing(int device);
bool context_alone(int device, uint64_t since);
void context_locks_reset(void);

/* --- measure.c: what contexts really cost --------------------------------------------------------------- */

struct measure {
    const struct device *device;
    nvmlDevice_t handle;
    uint64_t own, card, charged;
    uint64_t passing; /* context_passing, before the first reading */
    bool nvml;
    bool quiet; /* the figures were read */
    bool frees; /* while a thread freed: own may be less than the charge says */
};
void measure_now(struct measure *measure, const struct device *device); /* all but the card's figure */
void measure_begin(struct measure *measure, const struct device *device);
enum measured {
    MEASURED_NOT,  /* nothing is known, another thread was inside an allocation or free all the time, or brought what is in it */
    MEASURED_CARD, /* by the card's figure: neighbours may be in it */
    MEASURED_OWN,  /* by this process's own figure */
};
/* Bytes that came to this process since, without what was charged as allocations. */
enum measured measure_end(const struct measure *measure, uint64_t *bytes);
/* The size of a context by creating others next to it, given what the card's figure says (0: nothing). 0: unknown. */
uint64_t measure_by_second(CUcontext context, CUdevice ordinal, uint64_t card);

/* --- opening.c: a context that is made ----------------------------------------------------------------------- */

struct opening {
    const struct device *device;
    struct measure measure;
    uint64_t charged;
    int measuring; /* handle of the container-wide lock, -1: the size is known, or cannot be measured now */
    bool counted, locked;
    int former_users; /* of the same context, which another thread has made at the same time */
};
/* Whether a context may be on the device, with a line where not. */
bool context_permitted(const struct device *device);
/* NULL: none may be made there, and *status is what the caller gets. */
const struct device *context_admit(enum control control, CUdevice ordinal, CUresult *status);
/* Before the driver's call and, if that is CUDA_SUCCESS, after it; `undo` ends a context that does not fit. */
CUresult opening_begin(struct opening *opening, const struct device *device, bool locked);
CUresult opening_end(struct opening *opening, CUresult status, CUcontext context, CUdevice ordinal,
                     CUresult (*undo)(CUcontext context, CUdevice ordinal));

/* --- context.c ------------------------------------------------------------------------------------------ */

/* The current context, which may be one that no hook saw: charged as far as the limit has room. An error: what this process has
 * on the card finds no room, so nothing more is granted. *known false: it is to be looked at again. */
CUresult context_met(const struct device *device, CUcontext context, CUdevice ordinal, bool *known);
/* With the lock held. The device's primary context as far as it is charged, NULL: none. */
CUcontext context_primary(int device);
void context_used(CUcontext context); /* one more keeps it alive */
/* A context that the driver is about to free, then has freed or not. Device locked. */
enum { COLLECTED_MAPS = 2 };
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

/* --- unaccounted.c: what the driver takes without being asked ------------------------------------------------- */

enum looked {
    LOOKED_NOT,    /* a thread has been inside an allocation all the time */
    LOOKED_HIDDEN, /* NVML does not show this process: only the addresses of its memory tell */
    LOOKED_AT,
};
void unaccounted_begin(const struct device *device); /* a context was made */
/* Charges what is on the card beyond the charge, as far as the limit has room. Context lock held. */
enum looked unaccounted_look_locked(const struct device *device);
/* The same where the lock can be had; else the next step does. Answers as unaccounted_over. */
uint64_t unaccounted_look(const struct device *device);
void unaccounted_settle(int device); /* the same, of one whose step is due; not again at once where it could not be seen */
void unaccounted_due(int device);    /* the end of the next flight looks */
void unaccounted_late(void);         /* code may come with any launch from now on: who waits for one looks, now and then */
void unaccounted_waited(bool done);
bool unaccounted_any(int device);    /* this process has something there, and a limit */
/* Bytes of this process on the card that the limit had no room for: while there are any, nothing more is granted. */
uint64_t unaccounted_over(int device);
/* Contexts that no hook saw, where NVML hides this process: so many bytes more of them are on the card, or less. */
void unaccounted_unseen(int device, uint64_t bytes, bool more);
void unaccounted_context_left(struct leaving *leaving);
void unaccounted_reset(void);

#pragma GCC visibility pop

#endif
