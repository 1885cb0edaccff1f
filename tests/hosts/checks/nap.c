/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Preloaded before libfaketime 0.9.10, whose clock_nanosleep fails (EINVAL) for a time of the monotonic clock where it
 * shall leave that clock alone; Python sleeps by it.
 */
#include <errno.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *time, struct timespec *rest)
{
    return syscall(SYS_clock_nanosleep, clock, flags, time, rest) < 0 ? errno : 0;
}
