/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The contexts whose launches are measured. Two locks, and neither is ever waited for by a launch while the driver is called
 * under it: `vgpu_place_lock` is held for a few instructions and never across a call; a place's `settling` belongs to who
 * calls the driver for that one context, and only who ends the context waits for it.
 */
#ifndef VGPU_PLACE_H
#define VGPU_PLACE_H

#include "limiter.h"

#define FENCE_CHAINS 256u

struct mark {
    struct mark *next; /* at rest */
    struct place *place;
    uint64_t serial; /* of the place, when this was made */
    CUevent event;
};

struct fence {
    struct fence *next;
    struct mark *begin, *end;
    uint64_t chain;
    struct segment segment;
};

/* A context: its base of time, its events, and what has been counted of it. */
struct place {
    CUcontext context;
    uint64_t serial;           /* another context, another serial: the handle may be the same */
    struct limited *_Atomic limited;
    struct mark *pool;         /* events at rest */
    unsigned pooled;
    struct fence *put, **last; /* by launches, since the last look */

    struct lock settling;      /* for all that follows */
    struct fence *open, **open_last; /* in the order of the records */
    struct mark *anchor;
    double anchor_ns;
    uint64_t due, soon; /* when the oldest should be done; how long to wait with the next look if it is not */
    struct settler settler;
    struct chain { /* where the last segment of a flow ended. One that lost its place counts as it was predicted. */
        uint64_t id, end;
    } chains[FENCE_CHAINS];
};
extern struct place vgpu_places[FENCE_PLACES];
extern struct lock vgpu_place_lock; /* of the table, the pools and what was put; a leaf */
extern _Atomic unsigned vgpu_open_fences;
extern _Atomic bool vgpu_fences_parked;

/* The lock held. NULL: it has none, or there are no more. */
struct place *place_of(CUcontext context, bool make);
/* Marks at rest beyond `keep` are destroyed. The context is current, `settling` held. */
void place_trim(struct place *place, unsigned keep);

#endif
