/* SPDX-License-Identifier: Apache-2.0 */
/* CHECK ends a test program with the condition that was not true. Unlike assert(), it also works with NDEBUG. */
#ifndef CHECK_H
#define CHECK_H

#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
            exit(1); \
        } \
    } while (0)

#endif
