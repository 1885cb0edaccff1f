/* SPDX-License-Identifier: Apache-2.0 */
/* An event, for event.c and ipc_event.c. */
#ifndef GPUSIM_EVENT_H
#define GPUSIM_EVENT_H

#include "capture.h"

#define EVENT_MAGIC 0x45565431u
#define EVENT_DISABLE_TIMING 2u
#define EVENT_INTERPROCESS 4u

/* Where an interprocess event was recorded last, by whichever process: one word, so that nobody reads it half written. */
struct shared_event {
    _Atomic uint64_t place; /* GPU (8 bits), channel (16), queue number (40); 0: never recorded */
};

struct CUevent_st {
    uint32_t magic;
    unsigned flags;
    CUcontext context; /* of the stream that recorded it last */
    uint64_t id, seq;  /* seq 0: never recorded */
    uint64_t finish;   /* 0: not known yet */
    uint64_t capture; /* recorded in that capture: a node, not a point in time; 0: in none */
    CUgraphNode node;
    struct shared_event *shared; /* NULL: no handle was made for it */
    int shared_fd;
    CUevent next;
};

CUresult event_new(CUcontext context, unsigned flags, CUevent *out);
CUresult event_check(CUevent event);

#endif
