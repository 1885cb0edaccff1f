/* SPDX-License-Identifier: Apache-2.0 */
/* Returns the driver's own functions, so that a call of them bypasses the library's hooks. Programs link it with
 * src/driver/elf.c. */
#include "driver/real.h"

#include <stdio.h>
#include <stdlib.h>

__attribute__((visibility("default"))) void *unhooked(const char *name)
{
    struct object driver;
    void *found = object_with_soname("libcuda.so.1", &driver) ? object_symbol(&driver, name) : NULL;
    if (!found) {
        fprintf(stderr, "the driver has no %s\n", name);
        exit(4);
    }
    return found;
}
