/* SPDX-License-Identifier: Apache-2.0 */
/* Returns the addresses of the driver's own functions, so that calls bypass the library's hooks. A program that uses
 * this file must be linked with src/driver/elf.c. */
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
