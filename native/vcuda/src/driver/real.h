/* SPDX-License-Identifier: Apache-2.0 */
/* What is loaded in this process, and the real functions of driver and loader. */
#ifndef VGPU_REAL_H
#define VGPU_REAL_H

#include "cuda_abi.h"
#include "limits/limits.h"
#include "vgpu_abi.h"

#include <pthread.h>

#pragma GCC visibility push(hidden)

/* --- elf.c: what is loaded, read from memory -------------------------------------------------------- */

struct object {
    uintptr_t base, low, high;
    const char *soname; /* or "" */
    const char *path;
    const void *dynamic, *symbols, *hash, *gnu_hash;
    const char *strings;
};
/* Calls `visit` for every object in load order until it answers non-zero, and answers that. */
int object_each(int (*visit)(const struct object *object, void *data), void *data);
bool object_with_soname(const char *soname, struct object *found);
bool object_at(const void *address, struct object *found);
void *object_symbol(const struct object *object, const char *name);
bool object_exports(const struct object *object, const void *address); /* as a function, under any name */
/* Whether it is linked against that library and uses a symbol of others whose name is `wanted`. */
bool object_links(const struct object *object, const char *soname, bool (*wanted)(const char *name));

/* --- forms.c: names of a driver that is newer than this library ------------------------------------------ */

enum form {
    FORM_KNOWN,   /* a hook's name, or nothing that concerns us */
    FORM_NEWER,   /* of a function that is hooked, and unknown: what it takes is looked for */
    FORM_REFUSED, /* of one that hands out functions: behind it no hook would be seen */
};
enum form form_of(const char *symbol);
/* The same of a name by which cuGetProcAddress was asked, whose answer is none of the hooked functions. */
enum form form_of_name(const char *name);
/* A library or the program was linked to such a form when the driver was found; no hook sees its calls. */
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
/* The driver's own function; only after driver_ready() or nvml_ready(), and only where REAL_HAS. */
#define REAL(symbol) ((__typeof__(&symbol))vgpu_real[F_##symbol])
#define REAL_HAS(symbol) (vgpu_real[F_##symbol] != NULL)

bool is_driver(const struct object *object, bool nvml); /* libcuda, under any path and name; libnvidia-ml.so.1, under any path */
bool driver_object(bool nvml, struct object *found);    /* the driver that is loaded, one of its own name first */
bool driver_ready(void);   /* libcuda is loaded; never loads it */
bool driver_settled(void); /* and under its own name: no other one will take its place */
bool nvml_ready(void);   /* libnvidia-ml.so.1 is loaded; never loads it */
void driver_reset(void);
bool nvml_load(void);    /* loads and initialises NVML for the library's own questions */

/* --- loader.c: libc's own functions, past those of ours and of other libraries --------------------------- */

typedef void *(*dlsym_type)(void *, const char *);
typedef void *(*dlvsym_type)(void *, const char *, const char *);
extern dlsym_type vgpu_real_dlsym; /* NULL before loader_ready() */
extern dlvsym_type vgpu_real_dlvsym;
void loader_ready(void); /* looks for them, the first time */
void *real_dlsym(void *handle, const char *name);
void *real_dlopen(const char *path, int flags);

typedef int (*thread_create_type)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
typedef int (*thread_detach_type)(pthread_t);
typedef int (*thread_key_type)(pthread_key_t *, void (*)(void *));
typedef int (*thread_set_type)(pthread_key_t, const void *);
/* The functions of that name; NULL: a program without threads. Found with the driver, so that no lock is held meanwhile. */
extern struct thread_calls {
    thread_create_type create;
    thread_detach_type detach;
    thread_key_type key_create;
    thread_set_type set;
} vgpu_threads;
void threads_ready(void);

#pragma GCC visibility pop

#endif
