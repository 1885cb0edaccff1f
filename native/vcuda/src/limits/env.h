/* SPDX-License-Identifier: Apache-2.0 */
/* Private to env.c and limits.c: what the environment of this process asks for. */
#ifndef VGPU_ENV_H
#define VGPU_ENV_H

#include "limits.h"

bool env_bytes(const char *text, uint64_t *bytes); /* whole number, suffix k, m, g of 1024 in either case */
bool env_flag(const char *text, bool *value);
bool env_number(const char *text, int low, int high, int *value);

enum { ENV_UNSET = -1 };

struct environment {
    uint64_t memory, memory_of[VGPU_MAX_DEVICES]; /* bytes; 0: not set */
    int sm, sm_of[VGPU_MAX_DEVICES];              /* percent, 0 to 100 */
    int policy;                                   /* enum vgpu_core_policy */
    int priority, oom_killer, oversubscribe;
    int log_level;
    bool disable;
    bool limits;    /* something here limits or serves memory or time: without a limits file the library is on */
    bool by_device; /* some variable has an index */
    char ledger[512];
};

/* Reads every variable once; what cannot be read is one line on stderr and stays unset. */
void env_read(struct environment *environment);
/* A copy, and absolute: programs overwrite their environment (setproctitle) and change their folder. */
void env_keep_path(const char *text, char *kept, size_t room);

#endif
