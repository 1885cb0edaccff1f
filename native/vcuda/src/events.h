/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The calls that go upwards: what a lower package has to report, and the tables of who is called then. The tables stand in
 * events.c, each in the order in which it must run. They are constants: nothing is registered while the library runs, and none
 * of them is on the path of an allocation that fits or of a launch that may go.
 */
#ifndef VGPU_EVENTS_H
#define VGPU_EVENTS_H

#include <stdbool.h>
#include <stddef.h>

#include "driver/cuda_abi.h"

#pragma GCC visibility push(hidden)

struct device;
struct leaving;

extern const struct events {
    /* An allocation does not fit, or the account is read together with NVML's figures: what is kept for later is given back.
     * trim: also what the driver keeps for the next allocation. */
    void (*reclaim[8])(bool trim);
    /* The last flight on a device has ended, and what is charged there has moved by a step. */
    void (*charge_moved[4])(int device);
    /* The thread's current context is another one, or may be. */
    void (*context_changed[4])(void);
    /* The driver is about to free a context. Device locked. */
    void (*context_leaving[8])(struct leaving *leaving);
    /* It has, or (gone is false) it has refused. Device locked. */
    void (*context_left[8])(struct leaving *leaving);
    /* The program has waited for the GPU; done: the driver says that it is so. */
    void (*waited[4])(bool done);
    /* This process is a forked child: it has none of its parent's device memory, and perhaps locks that nobody will drop. */
    void (*reset[24])(void);
    /* The current context of a thread that has not used it yet. An error: nothing may be allocated in it; *known false: it could
     * not be looked at now. */
    CUresult (*context_met)(const struct device *device, CUcontext context, CUdevice ordinal, bool *known);
} vgpu_events;

#define EVENT(list, ...) \
    for (size_t event = 0; event < sizeof vgpu_events.list / sizeof *vgpu_events.list && vgpu_events.list[event]; event++) \
        vgpu_events.list[event](__VA_ARGS__)

#pragma GCC visibility pop

#endif
