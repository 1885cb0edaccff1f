/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Finds libc's own dlsym, dlvsym and dlopen in libc's symbol table. Programs that call dlsym and dlvsym get this
 * library's versions (routes/route.c). This library calls libc's functions only while it holds none of its own locks
 * (driver.c says why).
 */
#include "real.h"

typedef void *(*dlopen_type)(const char *, int);
/* Several threads may look these up at once, because all of them store the same values. */
_Atomic(dlsym_type) vgpu_real_dlsym;
_Atomic(dlvsym_type) vgpu_real_dlvsym;
static _Atomic(dlopen_type) found_dlopen;

void loader_ready(void)
{
    /* Since glibc 2.34 these functions are in libc, before that in libdl. vgpu_real_dlsym is stored last: if it is not
     * NULL, the others are valid too. */
    static const char *const homes[] = {"libc.so.6", "libdl.so.2"};
    for (int i = 0; i < 2 && !vgpu_real_dlsym; i++) {
        struct object libc;
        if (!object_with_soname(homes[i], &libc))
            continue;
        found_dlopen = (dlopen_type)object_symbol(&libc, "dlopen");
        vgpu_real_dlvsym = (dlvsym_type)object_symbol(&libc, "dlvsym");
        vgpu_real_dlsym = (dlsym_type)object_symbol(&libc, "dlsym");
    }
}

/* The pthread functions, found in the program's libraries. If this library were linked against them, it could require a
 * newer symbol version than the libc of the container image has. Like the dynamic loader, the search takes the first
 * object that has the name. */
struct thread_calls vgpu_threads;

struct named {
    const char *name;
    void *function;
};

static int take_symbol(const struct object *object, void *data)
{
    struct named *named = data;
    named->function = object_symbol(object, named->name);
    return named->function != NULL;
}

static void *symbol_of_process(const char *name)
{
    struct named named = {name, NULL};
    object_each(take_symbol, &named);
    return named.function;
}

void threads_ready(void)
{
    /* Several threads may look these functions up at once, because all of them store the same values. */
    static _Atomic bool ready;
    if (atomic_load_explicit(&ready, memory_order_acquire))
        return;
    __atomic_store_n(&vgpu_threads.create, (thread_create_type)symbol_of_process("pthread_create"), __ATOMIC_RELAXED);
    __atomic_store_n(&vgpu_threads.detach, (thread_detach_type)symbol_of_process("pthread_detach"), __ATOMIC_RELAXED);
    __atomic_store_n(&vgpu_threads.key_create, (thread_key_type)symbol_of_process("pthread_key_create"), __ATOMIC_RELAXED);
    __atomic_store_n(&vgpu_threads.set, (thread_set_type)symbol_of_process("pthread_setspecific"), __ATOMIC_RELAXED);
    atomic_store_explicit(&ready, true, memory_order_release);
}

void *real_dlsym(void *handle, const char *name)
{
    watch_loader("dlsym");
    loader_ready();
    dlsym_type function = vgpu_real_dlsym;
    return function ? function(handle, name) : NULL;
}

void *real_dlopen(const char *path, int flags)
{
    watch_loader("dlopen");
    loader_ready();
    dlopen_type function = found_dlopen;
    return function ? function(path, flags) : NULL;
}
