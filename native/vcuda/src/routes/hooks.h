/* SPDX-License-Identifier: Apache-2.0 */
/* The list of all replaced functions with their replacements. */
#ifndef VGPU_HOOKS_H
#define VGPU_HOOKS_H

#include "driver/real.h"

#pragma GCC visibility push(hidden)

struct hook {
    const char *symbol, *name;
    int since, stream;
    bool nvml;
    void *ours;
};
extern const struct hook vgpu_hooks[HOOK_COUNT];
const struct hook *hook_find(const char *symbol);
/* newer.c: returns the pointer that a program gets for a driver function whose version is newer than this library. */
void *newer_form(const char *name, void *function);

#pragma GCC visibility pop

#endif
