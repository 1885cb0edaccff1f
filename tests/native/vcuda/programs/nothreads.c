/* SPDX-License-Identifier: Apache-2.0 */
/* A preloaded library that makes each call of pthread_create() fail, as on a machine that allows no further thread. */
#include <errno.h>

int pthread_create(void *thread, const void *attributes, void *(*start)(void *), void *argument);
int pthread_create(void *thread, const void *attributes, void *(*start)(void *), void *argument)
{
    (void)thread;
    (void)attributes;
    (void)start;
    (void)argument;
    return EAGAIN;
}
