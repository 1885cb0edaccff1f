/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Contexts of a device are made and ended one at a time, for they are measured. That is all that this lock is for: nobody needs
 * it to be right, so nobody waits for it without end. A tool that the driver calls back inside a call of ours may make contexts
 * of its own, and a driver may hold a call up until another thread has done something: such a call goes on unmeasured.
 */
#include "context.h"

#include <string.h>
#include <time.h>

#define PATIENCE_MS 1000 /* others make contexts meanwhile, which takes hundreds of milliseconds */

static struct lock locks[VGPU_MAX_DEVICES];
static __thread uint32_t held __attribute__((tls_model("initial-exec"))); /* by this thread, a bit each */
_Static_assert(VGPU_MAX_DEVICES <= 32, "a bit each");

bool context_try(int device)
{
    nvml_load(); /* not under the lock: the loader has one of its own, and runs constructors */
    if (held >> device & 1 || !lock_try(&locks[device]))
        return false;
    held |= 1u << device;
    return true;
}

bool context_lock(int device)
{
    if (held >> device & 1)
        return false;
    bool locked = context_try(device);
    for (int waited = 0; !locked && waited < PATIENCE_MS; waited++) {
        nanosleep(&(struct timespec){0, 1000000}, NULL);
        locked = context_try(device);
    }
    return locked;
}

void context_unlock(int device, bool locked)
{
    if (!locked)
        return;
    held &= ~(1u << device);
    lock_drop(&locks[device]);
}

void context_locks_reset(void)
{
    memset(locks, 0, sizeof locks);
    held = 0;
}
