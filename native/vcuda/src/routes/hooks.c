/* SPDX-License-Identifier: Apache-2.0 */
/* The table of the driver functions that this library replaces, and the function that searches it. */
#include "hooks.h"

#include <string.h>

const struct hook vgpu_hooks[HOOK_COUNT] = {
#define HOOK(symbol, name, since, stream, result, parameters) {#symbol, name, since, stream, false, (void *)symbol},
#define NVML(symbol, result, parameters) {#symbol, #symbol, 0, 0, true, (void *)symbol},
#include "driver/hooks.def"
#undef HOOK
#undef NVML
};

const struct hook *hook_find(const char *symbol)
{
    for (int i = 0; i < HOOK_COUNT; i++)
        if (strcmp(vgpu_hooks[i].symbol, symbol) == 0)
            return &vgpu_hooks[i];
    return NULL;
}
