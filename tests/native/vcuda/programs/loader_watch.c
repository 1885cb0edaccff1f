/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A library that is preloaded before libvgpu.so, the library under test, to find deadlocks with the dynamic loader. It
 * ends the process if a thread calls the loader while the thread holds a lock of libvgpu.so. libvgpu.so, built with
 * WATCH=1, reports its locks and its own loader calls. To see the loader calls of other code, this file replaces libc's
 * functions. The variable VGPU_WATCH_FOUND names a folder for the reports. With -DPLANTED this file is a program, the
 * negative control. This program makes a forbidden or an allowed call, as its argument says.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "limits/limits.h"

#ifdef PLANTED
int main(int argc, char **argv)
{
    struct lock lock = {0};
    const char *what = argc > 1 ? argv[1] : "";
    if (strcmp(what, "free") != 0)
        lock_take(&lock);
    if (strcmp(what, "dlsym") == 0)
        return !dlsym(RTLD_DEFAULT, "cuInit");
    if (strcmp(what, "dropped") == 0)
        lock_drop(&lock);
    void *library = dlopen("libm.so.6", RTLD_NOW);
    return !library || dlclose(library);
}
#else

#define DEEPEST 64

static __thread const void *held[DEEPEST];
static __thread int depth;

/* After a fork the child holds no locks, because libvgpu.so resets them. */
static void in_child(void)
{
    depth = 0;
}

static __attribute__((constructor)) void begin(void)
{
    pthread_atfork(NULL, NULL, in_child);
}

EXPORT void vgpu_watch_lock(const void *lock, bool taken)
{
    if (taken) {
        if (depth < DEEPEST)
            held[depth++] = lock;
        return;
    }
    for (int i = depth; i-- > 0;)
        if (held[i] == lock) {
            memmove(&held[i], &held[i + 1], (size_t)(--depth - i) * sizeof *held);
            return;
        }
}

EXPORT void vgpu_watch_loader(const char *function)
{
    char line[256], path[256];
    const char *folder = getenv("VGPU_WATCH_FOUND");
    if (!depth)
        return;
    int length = snprintf(line, sizeof line, "process %d: %s is called with %d locks of the library held\n", (int)getpid(), function, depth);
    snprintf(path, sizeof path, "%s/found.%d", folder ? folder : "/nonexistent", (int)getpid());
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (write(file < 0 ? STDERR_FILENO : file, line, (size_t)length) < 0)
        perror(path);
    abort();
}

/* This function jumps to libc's function instead of calling it, because the loader checks the return address. */
#define STANDS_BEFORE(name)         \
    static void *real_##name; \
    __attribute__((used)) static void *ask_##name(void) \
    { \
        vgpu_watch_loader(#name); \
        if (!real_##name) \
            real_##name = dlsym(RTLD_NEXT, #name); \
        return real_##name; \
    } \
    __asm__(".globl " #name "\n.type " #name ", @function\n" #name ":\n" \
            "push %rdi\n push %rsi\n push %rdx\n push %rcx\n push %r8\n" \
            "call ask_" #name "\n" \
            "pop %r8\n pop %rcx\n pop %rdx\n pop %rsi\n pop %rdi\n" \
            "jmp *%rax\n");

STANDS_BEFORE(dlopen)
STANDS_BEFORE(dlmopen)
STANDS_BEFORE(dlclose)
#endif
