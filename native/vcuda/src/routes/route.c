/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every way in which a program gets at a driver function, other than by linking against it.
 *
 * The driver is always asked first, and its answer is replaced only if it is its own function: a name that this driver
 * does not have stays unknown, and another interposer's function stays that interposer's.
 *
 * dlsym and dlvsym themselves are in route_entry.S: what the library does not want must be a jump to the real one with
 * the caller's return address in place, for RTLD_NEXT and RTLD_DEFAULT depend on who calls.
 */
#include "hooks.h"

#include "process.h"

#include <dlfcn.h>
#include <string.h>

/* What route_entry.S does: with `decided`, return the function; else jump to the real dlsym. */
struct decision {
    void *function;
    uintptr_t decided;
};
struct decision vgpu_decide(void *handle, const char *name, const char *version, void *caller);

void *vgpu_dlsym_entry(void *handle, const char *name);

struct next {
    const char *name;
    uintptr_t after;
    bool passed;
    void *function;
    bool nvml, driver;
};

static int look_after(const struct object *object, void *data)
{
    struct next *next = data;
    if (!next->passed) {
        next->passed = next->after >= object->low && next->after < object->high;
        return 0;
    }
    /* The next one after the main program is this library: what counts is what it stands before. */
    uintptr_t self = (uintptr_t)&vgpu_decide;
    if (self >= object->low && self < object->high)
        return 0;
    next->function = object_symbol(object, next->name);
    next->driver = is_driver(object, next->nvml);
    return next->function != NULL;
}

/* Which of our functions stands for this one of the driver's, NULL if it is not the driver's. */
static void *replacement(const struct hook *hook, void *function)
{
    struct object object;
    if (!function || !object_at(function, &object))
        return NULL;
    return is_driver(&object, hook->nvml) ? hook->ours : NULL;
}

/* A name of a form that is newer than this library. */
static struct decision decide_newer(void *handle, const char *name, const char *version, void *caller)
{
    struct object object;
    void *found = NULL;
    if (form_of(name) == FORM_REFUSED) {
        real_dlsym(handle, "cuGetProcAddress of a later driver"); /* finds nothing, and leaves its message for dlerror */
        return (struct decision){NULL, 1};
    }
    if (handle == RTLD_NEXT) {
        struct next next = {.name = name, .after = (uintptr_t)caller};
        object_each(look_after, &next);
        found = next.function;
    } else if (handle == RTLD_DEFAULT && driver_object(false, &object)) {
        found = object_symbol(&object, name);
    } else if (handle != RTLD_DEFAULT) {
        found = version ? vgpu_real_dlvsym(handle, name, version) : real_dlsym(handle, name);
    }
    if (found && object_at(found, &object) && is_driver(&object, false))
        return (struct decision){newer_form(name, found), 1};
    return (struct decision){NULL, 0}; /* asked again by the jump: another library's, or nobody's */
}

struct decision vgpu_decide(void *handle, const char *name, const char *version, void *caller)
{
    struct decision forward = {NULL, 0};
    watch_loader("dlsym"); /* by whom ever: the driver, too, under a lock of ours */
    loader_ready();
    /* An old glibc in a program without libdl: there is nothing to jump to, and nobody to look a name up. */
    if (version ? !vgpu_real_dlvsym : !vgpu_real_dlsym)
        return (struct decision){NULL, 1};
    if (!name)
        return forward;
    bool loader = name[0] == 'd' && (strcmp(name, "dlsym") == 0 || strcmp(name, "dlvsym") == 0);
    if (!loader && !(name[0] == 'c' && name[1] == 'u') && strncmp(name, "nvml", 4) != 0)
        return forward;
    const struct hook *hook = loader ? NULL : hook_find(name);
    if (!hook && !loader)
        return form_of(name) == FORM_KNOWN ? forward : decide_newer(handle, name, version, caller);

    if (loader) {
        void *found = version ? vgpu_real_dlvsym(handle, name, version) : real_dlsym(handle, name);
        struct object object;
        /* Only libc's own: another tool's dlsym found by a handle is that tool's. */
        if (!found || !object_at(found, &object) ||
            (strcmp(object.soname, "libc.so.6") != 0 && strcmp(object.soname, "libdl.so.2") != 0))
            return forward;
        struct object self;
        void *ours = object_at((void *)&vgpu_dlsym_entry, &self) ? object_symbol(&self, name) : NULL;
        return (struct decision){ours, ours != NULL};
    }

    if (handle == RTLD_NEXT) {
        struct next next = {.name = name, .after = (uintptr_t)caller, .nvml = hook->nvml};
        object_each(look_after, &next);
        if (!next.function) {
            real_dlsym(RTLD_NEXT, name); /* finds nothing either, and leaves its message for dlerror */
            return (struct decision){NULL, 1};
        }
        return (struct decision){next.driver ? hook->ours : next.function, 1};
    }
    if (handle == RTLD_DEFAULT) {
        /* The true caller's scope finds this library's export, or an interposer's before it. That is the answer where a
         * driver stands behind the name; where none does, what comes after us is. */
        struct object driver;
        if (driver_object(hook->nvml, &driver) && object_symbol(&driver, name))
            return forward;
        return (struct decision){real_dlsym(RTLD_NEXT, name), 1};
    }
    void *found = version ? vgpu_real_dlvsym(handle, name, version) : real_dlsym(handle, name);
    if (!found)
        return (struct decision){NULL, 1};
    void *ours = replacement(hook, found);
    if (!ours) {
        /* A handle of the whole program (dlopen(NULL)) finds our own export: true only if a driver stands behind it. */
        struct object object;
        if (found == hook->ours && !driver_object(hook->nvml, &object))
            found = real_dlsym(RTLD_NEXT, name);
        return (struct decision){found, 1};
    }
    return (struct decision){ours, 1};
}

static bool hooked_name(const char *name)
{
    for (int i = 0; i < HOOK_COUNT; i++)
        if (!vgpu_hooks[i].nvml && (strcmp(vgpu_hooks[i].name, name) == 0 || strcmp(vgpu_hooks[i].symbol, name) == 0))
            return true;
    return false;
}

/*
 * cuGetProcAddress: the pointer that the driver returned says which variant it chose. One of its exports that is not
 * replaced is a form newer than this library: nothing older may stand in for it, its parameters are others. Where the
 * driver returns a pointer that is none of its exported symbols, the rule of cuda.h decides: the newest symbol that is
 * not newer than the version asked for, in the stream variant asked for. NULL: the caller gets no such function.
 */
static void *variant(const char *name, void *function, int version, cuuint64_t flags)
{
    for (int i = 0; i < HOOK_COUNT; i++)
        if (vgpu_real[i] == function)
            return vgpu_hooks[i].ours;
    if (!hooked_name(name))
        return function;
    struct object object;
    if (object_at(function, &object) && object_exports(&object, function)) {
        enum form form = is_driver(&object, false) ? form_of_name(name) : FORM_KNOWN;
        if (form != FORM_REFUSED)
            return form == FORM_NEWER ? newer_form(name, function) : function;
        static _Atomic unsigned count;
        if (vgpu_log_again(&count))
            vgpu_log_line(LOG_ERROR, "%s for CUDA %d is refused: this driver's form of it is newer than this library", name,
                          version);
        return NULL;
    }
    const struct hook *best = NULL;
    bool per_thread = (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0, has_per_thread = false;
    for (int i = 0; i < HOOK_COUNT; i++)
        if (!vgpu_hooks[i].nvml && strcmp(vgpu_hooks[i].name, name) == 0 && vgpu_hooks[i].stream)
            has_per_thread = true;
    for (int i = 0; i < HOOK_COUNT; i++) {
        const struct hook *hook = &vgpu_hooks[i];
        if (hook->nvml || !vgpu_real[i])
            continue;
        if (strcmp(hook->symbol, name) == 0 && strcmp(hook->name, name) != 0)
            return hook->ours; /* asked for by its full name, which some drivers answer */
        if (strcmp(hook->name, name) != 0 || hook->since > version)
            continue;
        if (hook->stream != (per_thread && has_per_thread))
            continue;
        if (!best || hook->since > best->since)
            best = hook;
    }
    return best ? best->ours : function;
}

static CUresult answer(enum control control, const char *name, void **function, int version, cuuint64_t flags, int *result)
{
    if (control == CONTROL_OFF || !name || !function || !*function)
        return CUDA_SUCCESS;
    void *theirs = *function;
    *function = variant(name, theirs, version, flags);
    vgpu_log(LOG_TRACE, "cuGetProcAddress: %s for CUDA %d is %s", name, version,
             *function == theirs ? "the driver's" : *function ? "this library's" : "refused");
    if (*function)
        return CUDA_SUCCESS;
    if (result)
        *result = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return CUDA_ERROR_NOT_FOUND; /* of the first form; the second one tells by its pointer and *result alone */
}

EXPORT CUresult cuGetProcAddress(const char *symbol, void **function, int version, cuuint64_t flags)
{
    enum control control = vgpu_enter();
    if (!REAL_HAS(cuGetProcAddress))
        return CUDA_ERROR_NO_DEVICE;
    CUresult status = REAL(cuGetProcAddress)(symbol, function, version, flags);
    return status == CUDA_SUCCESS ? answer(control, symbol, function, version, flags, NULL) : status;
}

EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, cuuint64_t flags, int *result)
{
    enum control control = vgpu_enter();
    if (!REAL_HAS(cuGetProcAddress_v2))
        return CUDA_ERROR_NO_DEVICE;
    CUresult status = REAL(cuGetProcAddress_v2)(symbol, function, version, flags, result);
    if (status == CUDA_SUCCESS)
        answer(control, symbol, function, version, flags, result);
    return status;
}
