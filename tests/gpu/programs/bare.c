/* SPDX-License-Identifier: Apache-2.0 */
/* The driver's own function, read from its symbol table: no lookup that a library could replace is asked. */
#include "driver/real.h"

void *bare_symbol(const char *name);

void *bare_symbol(const char *name)
{
    struct object driver;
    return object_with_soname("libcuda.so.1", &driver) ? object_symbol(&driver, name) : NULL;
}
