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
/* In newer.c. Some driver functions are newer than this library, so it cannot charge their memory itself. Returns the
 * pointer that a program gets for such a function. The pointer leads to code that first requests a comparison of the
 * charges with NVML's figures and then calls the function. */
void *newer_form(const char *name, void *function);

#pragma GCC visibility pop

#endif
