/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The gate stops new allocations while the account (what the container's processes are charged) is compared with the
 * memory used on the card. A thread is "in flight" between a charge and the return of the driver's call. In that time
 * the account and the card differ. A reader is a thread that needs both figures at the same moment. It shuts the gate
 * and waits until no thread is in flight. After 10 ms it reads the figures all the same, because the driver may delay an
 * allocation for any time. The memory of a thread in flight is charged before the driver has it, so such figures can
 * show only that the charge is too low.
 *
 * An allocation waits at the shut gate for at most 50 ms, because the reader may wait for a slow NVML. Then it passes
 * and sets `forced`. Waiting threads poll the gate and could find it shut each time, so a reader lets them pass before
 * it shuts the gate again.
 */
#include "account.h"
#include "events.h"

#include <time.h>

#define PATIENCE_MS 10
/* Longest wait of an allocation at the shut gate. It is longer than a slow NVML call, because otherwise a slow reader
 * could never read the two figures at the same moment. */
#define FLIGHT_PATIENCE_MS 50

static _Atomic bool forced[VGPU_MAX_DEVICES]; /* forced: true if a thread has passed the gate while it was shut. */
static _Atomic int waiting[VGPU_MAX_DEVICES]; /* waiting: number of threads in flight_wait. */

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

/* Called by a thread that finds the gate shut. The thread does not count as in flight while it waits, but counts again
 * afterwards. */
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
