/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes log lines to stderr, and has the slow part of the lock for threads. A daemon may close its descriptors, and
 * the next file that it opens gets number 2. Log lines must not be written into that file. So a line is written only if
 * descriptor 2 is still the file that it was when this process first used the library.
 */
#include "limits.h"

#include <errno.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

_Atomic int vgpu_log_level = LOG_WARN;

/* begun: 0 before log_begin; 1 if the two values below are set; 2 if descriptor 2 is closed. */
static _Atomic int begun;
static _Atomic uint64_t on_device, inode; /* on_device and inode identify the file to which descriptor 2 referred. */

/* Uses the system call, because on new systems libc's fstat would make the library require GLIBC_2.33. */
static bool look(struct stat *status)
{
    return syscall(SYS_fstat, STDERR_FILENO, status) == 0;
}

void log_begin(void)
{
    struct stat status;
    int saved = errno;
    bool open = look(&status);
    if (open) {
        atomic_store_explicit(&on_device, status.st_dev, memory_order_relaxed);
        atomic_store_explicit(&inode, status.st_ino, memory_order_relaxed);
    }
    atomic_store_explicit(&begun, open ? 1 : 2, memory_order_release);
    errno = saved;
}

static bool same_file(void)
{
    struct stat status;
    if (!atomic_load_explicit(&begun, memory_order_acquire))
        log_begin();
    return atomic_load_explicit(&begun, memory_order_acquire) == 1 && look(&status) &&
           status.st_dev == atomic_load_explicit(&on_device, memory_order_relaxed) &&
           status.st_ino == atomic_load_explicit(&inode, memory_order_relaxed);
}

void vgpu_log_line(enum log_level level, const char *format, ...)
{
    static const char *const names[] = {"error", "warning", "info", "call", "debug", "trace"};
    char line[512];
    int saved = errno;
    if (!same_file()) {
        errno = saved;
        return;
    }
    int used = snprintf(line, sizeof line, "libvgpu.so[%d] %s: ", (int)getpid(), names[level]);
    va_list arguments;
    va_start(arguments, format);
    int more = vsnprintf(line + used, sizeof line - (size_t)used - 1, format, arguments);
    va_end(arguments);
    if (more > (int)sizeof line - used - 2)
        more = (int)sizeof line - used - 2;
    line[used + more] = '\n';
    /* The line is written by one system call, so that lines of several processes do not mix and the program's stdio
     * buffers are not touched. */
    ssize_t written = write(STDERR_FILENO, line, (size_t)(used + more + 1));
    (void)written;
    errno = saved;
}

bool vgpu_log_again(_Atomic unsigned *count)
{
    unsigned n = atomic_fetch_add_explicit(count, 1, memory_order_relaxed) + 1;
    return (n & (n - 1)) == 0;
}

/* Called only if a lock is not free. That is rare, so this code is kept out of the inline functions. */
__attribute__((cold)) void lock_wait(struct lock *lock)
{
    while (atomic_exchange_explicit(&lock->word, 2, memory_order_acquire) != 0)
        syscall(SYS_futex, &lock->word, FUTEX_WAIT_PRIVATE, 2, NULL, NULL, 0);
}

__attribute__((cold)) void lock_wake(struct lock *lock)
{
    syscall(SYS_futex, &lock->word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}
