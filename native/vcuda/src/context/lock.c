/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Serialises the creation and destruction of contexts of a device, because their sizes are measured. The lock serves
 * only the measurement, so a thread waits for it only for a limited time. Without this time limit there could be a
 * deadlock in two ways. While the thread with the lock is inside the driver, the driver may call a tool in the process
 * (a profiler, for example) that creates contexts itself. Or the driver may delay that thread until another thread has
 * acted.
 *
 * A call that does not get the lock continues without a measurement. The measurement of the thread that has the lock
 * may then include that call's bytes. To detect this, calls without the lock are counted.
 */
#include "context.h"

#include <string.h>
#include <time.h>

/* Longest wait for the lock. The wait is this long because creating a context takes hundreds of milliseconds. */
#define PATIENCE_MS 1000

static struct lock locks[VGPU_MAX_DEVICES];
/* True after a thread has waited in vain for the lock. In this state no other thread waits until the holder has
 * released the lock. */
static _Atomic bool stuck[VGPU_MAX_DEVICES];
/* Calls that run without the lock. The low half counts those that are active now, the high half all of them so far. */
static _Atomic uint64_t passing[VGPU_MAX_DEVICES];
#define PASSED (1ull << 32)
/* Bit n is set while this thread has the lock of device n. */
static __thread uint32_t held __attribute__((tls_model("initial-exec")));
_Static_assert(VGPU_MAX_DEVICES <= 32, "a bit each");

bool context_try(int device)
{
    if (limits_count_context())
        /* Load NVML before taking the lock, because dlopen takes the dynamic loader's own lock and runs
         * constructors. */
        nvml_load();
    if (held >> device & 1 || !lock_try(&locks[device]))
        return false;
    held |= 1u << device;
    return true;
}

static bool wait_for(int device)
{
    bool locked = context_try(device);
    for (int waited = 0; !locked && waited < PATIENCE_MS && !atomic_load_explicit(&stuck[device], memory_order_relaxed); waited++) {
        nanosleep(&(struct timespec){0, 1000000}, NULL);
        locked = context_try(device);
    }
    if (!locked)
        atomic_store_explicit(&stuck[device], true, memory_order_relaxed);
    return locked;
}

bool context_lock(int device)
{
    if (!(held >> device & 1) && wait_for(device))
        return true;
    atomic_fetch_add(&passing[device], PASSED + 1);
    return false;
}

void context_unlock(int device, bool locked)
{
    if (!locked) {
        atomic_fetch_sub(&passing[device], 1);
        return;
    }
    held &= ~(1u << device);
    atomic_store_explicit(&stuck[device], false, memory_order_relaxed);
    lock_drop(&locks[device]);
}

bool context_pass(int device)
{
    bool passes = !(held >> device & 1);
    if (passes)
        atomic_fetch_add(&passing[device], PASSED + 1);
    return passes;
}

uint64_t context_passing(int device)
{
    return atomic_load(&passing[device]);
}

bool context_alone(int device, uint64_t since)
{
    return since % PASSED == 0 && atomic_load(&passing[device]) == since;
}

void context_locks_reset(void)
{
    memset(locks, 0, sizeof locks);
    memset(stuck, 0, sizeof stuck);
    memset(passing, 0, sizeof passing);
    held = 0;
}
