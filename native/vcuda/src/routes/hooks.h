/* SPDX-License-Identifier: Apache-2.0 */
/* The table of all driver functions that this library replaces, with their replacements (hooks). */
#ifndef VGPU_HOOKS_H
#define VGPU_HOOKS_H

#include "driver/real.h"

#pragma GCC visibility push(hidden)

/* A replaced function: its symbol, its name without a version, the CUDA version from which the symbol applies, whether
 * it is the variant for per-thread default streams, whether it belongs to NVML, and the replacement. */
struct hook {
    const char *symbol, *name;
    int since, stream;
    bool nvml;
    void *ours;
};
extern const struct hook vgpu_hooks[HOOK_COUNT];
const struct hook *hook_find(const char *symbol);
/* In newer.c. Returns the pointer that a program gets for a driver function that is newer than this library. The
 * pointer leads to an entry that first arranges a comparison of the memory with NVML's figures. */
void *newer_form(const char *name, void *function);

#pragma GCC visibility pop

#endif
