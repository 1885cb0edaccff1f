/* SPDX-License-Identifier: Apache-2.0 */
/* Contexts and modules of a device are made and ended one at a time, for they are measured. */
#include "context.h"

#include <string.h>

static struct lock locks[VGPU_MAX_DEVICES];

/* What is measured under the lock needs NVML, and the loader must not be called there. */
void context_lock(int device)
{
    nvml_load();
    lock_take(&locks[device]);
}

bool context_try(int device)
{
    nvml_load();
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
