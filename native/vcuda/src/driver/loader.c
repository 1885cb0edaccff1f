/* SPDX-License-Identifier: Apache-2.0 */
/* libc's own dlsym, dlvsym and dlopen, read from its symbol table: what a program calls by these names is routes/route.c. */
#include "real.h"

typedef void *(*dlopen_type)(const char *, int);
dlsym_type vgpu_real_dlsym;
dlvsym_type vgpu_real_dlvsym;
static dlopen_type found_dlopen;

void loader_ready(void)
{
    /* Since glibc 2.34 libc has them, before that libdl; every thread that gets here stores the same values. */
    static const char *const homes[] = {"libc.so.6", "libdl.so.2"};
    if (__atomic_load_n(&vgpu_real_dlsym, __ATOMIC_ACQUIRE))
        return;
    for (int i = 0; i < 2 && !vgpu_real_dlsym; i++) {
        struct object libc;
        if (!object_with_soname(homes[i], &libc))
            continue;
        found_dlopen = (dlopen_type)object_symbol(&libc, "dlopen");
        vgpu_real_dlvsym = (dlvsym_type)object_symbol(&libc, "dlvsym");
        __atomic_store_n(&vgpu_real_dlsym, (dlsym_type)object_symbol(&libc, "dlsym"), __ATOMIC_RELEASE);
    }
}

void *real_dlsym(void *handle, const char *name)
{
    loader_ready();
    return vgpu_real_dlsym ? vgpu_real_dlsym(handle, name) : NULL;
}

void *real_dlopen(const char *path, int flags)
{
    loader_ready();
    return found_dlopen ? found_dlopen(path, flags) : NULL;
}
