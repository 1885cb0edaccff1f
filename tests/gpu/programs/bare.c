/* SPDX-License-Identifier: Apache-2.0 */
/* Finds the driver's own function in the driver's symbol table, without a lookup that a preloaded library could
 * intercept. With it programs compare the driver's function with the library's. */
#include "driver/real.h"

void *bare_symbol(const char *name);

void *bare_symbol(const char *name)
{
    struct object driver;
    return object_with_soname("libcuda.so.1", &driver) ? object_symbol(&driver, name) : NULL;
}
