/* SPDX-License-Identifier: Apache-2.0 */
/* The objects (the program and its libraries) that are loaded in this process, and the real functions of the driver and
 * of the dynamic loader. The library's hooks replace functions of the driver and call the real ones. */
#ifndef VGPU_REAL_H
#define VGPU_REAL_H

#include "cuda_abi.h"
#include "limits/limits.h"
#include "vgpu_abi.h"

#include <pthread.h>

#pragma GCC visibility push(hidden)

/* --- elf.c: loaded objects and their symbols, read from memory -------------------------------------- */

struct object {
    uintptr_t base, low, high;
    const char *soname; /* Empty if the object has no soname. */
    const char *path;
    const void *dynamic, *symbols, *hash, *gnu_hash;
    const char *strings;
};
/* Calls `visit` for every object in load order until it returns non-zero, and returns that value. */
int object_each(int (*visit)(const struct object *object, void *data), void *data);
bool object_with_soname(const char *soname, struct object *found);
bool object_at(const void *address, struct object *found);
void *object_symbol(const struct object *object, const char *name);
/* Returns true if the object exports the function at this address, under any name. */
bool object_exports(const struct object *object, const void *address);
/* Returns true if the object is linked against `soname` and imports a symbol whose name `wanted` accepts. */
bool object_links(const struct object *object, const char *soname, bool (*wanted)(const char *name));

/* --- forms.c: functions of a driver that is newer than this library -------------------------------------- */

enum form {
    /* KNOWN: the name of a hook (a function that this library replaces), or of a function that need not be replaced. */
    FORM_KNOWN,
    /* NEWER: a version of a hooked function that this library does not know. The library cannot charge the memory of
     * such a call directly, so it compares its charges with NVML's figures afterwards. */
    FORM_NEWER,
    /* REFUSED: an unknown version of a function that returns function pointers. The call is refused, because hooks
     * would not see calls through those pointers. */
    FORM_REFUSED,
};
/* Classifies the name of an exported symbol. */
enum form form_of(const char *symbol);
/* Does the same for a name that a program passed to cuGetProcAddress. Not for names of hooked functions. */
enum form form_of_name(const char *name);
/* True if the program or one of its libraries was linked against an unknown version of a hooked function when the
 * driver was found. No hook sees calls of such a function. */
extern _Atomic bool vgpu_forms_linked;
void forms_look(void);

/* --- driver.c: the real functions ------------------------------------------------------------------- */

enum function {
#define HOOK(symbol, name, since, stream, result, parameters) F_##symbol,
#define NVML(symbol, result, parameters) F_##symbol,
#include "hooks.def"
#undef HOOK
#undef NVML
    HOOK_COUNT,
    CALL_FIRST = HOOK_COUNT - 1,
#define CALL(symbol, result, parameters) F_##symbol,
#define CALL_NVML(symbol, result, parameters) F_##symbol,
#include "calls.def"
#undef CALL
#undef CALL_NVML
    FUNCTION_COUNT
};
#define HOOK(symbol, name, since, stream, result, parameters) EXPORT result symbol parameters;
#define NVML(symbol, result, parameters) EXPORT result symbol parameters;
#include "hooks.def"
#undef HOOK
#undef NVML
#define CALL(symbol, result, parameters) result symbol parameters;
#define CALL_NVML(symbol, result, parameters) result symbol parameters;
#include "calls.def"
#undef CALL
#undef CALL_NVML

extern void *vgpu_real[FUNCTION_COUNT];
/* The driver's own function (REAL), and whether this driver has it (REAL_HAS). REAL may be used only after
 * driver_ready() or nvml_ready(), and only if REAL_HAS is true. */
#define REAL(symbol) ((__typeof__(&symbol))vgpu_real[F_##symbol])
#define REAL_HAS(symbol) (vgpu_real[F_##symbol] != NULL)

/* Returns true if the object is libcuda, whatever its path and name. With `nvml`, returns true if the object is
 * libnvidia-ml.so.1, whatever its path. */
bool is_driver(const struct object *object, bool nvml);
/* Finds the loaded driver. If several are loaded, the one with the standard name is used. */
bool driver_object(bool nvml, struct object *found);
bool driver_ready(void);   /* driver_ready returns true if libcuda is loaded; it never loads libcuda. */
/* driver_settled returns true if libcuda is loaded under its standard name, so that no other driver will replace it. */
bool driver_settled(void);
bool nvml_ready(void);   /* nvml_ready returns true if libnvidia-ml.so.1 is loaded; it never loads that library. */
void driver_reset(void);
bool nvml_load(void);    /* Loads and initialises NVML for this library's own queries. */
/* Sets the thread's capture mode to RELAXED until capture_restore(), so that the library's calls do not break a
 * capture of another stream. Returns false if that failed. */
bool capture_relax(int *mode);
void capture_restore(int mode);

/* --- loader.c: libc's own functions, not the replacements of this or of other libraries ------------------- */

typedef void *(*dlsym_type)(void *, const char *);
typedef void *(*dlvsym_type)(void *, const char *, const char *);
extern _Atomic(dlsym_type) vgpu_real_dlsym; /* NULL before loader_ready() was called. */
extern _Atomic(dlvsym_type) vgpu_real_dlvsym;
void loader_ready(void); /* Finds libc's dlsym and dlvsym. Only the first call has an effect. */
void *real_dlsym(void *handle, const char *name);
void *real_dlopen(const char *path, int flags);

typedef int (*thread_create_type)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
typedef int (*thread_detach_type)(pthread_t);
typedef int (*thread_key_type)(pthread_key_t *, void (*)(void *));
typedef int (*thread_set_type)(pthread_key_t, const void *);
/* The thread functions of the program's C library; NULL if the program is not linked with threads. They are looked up
 * early, together with the driver, because no lock of this library may be held during a look-up. */
extern struct thread_calls {
    thread_create_type create;
    thread_detach_type detach;
    thread_key_type key_create;
    thread_set_type set;
} vgpu_threads;
void threads_ready(void);

#pragma GCC visibility pop

#endif
