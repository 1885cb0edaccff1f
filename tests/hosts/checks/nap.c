/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Repairs sleeping in programs that run under libfaketime, which changes the time that a program sees. The library of
 * this file is preloaded before libfaketime 0.9.10, whose clock_nanosleep fails (EINVAL) for the monotonic clock if
 * libfaketime is set to leave that clock unchanged. Python's time.sleep uses this call.
 */
#include <errno.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *time, struct timespec *rest)
{
    return syscall(SYS_clock_nanosleep, clock, flags, time, rest) < 0 ? errno : 0;
}
