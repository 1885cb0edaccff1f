/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Events let a package (a folder of the sources) call functions of higher packages without including their headers.
 * Each event has a table of the functions that are called. events.c defines these tables, each in its required order.
 * The tables are constants, so nothing is registered at run time. An allocation that fits and a launch that need not
 * wait usually cause no event.
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
    /* The charge (the memory that this process is charged for) must be exact: for example, an allocation does not fit,
     * or the charge is compared with NVML's figures. The functions uncharge memory that is no longer used. With `trim`
     * they also release memory that the driver keeps for later allocations. */
    void (*reclaim[8])(bool trim);
    /* A thread has finished an allocation or a free on a device, and the charge may have changed much since it was last
     * compared with NVML's figures. The function repeats that comparison. */
    void (*charge_moved[4])(int device);
    /* The thread's current context has changed, or may have changed. */
    void (*context_changed[4])(void);
    /* The driver is about to free a context. The device's lock is held. */
    void (*context_leaving[8])(struct leaving *leaving);
    /* The driver has freed the context or, if `gone` is false, has refused to. The device's lock is held. */
    void (*context_left[8])(struct leaving *leaving);
    /* The program has waited for the GPU. done: the driver reports that the work is finished. */
    void (*waited[4])(bool done);
    /* This process is a forked child: it has none of its parent's device memory, and may have inherited locks that
     * no thread will release. */
    void (*reset[24])(void);
    /* A thread has a current context that it has not used before. Returns an error if the context may not allocate.
     * *known is set to false if the context could not be checked now. */
    CUresult (*context_met)(const struct device *device, CUcontext context, CUdevice ordinal, bool *known);
} vgpu_events;

#define EVENT(list, ...) \
    for (size_t event = 0; event < sizeof vgpu_events.list / sizeof *vgpu_events.list && vgpu_events.list[event]; event++) \
        vgpu_events.list[event](__VA_ARGS__)

#pragma GCC visibility pop

#endif
