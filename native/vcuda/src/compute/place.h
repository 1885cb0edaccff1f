/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The list of the contexts whose launches are measured. A place is the entry of one such context; a later context uses
 * the place of one that has ended. A mark is a timing event with its bookkeeping, which a place uses again and again. A
 * fence is a timing event after a group of launches in a stream; its record has the marks before and after the group.
 * To settle a fence means to read how long its launches took.
 *
 * There are two kinds of locks. `vgpu_place_lock` is held for a few instructions and never during a driver call. The
 * lock `settling` of a place is held by the thread that calls the driver for this context. Launches never wait for
 * `settling`; only a thread that ends the context does.
 */
#ifndef VGPU_PLACE_H
#define VGPU_PLACE_H

#include "limiter.h"

struct mark {
    struct mark *next; /* The next unused mark in the place's pool. */
    struct place *place;
    uint64_t serial; /* The place's serial number when this mark was created. */
    CUevent event;
    /* Number of users: fences, flows (launches of a thread into a stream), and the place's anchor. Protected by
     * vgpu_place_lock. */
    unsigned holders;
    /* The time at which the GPU reached the event, as read by settle.c. Negative if it was not read since the event was
     * last recorded. While a fence uses the mark, protected by `settling`. */
    double when;
};

struct fence {
    struct fence *next;
    struct mark *begin, *end;
    /* chain: number of the flow (launches of a thread into a stream) to which the fence belongs. The fences of one flow
     * finish in the order in which they were recorded. */
    uint64_t chain;
    struct segment segment;
};

/* A context with its marks, its fences, and the state for its charges. */
struct place {
    struct place *next; /* Never changes, so the list is read without a lock. */
    CUcontext context;  /* NULL: the place is free. */
    uint64_t serial; /* A different number for each context, because a new context may get the handle of an old one. */
    struct limited *_Atomic limited;
    struct mark *pool;         /* Marks that are not in use. */
    unsigned pooled;
    struct fence *put, **last; /* Fences that launches have added since a thread last settled this place. */

    struct lock settling;      /* settling protects the fields below. */
    struct fence *open, **open_last; /* open: fences that are not settled, in the order in which they were recorded. */
    /* anchor: the mark from which the times of the other marks are counted. anchor_ns: the anchor's time. */
    struct mark *anchor;
    double anchor_ns;
    /* due: time at which the oldest fence should be finished. soon: time between two checks after `due`. */
    uint64_t due, soon;
    struct settler settler;
};
/* Protects the list, the pools and `put`. A thread that holds this lock takes no other lock. */
extern struct lock vgpu_place_lock;
extern _Atomic unsigned vgpu_open_fences;
extern _Atomic bool vgpu_fences_parked;

/* Finds the place of a context; of NULL a free place. NULL: there is none. The caller holds vgpu_place_lock. */
struct place *place_of(CUcontext context);
/* Destroys unused marks until at most `keep` are left. The context must be current, and the caller must hold the lock
 * `settling`. */
void place_trim(struct place *place, unsigned keep);

#endif
