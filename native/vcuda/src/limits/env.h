/* SPDX-License-Identifier: Apache-2.0 */
/* Private to env.c and limits.c: the settings that environment variables make for this process. */
#ifndef VGPU_ENV_H
#define VGPU_ENV_H

#include "limits.h"

/* Parses a whole number with an optional suffix k, m or g (powers of 1024) in either case. */
bool env_bytes(const char *text, uint64_t *bytes);
bool env_flag(const char *text, bool *value);
bool env_number(const char *text, int low, int high, int *value);

enum { ENV_UNSET = -1 };

struct environment {
    /* memory: limit in bytes for all devices, 0 if not set. memory_of: the same for one device. */
    uint64_t memory, memory_of[VGPU_MAX_DEVICES];
    /* sm: percentage of SM time for all devices, 0 to 100. sm_of: the same for one device. */
    int sm, sm_of[VGPU_MAX_DEVICES];
    int policy;                                   /* policy: value of enum vgpu_core_policy. */
    int priority, oom_killer, oversubscribe;
    int log_level;
    bool disable;
    /* limits: true if some variable limits memory or time. Then the library is active even without a limits file. */
    bool limits;
    bool by_device; /* by_device: true if some variable is for one device, that is, if its name has a device index. */
    /* ledger: path of the ledger (the file in which charges are recorded); empty if not set. */
    char ledger[512];
};

/* Reads every variable once. An invalid value is reported by one line on stderr and counts as not set. */
void env_read(struct environment *environment);
/* Copies a path and makes it absolute. The copy is needed because programs overwrite their environment (setproctitle),
 * the absolute path because programs change their working directory. */
void env_keep_path(const char *text, char *kept, size_t room);

#endif
