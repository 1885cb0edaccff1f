/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The gate in front of a device's account. Between a charge and the driver's answer the account and the card differ: a thread
 * that is there is in flight. Who reads both figures together shuts the gate and waits until no thread is, for milliseconds:
 * the driver may hold an allocation up for as long as it likes, and the figures can be read another time. Nor does an allocation
 * wait for longer than milliseconds: NVML may take as long as it likes. Who goes on through the shut gate says so. Who shuts it
 * again first lets those through who wait: they look at it now and then only, and may find it shut each time.
 */
#include "account.h"
#include "events.h"

#include <time.h>

#define PATIENCE_MS 10
#define FLIGHT_PATIENCE_MS 50 /* longer than some questions to NVML take, or those figures were never read */

static _Atomic bool forced[VGPU_MAX_DEVICES]; /* somebody has gone through since the gate was shut */
static _Atomic int waiting[VGPU_MAX_DEVICES]; /* threads in flight_wait */

static void nap(void)
{
    nanosleep(&(struct timespec){0, 50000}, NULL);
}

static uint64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

/* Found shut: steps back and comes again. */
void flight_wait(struct counters *counters)
{
    uint64_t until = now_ms() + FLIGHT_PATIENCE_MS;
    long device = counters - vgpu_counters;
    atomic_fetch_add(&waiting[device], 1);
    do {
        atomic_fetch_sub(&counters->flying, 1);
        while (atomic_load(&counters->closed) && now_ms() < until)
            nap();
        atomic_fetch_add(&counters->flying, 1);
    } while (atomic_load(&counters->closed) && now_ms() < until);
    if (atomic_load(&counters->closed))
        atomic_store(&forced[device], true);
    atomic_fetch_sub(&waiting[device], 1);
}

void flight_moved(int device)
{
    EVENT(charge_moved, device);
}

bool gate_shut(int device)
{
    uint64_t until = now_ms() + PATIENCE_MS;
    bool quiet;
    while (atomic_load(&waiting[device]) && now_ms() < until)
        nap();
    atomic_store(&forced[device], false);
    atomic_store(&vgpu_counters[device].closed, 1);
    while (!(quiet = atomic_load(&vgpu_counters[device].flying) % FREEING == 0) && now_ms() < until)
        nap();
    if (!quiet)
        gate_open(device);
    return quiet;
}

bool gate_frees(int device)
{
    return atomic_load(&vgpu_counters[device].flying) >= FREEING;
}

bool gate_forced(int device)
{
    return atomic_load(&forced[device]);
}

void gate_open(int device)
{
    atomic_store(&vgpu_counters[device].closed, 0);
}
