/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The gate in front of a device's account. Between a charge and the driver's call the account and the card differ: a thread
 * that is there is in flight. Who reads both figures together shuts the gate and waits until no thread is.
 */
#include "account.h"
#include "events.h"

#include <time.h>

#define PATIENCE_S 10

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
    struct timespec now;
    bool quiet;
    clock_gettime(CLOCK_MONOTONIC, &now);
    int64_t until = now.tv_sec + PATIENCE_S;
    atomic_store(&vgpu_counters[device].closed, 1);
    while (!(quiet = atomic_load(&vgpu_counters[device].flying) == 0) && now.tv_sec < until) {
        nap();
        clock_gettime(CLOCK_MONOTONIC, &now);
    }
    return quiet;
}

void gate_open(int device)
{
    atomic_store(&vgpu_counters[device].closed, 0);
}
