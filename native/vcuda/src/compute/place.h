/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The contexts whose launches are measured. There are two locks, and no launch waits for either during a driver call. A
 * thread has `vgpu_place_lock` for a few instructions and never during a driver call. The thread that calls the driver
 * for a context has the lock `settling` of that context's place; only a thread that ends the context waits for this
 * lock.
 */
#ifndef VGPU_PLACE_H
#define VGPU_PLACE_H

#include "limiter.h"

struct mark {
    struct mark *next; /* The next unused mark in the pool. */
    struct place *place;
    uint64_t serial; /* The place's serial when this mark was created. */
    CUevent event;
    unsigned holders; /* Number of fences, flows and time bases that use the mark; protected by vgpu_place_lock. */
    /* The time that settle.c has read; negative: not read since the last record. Protected by `settling` while a fence
     * holds the mark. */
    double when;
};

struct fence {
    struct fence *next;
    struct mark *begin, *end;
    uint64_t chain; /* chain: the flow. Its fences are passed in the order of their records. */
    struct segment segment;
};

/* A context with its time base, its events and its counted device time. */
struct place {
    CUcontext context;
    uint64_t serial; /* A different number for each context, because a new context may get the handle of an old one. */
    struct limited *_Atomic limited;
    struct mark *pool;         /* Marks that are not in use. */
    unsigned pooled;
    struct fence *put, **last; /* Fences that launches have added since the last settling. */

    struct lock settling;      /* settling protects the fields below. */
    struct fence *open, **open_last; /* open: the open fences in the order in which they were recorded. */
    struct mark *anchor;
    double anchor_ns;
    /* due: the time at which the oldest fence should be done. soon: the interval of checks after that time. */
    uint64_t due, soon;
    struct settler settler;
};
extern struct place vgpu_places[FENCE_PLACES];
/* Protects the table, the pools and `put`. A thread that has this lock takes no other lock. */
extern struct lock vgpu_place_lock;
extern _Atomic unsigned vgpu_open_fences;
extern _Atomic bool vgpu_fences_parked;

/* Finds the place of a context; needs vgpu_place_lock. NULL: the context has none, or the table is full. */
struct place *place_of(CUcontext context, bool make);
/* Destroys unused marks beyond `keep`. The context must be current, and the caller must have the lock `settling`. */
void place_trim(struct place *place, unsigned keep);

#endif
