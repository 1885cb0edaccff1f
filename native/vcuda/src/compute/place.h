/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Places: the entries of the contexts whose launches are measured. A fence is a timing event at the end of a group of
 * launches. There are two locks, and no launch waits for either of them while its holder is inside a driver call. A
 * thread holds `vgpu_place_lock` for a few instructions and never during a driver call. The thread that calls the
 * driver for a context holds the lock `settling` of that context's place; only a thread that ends the context waits for
 * this lock.
 */
#ifndef VGPU_PLACE_H
#define VGPU_PLACE_H

#include "limiter.h"

struct mark {
    struct mark *next; /* The next unused mark in the place's pool. */
    struct place *place;
    uint64_t serial; /* The place's serial when this mark was created. */
    CUevent event;
    /* Number of users: fences, flows (launches of a thread into a stream), and the place's time base; protected by
     * vgpu_place_lock. */
    unsigned holders;
    /* The event's time that settle.c has read; negative if it was not read since the event was last recorded. Protected
     * by `settling` while a fence holds the mark. */
    double when;
};

struct fence {
    struct fence *next;
    struct mark *begin, *end;
    /* chain: number of the flow (launches of a thread into a stream). Its fences finish in the order in which they were
     * recorded. */
    uint64_t chain;
    struct segment segment;
};

/* A context with its events, the event from which its times are counted, and the GPU time that was counted. */
struct place {
    CUcontext context;
    uint64_t serial; /* A different number for each context, because a new context may get the handle of an old one. */
    struct limited *_Atomic limited;
    struct mark *pool;         /* Marks that are not in use. */
    unsigned pooled;
    struct fence *put, **last; /* Fences that launches have added since a thread last settled this place. */

    struct lock settling;      /* settling protects the fields below. */
    struct fence *open, **open_last; /* open: fences that are not settled, in the order in which they were recorded. */
    /* anchor: event from which times are counted. anchor_ns: its own time. */
    struct mark *anchor;
    double anchor_ns;
    /* due: time at which the oldest fence should be finished. soon: time between two checks after `due`. */
    uint64_t due, soon;
    struct settler settler;
};
extern struct place vgpu_places[FENCE_PLACES];
/* Protects the table, the pools and `put`. A thread that holds this lock takes no other lock. */
extern struct lock vgpu_place_lock;
extern _Atomic unsigned vgpu_open_fences;
extern _Atomic bool vgpu_fences_parked;

/* Finds the place of a context, and with `make` creates it. The caller holds vgpu_place_lock. NULL: the context has no
 * place, or the table is full. */
struct place *place_of(CUcontext context, bool make);
/* Destroys unused marks beyond `keep`. The context must be current, and the caller must hold the lock `settling`. */
void place_trim(struct place *place, unsigned keep);

#endif
