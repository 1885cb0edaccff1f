/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Handles the ways by which a program finds a driver function at run time: dlsym, dlvsym and cuGetProcAddress. A name
 * is always looked up without this library first. The result is replaced by a hook (this library's version) only if it
 * is the driver's own function. So a program does not find a name that this driver does not have, and a function of
 * another interposing library stays in place.
 *
 * The exported dlsym and dlvsym are in route_entry.S. For calls that this library does not handle they jump to the real
 * function with the caller's return address in place, because RTLD_NEXT and RTLD_DEFAULT depend on the caller.
 */
#include "hooks.h"

#include "process.h"

#include <dlfcn.h>
#include <string.h>

/* What route_entry.S must do. If `decided` is 1, it returns `function` to the program; otherwise it jumps to the real
 * dlsym. */
struct decision {
    void *function;
    uintptr_t decided;
};
struct decision vgpu_decide(void *handle, const char *name, const char *version, void *caller);

void *vgpu_dlsym_entry(void *handle, const char *name);

/* The state of a search like that of RTLD_NEXT: it finds the first object after the caller's object that has the
 * symbol. */
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
    /* Skip this library, which is the next object after the main program, and look in the objects after it. */
    uintptr_t self = (uintptr_t)&vgpu_decide;
    if (self >= object->low && self < object->high)
        return 0;
    next->function = object_symbol(object, next->name);
    next->driver = is_driver(object, next->nvml);
    return next->function != NULL;
}

/* Returns the hook if the function is the driver's own, else NULL. */
static void *replacement(const struct hook *hook, void *function)
{
    struct object object;
    if (!function || !object_at(function, &object))
        return NULL;
    return is_driver(&object, hook->nvml) ? hook->ours : NULL;
}

/* Decides what dlsym returns for the name of a driver function that is newer than this library. */
static struct decision decide_newer(void *handle, const char *name, const char *version, void *caller)
{
    struct object object;
    void *found = NULL;
    if (form_of(name) == FORM_REFUSED) {
        /* This call finds nothing. It is made only to set the message that dlerror returns. */
        real_dlsym(handle, "cuGetProcAddress of a later driver");
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
    /* The name is unknown or belongs to another library, so the real dlsym looks it up again. */
    return (struct decision){NULL, 0};
}

struct decision vgpu_decide(void *handle, const char *name, const char *version, void *caller)
{
    struct decision forward = {NULL, 0};
    /* In a build for tests, report every call to the test library, including calls that the driver makes. */
    watch_loader("dlsym");
    loader_ready();
    /* In a program without libdl on an old glibc there is no real function to jump to. */
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
        /* The program looks up dlsym itself. Replace only libc's own dlsym. If the handle leads to the dlsym of another
         * tool, the program gets that one. */
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
            /* This call finds nothing either. It is made only to set the message that dlerror returns. */
            real_dlsym(RTLD_NEXT, name);
            return (struct decision){NULL, 1};
        }
        return (struct decision){next.driver ? hook->ours : next.function, 1};
    }
    if (handle == RTLD_DEFAULT) {
        /* The normal search finds the hook that this library exports, or the function of an interposing library before
         * it. If a loaded driver has the function, let the real dlsym make this search. Otherwise the program must not
         * find the hook, so search only the objects after this library. */
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
        /* A search in the whole program (a handle of dlopen(NULL)) finds the hook that this library exports. Return the
         * hook only if a driver is loaded. Otherwise search only the objects after this library. */
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
 * For cuGetProcAddress: `function` is the pointer that the driver returned. Returns the pointer that the program gets
 * (a function of this library or `function`), or NULL if the program may not get the function.
 *
 * The pointer identifies the version that the driver chose, so the program gets the hook of that version. If the
 * pointer is an exported function without a hook, that version is newer than this library. No hook of an older version
 * can replace it, because its parameters differ. If the pointer is no exported symbol of the driver, the rule of cuda.h
 * applies: the newest symbol that is not newer than the requested version, in the requested stream variant.
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
            vgpu_log_line(LOG_ERROR, "%s for CUDA %d is refused: the driver's version of it is newer than this library", name,
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
            return hook->ours; /* The program requested the function by its full name, which some drivers accept. */
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
    /* Only cuGetProcAddress returns this error. cuGetProcAddress_v2 reports it through the pointer and *result. */
    return CUDA_ERROR_NOT_FOUND;
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
