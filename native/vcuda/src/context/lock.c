/* SPDX-License-Identifier: Apache-2.0 */
/* Contexts and modules of a device are made and ended one at a time, for they are measured. */
#include "context.h"

#include <string.h>

static struct lock locks[VGPU_MAX_DEVICES];

void context_lock(int device)
{
    nvml_load(); /* what is measured under the lock needs it, and the loader must not be called there */
    lock_take(&locks[device]);
}

bool context_try(int device)
{
    return lock_try(&locks[device]);
}

void context_unlock(int device)
{
    lock_drop(&locks[device]);
}

void context_locks_reset(void)
{
    memset(locks, 0, sizeof locks);
}
