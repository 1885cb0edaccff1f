/* SPDX-License-Identifier: Apache-2.0 */
/* A library for LD_PRELOAD that simulates a lack of host memory. While the file $STARVED exists, calloc() fails for the
 * tables in which libvgpu.so records allocations. */
#include "account/blocks.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>

__attribute__((visibility("default"))) void *calloc(size_t count, size_t size)
{
    static const char *file;
    if (size == sizeof(struct block) && count >= 32 && (file || (file = getenv("STARVED"))) && access(file, F_OK) == 0)
        return NULL;
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes))
        return NULL;
    unsigned char *room = malloc(bytes ? bytes : 1);
    for (size_t i = 0; room && i < bytes; i++)
        /* No memset: the compiler would merge malloc and memset into a call of calloc, which is this function. */
        ((volatile unsigned char *)room)[i] = 0;
    return room;
}
