/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The gate in front of a device's account. Between a charge and the driver's answer the account and the card differ: a thread
 * that is there is in flight. Who reads both figures together shuts the gate and waits until no thread is, for milliseconds:
 * the driver may hold an allocation up for as long as it likes, and the figures can be read another time.
 */
#include "account.h"
#include "events.h"

#include <time.h>

#define PATIENCE_MS 10

static void nap(void)
{
    nanosleep(&(struct timespec){0, 50000}, NULL);
}

/* Found shut: steps back and comes again. */
void flight_wait(struct counters *counters)
{
    do {
        atomic_fetch_sub(&counters->flying, 1);
        while (atomic_load(&counters->closed))
            nap();
        atomic_fetch_add(&counters->flying, 1);
    } while (atomic_load(&counters->closed));
}

void flight_moved(int device)
{
    EVENT(charge_moved, device);
}

bool gate_shut(int device)
{
    struct timespec from, now;
    bool quiet;
    clock_gettime(CLOCK_MONOTONIC, &from);
    now = from;
    atomic_store(&vgpu_counters[device].closed, 1);
    while (!(quiet = atomic_load(&vgpu_counters[device].flying) % FREEING == 0) &&
           (now.tv_sec - from.tv_sec) * 1000 + (now.tv_nsec - from.tv_nsec) / 1000000 < PATIENCE_MS) {
        nap();
        clock_gettime(CLOCK_MONOTONIC, &now);
    }
    if (!quiet)
        gate_open(device);
    return quiet;
}

bool gate_frees(int device)
{
    return atomic_load(&vgpu_counters[device].flying) >= FREEING;
}

void gate_open(int device)
{
    atomic_store(&vgpu_counters[device].closed, 0);
}
