/* SPDX-License-Identifier: Apache-2.0 */
/* The type of CUDA events, for event.c and ipc_event.c. cuEventRecord makes a record of the event: an item in the queue
 * of a context. */
#ifndef GPUSIM_EVENT_H
#define GPUSIM_EVENT_H

#include "capture.h"

#define EVENT_MAGIC 0x45565431u
#define EVENT_DISABLE_TIMING 2u
#define EVENT_INTERPROCESS 4u

/* Position of the last record of an interprocess event, made by any process. It is one word, so that no reader sees a
 * half-written position. */
struct shared_event {
    /* The word has the GPU (8 bits), the context's queue (16 bits) and the number of the item in that queue (40 bits).
     * It is 0 if the event was never recorded. */
    _Atomic uint64_t place;
};

struct CUevent_st {
    uint32_t magic;
    unsigned flags;
    /* Context of the stream that recorded the event last. */
    CUcontext context;
    /* seq is the number of the queue item, 0 if the event was never recorded. */
    uint64_t id, seq;
    /* Time of completion; 0 if not known yet. */
    uint64_t finish;
    /* Capture in which the event was recorded as a node, or 0. */
    uint64_t capture;
    CUgraphNode node;
    struct shared_event *shared; /* NULL until an interprocess handle is created. */
    int shared_fd;
    CUevent next;
};

CUresult event_new(CUcontext context, unsigned flags, CUevent *out);
CUresult event_check(CUevent event);

#endif
