/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dlopen without RTLD_DEEPBIND. A library that is opened with it (taichi opens its own so) finds libc's dlsym and the
 * driver's functions before those of this library, and nothing that it takes would be charged. It is opened as any other:
 * programs that need the flag to keep two copies of a symbol apart find the first one in a slice.
 *
 * Nothing else happens here, for a library's constructor may call this with the loader's lock held. open_entry.S jumps to
 * the real function, which looks at its caller's run path.
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
    static void *real; /* every thread that gets here stores the same value */
    static const char *const homes[] = {"libc.so.6", "libdl.so.2"};
    struct object libc;
    (void)path;
    for (int i = 0; i < 2 && !__atomic_load_n(&real, __ATOMIC_RELAXED); i++)
        if (object_with_soname(homes[i], &libc))
            __atomic_store_n(&real, object_symbol(&libc, "dlopen"), __ATOMIC_RELAXED);
    return (struct opening){__atomic_load_n(&real, __ATOMIC_RELAXED), (uintptr_t)(unsigned)(flags & ~RTLD_DEEPBIND)};
}
