/* SPDX-License-Identifier: Apache-2.0 */
/* CUDA contexts, and the code that is loaded into them: how much memory they are charged, and what happens when a
 * context ends. Only one context of a device is created or destroyed at a time, because its size is measured. A hook is
 * this library's replacement of a driver function. */
#ifndef VGPU_CONTEXT_H
#define VGPU_CONTEXT_H

#include "account/account.h"

#pragma GCC visibility push(hidden)

/* --- lock.c: only one context of a device is created or destroyed at a time, because its size is measured ------ */

/* Takes the lock of a device. Returns false if this thread has the lock already, or if another thread has had it for a
 * second. In that case the caller continues without the lock, but cannot measure the context's memory. The caller must
 * call context_unlock in either case. */
bool context_lock(int device);
/* Takes the lock if that needs no waiting. If it returns false, the caller must not call context_unlock. */
bool context_try(int device);
void context_unlock(int device, bool locked);
/* Called before code is loaded without the lock; context_unlock(device, false) marks the end of the load. Returns
 * false if this thread already has the lock. In that case the load counts as part of the cost that the outer call
 * measures. */
bool context_pass(int device);
/* Both functions show whether a load of code without the lock can have falsified a measurement. The measuring thread
 * calls context_passing first and passes the result to context_alone as `since`. context_alone returns true if no such
 * load was active at that time and none has begun since. */
uint64_t context_passing(int device);
bool context_alone(int device, uint64_t since);
void context_locks_reset(void);

/* --- measure.c: what contexts really cost --------------------------------------------------------------- */

struct measure {
    const struct device *device;
    nvmlDevice_t handle;
    /* own: bytes of this process on the card. card: used bytes of the whole card. charged: bytes that this process is
     * charged for memory on the card. */
    uint64_t own, card, charged;
    uint64_t passing; /* Value of context_passing() before the first reading. */
    bool nvml;
    /* True if no thread was inside an allocation while the figures were read, so that they match. */
    bool quiet;
    /* True if a thread began an allocation while the figures were read, so that `own` may contain memory that `charged`
     * lacks. If `quiet` and `forced` are false, a thread was inside an allocation before, and `charged` contains its
     * memory. */
    bool forced;
    /* True if a thread was inside a free while the figures were read. Then `own` may already lack memory that is still
     * charged. */
    bool frees;
};
/* Reads all figures except `card`. */
void measure_now(struct measure *measure, const struct device *device);
void measure_begin(struct measure *measure, const struct device *device);
enum measured {
    /* The size is unknown: a thread was inside an allocation all the time, or the figure includes another thread's
     * bytes. */
    MEASURED_NOT,
    /* The size was computed from the card's used bytes, which may include other containers' bytes. */
    MEASURED_CARD,
    /* The size was computed from the bytes that NVML shows for this process. */
    MEASURED_OWN,
};
/* Computes by how many bytes this process's memory has grown since measure_begin, without charged allocations. */
enum measured measure_end(const struct measure *measure, uint64_t *bytes);
/* Measures the size of a context by creating further contexts in addition to it. `card` is the size as computed from
 * the card's used bytes; 0 means unknown. Returns the size, or 0 if it is unknown. */
uint64_t measure_by_second(CUcontext context, CUdevice ordinal, uint64_t card);

/* --- opening.c: creation of a context --------------------------------------------------------------------------- */

struct opening {
    const struct device *device;
    struct measure measure;
    /* Bytes charged for the context before its creation. */
    uint64_t charged;
    /* Handle of the lock under which one process of the container measures; -1 if the size is known or cannot be
     * measured now. */
    int measuring;
    /* counted: contexts count against the limit. locked: this thread has the device's lock. */
    bool counted, locked;
    /* Usually 0. If another thread created the same context at the same time and recorded its users, the number of
     * these users. */
    int former_users;
};
/* Returns true if the device may have a context. Otherwise writes a line to stderr and returns false. */
bool context_permitted(const struct device *device);
/* Returns the device if a context may be created there. NULL: the hook must return *status. */
const struct device *context_admit(enum control control, CUdevice ordinal, CUresult *status);
/* The two steps of a hook that creates a context. The hook calls opening_begin before the driver's call. If
 * opening_begin returns CUDA_SUCCESS, the hook calls opening_end after the driver's call. If the context exceeds the
 * limit, opening_end destroys it by calling `undo`. */
CUresult opening_begin(struct opening *opening, const struct device *device, bool locked);
CUresult opening_end(struct opening *opening, CUresult status, CUcontext context, CUdevice ordinal,
                     CUresult (*undo)(CUcontext context, CUdevice ordinal));

/* --- context.c ------------------------------------------------------------------------------------------ */

/* Checks the current context. If no hook saw its creation, charges it as far as the limit has room. Returns an error
 * while this process's memory exceeds the limit, because the process may then allocate nothing more. *known is set to
 * false if the context must be checked again. */
CUresult context_met(const struct device *device, CUcontext context, CUdevice ordinal, bool *known);
/* Returns the device's primary context if it is charged, else NULL. The caller holds the device's lock. */
CUcontext context_primary(int device);
void context_used(CUcontext context); /* Counts one more user that keeps the context alive. */
enum { COLLECTED_MAPS = 2 };
/* Describes a context before and after the driver's call that may free it. The device is locked for both steps. */
struct leaving {
    CUcontext context, heir; /* heir: the context that owns its memory afterwards; NULL if the memory is freed. */
    /* gone: true if the driver has really freed the context. */
    bool gone;
    /* True if this library charged the context; then `block` has the charge. */
    bool ours;
    /* True if the context is charged and is its device's primary context. */
    bool primary;
    struct block block;
    struct collected { /* Blocks to uncharge when the context is gone. */
        uint64_t owner;
        /* pools: the device whose blocks of pools end with its last context; -1: the device has another context. */
        int pools;
        struct block *blocks;
        size_t count, room;
    } collected[COLLECTED_MAPS];
};
void context_leaving(struct leaving *leaving);
void context_left(struct leaving *leaving);
/* Ends one use of the primary context by calling `end`, which calls the driver. `reset` is true if the driver's call
 * ends the context even if it has other users. */
CUresult context_end_use(int device, CUdevice ordinal, CUresult (*end)(void *data), void *data, bool reset);
void context_reset(void);

/* --- green.c ----------------------------------------------------------------------------------------------- */

/* vgpu_green_any: true if this process has created a green context (a part of a GPU's multiprocessors with its own
 * context). */
extern _Atomic bool vgpu_green_any;
/* Returns the context that a thread of the library must enter to work for `context`. For a green context that is the
 * device's primary context. */
CUcontext green_enters(CUcontext context);
/* Does the same as context_met, for a context that may be a green context. */
CUresult green_context_met(const struct device *device, CUcontext context, CUdevice ordinal, bool *known);
/* Finds the device of a green context's stream. The driver does not report a context for such a stream. */
bool green_ordinal(CUstream stream, CUdevice *ordinal);
/* Called when a primary context ends, because its green contexts end with it. */
void green_context_leaving(struct leaving *leaving);
void green_context_left(struct leaving *leaving);

/* --- unaccounted.c: memory that the driver uses beyond the program's allocations ------------------------------ */

enum looked {
    LOOKED_NOT,    /* NOT: a thread was inside an allocation all the time, so the charge was at most raised. */
    /* HIDDEN: NVML does not show this process, so the memory was computed from the addresses of its allocations. */
    LOOKED_HIDDEN,
    /* AT: the figures were compared with NVML's. */
    LOOKED_AT,
};
/* Called after a context was created, so that the device is watched from then on. */
void unaccounted_begin(const struct device *device);
/* Compares the memory that this process uses on the card with its charge, and charges the difference as far as the
 * limit has room. The caller must have the context lock of the device. */
enum looked unaccounted_look_locked(const struct device *device);
/* Takes the context lock and calls unaccounted_look_locked(). If another thread has the lock, the comparison is left to
 * a later call. Returns the value of unaccounted_over(). */
uint64_t unaccounted_look(const struct device *device);
/* Calls unaccounted_look() for a device with the flag `due`, unless a comparison failed a short time ago. */
void unaccounted_settle(int device);
/* Sets the flag `due`, so that the next thread that finishes an allocation or free compares the figures. */
void unaccounted_due(int device);
/* Called after code was loaded. From then on any launch may load further parts of the code, so threads that wait for
 * launches compare the figures at intervals. */
void unaccounted_late(void);
void unaccounted_waited(bool done);
/* Returns true if this process uses memory of the device and a limit applies there. */
bool unaccounted_any(int device);
/* Returns by how many bytes this process's memory on the card exceeds the limit. Every allocation fails while this is
 * not 0. */
uint64_t unaccounted_over(int device);
/* Changes the recorded bytes of contexts that no hook saw: adds `bytes`, or subtracts them if `more` is false. The
 * record is used if NVML does not show this process. */
void unaccounted_unseen(int device, uint64_t bytes, bool more);
void unaccounted_context_left(struct leaving *leaving);
void unaccounted_reset(void);

#pragma GCC visibility pop

#endif
