/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Makes sleep work in programs under libfaketime, which changes the time that a program sees. If libfaketime 0.9.10 is
 * set to leave the monotonic clock unchanged, its clock_nanosleep fails (EINVAL) for that clock. Python's time.sleep
 * uses this call. The library built from this file is preloaded before libfaketime and replaces the call.
 */
#include <errno.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *time, struct timespec *rest)
{
    return syscall(SYS_clock_nanosleep, clock, flags, time, rest) < 0 ? errno : 0;
}
