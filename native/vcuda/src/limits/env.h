/* SPDX-License-Identifier: Apache-2.0 */
/* Private to env.c and limits.c: the settings from the environment of this process. */
#ifndef VGPU_ENV_H
#define VGPU_ENV_H

#include "limits.h"

/* Parses a whole number with an optional suffix k, m or g (powers of 1024) in either case. */
bool env_bytes(const char *text, uint64_t *bytes);
bool env_flag(const char *text, bool *value);
bool env_number(const char *text, int low, int high, int *value);

enum { ENV_UNSET = -1 };

struct environment {
    uint64_t memory, memory_of[VGPU_MAX_DEVICES]; /* memory: bytes, 0 if not set. */
    int sm, sm_of[VGPU_MAX_DEVICES];              /* sm: percent from 0 to 100. */
    int policy;                                   /* policy: a value of enum vgpu_core_policy. */
    int priority, oom_killer, oversubscribe;
    int log_level;
    bool disable;
    bool limits;    /* limits: some variable limits memory or time, so the library is active without a limits file. */
    bool by_device; /* by_device: the name of some variable has a device index. */
    char ledger[512];
};

/* Reads every variable once. An invalid value is reported by one line on stderr and stays unset. */
void env_read(struct environment *environment);
/* Copies a path and makes it absolute, because programs overwrite their environment (setproctitle) and change their
 * folder. */
void env_keep_path(const char *text, char *kept, size_t room);

#endif
