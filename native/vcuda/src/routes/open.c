/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Replaces dlopen, to open libraries without the flag RTLD_DEEPBIND. A library that is opened with that flag (taichi
 * does this) would find libc's dlsym and the driver's functions before those of this library, so its memory would not
 * be charged. A program that needs the flag to use its own copy of a symbol gets the first loaded copy instead.
 *
 * This code does nothing else, because a library's constructor may call it while the loader's lock is held.
 * open_entry.S jumps to the real dlopen with the program's return address in place, because the real function reads its
 * caller's run path.
 */
#include "driver/real.h"

#include <dlfcn.h>

struct opening {
    void *real;
    uintptr_t flags;
};
struct opening vgpu_opening(const char *path, int flags);

struct opening vgpu_opening(const char *path, int flags)
{
    static void *real; /* All threads store the same value in this variable. */
    static const char *const homes[] = {"libc.so.6", "libdl.so.2"};
    struct object libc;
    (void)path;
    for (int i = 0; i < 2 && !__atomic_load_n(&real, __ATOMIC_RELAXED); i++)
        if (object_with_soname(homes[i], &libc))
            __atomic_store_n(&real, object_symbol(&libc, "dlopen"), __ATOMIC_RELAXED);
    return (struct opening){__atomic_load_n(&real, __ATOMIC_RELAXED), (uintptr_t)(unsigned)(flags & ~RTLD_DEEPBIND)};
}
