/* SPDX-License-Identifier: Apache-2.0 */
/* Every function that is replaced, and what replaces it. */
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
/* newer.c: what a program gets for this function of the driver, of a form that is newer than this library. */
void *newer_form(const char *name, void *function);

#pragma GCC visibility pop

#endif
