/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Finds the driver's own functions in the libraries that the program has loaded. This happens once, when the first hook
 * (replacement of a driver function) runs. This library never loads CUDA into a program.
 */
#include "real.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

void *vgpu_real[FUNCTION_COUNT];

static const struct {
    const char *symbol;
    bool nvml;
} names[FUNCTION_COUNT] = {
#define HOOK(symbol, name, since, stream, result, parameters) [F_##symbol] = {#symbol, false},
#define NVML(symbol, result, parameters) [F_##symbol] = {#symbol, true},
#include "hooks.def"
#undef HOOK
#undef NVML
#define CALL(symbol, result, parameters) [F_##symbol] = {#symbol, false},
#define CALL_NVML(symbol, result, parameters) [F_##symbol] = {#symbol, true},
#include "calls.def"
#undef CALL
#undef CALL_NVML
};

static const char *soname_of(bool nvml)
{
    return nvml ? "libnvidia-ml.so.1" : "libcuda.so.1";
}

/* The program may have loaded a copy of the driver under any name. Such a copy is recognised because it exports cuInit,
 * which this library does not export. */
bool is_driver(const struct object *object, bool nvml)
{
    return strcmp(object->soname, soname_of(nvml)) == 0 || (!nvml && object_symbol(object, "cuInit") != NULL);
}

static int take_renamed(const struct object *object, void *found)
{
    if (!is_driver(object, false))
        return 0;
    *(struct object *)found = *object;
    return 1;
}

bool driver_object(bool nvml, struct object *found)
{
    return object_with_soname(soname_of(nvml), found) || (!nvml && object_each(take_renamed, found) != 0);
}

/*
 * This library must not call the dynamic loader while it holds one of its own locks. A thread inside dlopen holds the
 * loader's lock, and a constructor of the opened library may call a hook that waits for this library's lock. That would
 * be a deadlock. So functions are looked up without a lock and stored under a lock.
 */
static struct lock resolve_lock;
static _Atomic bool driver_found, nvml_found;
static _Atomic uintptr_t taken[2]; /* Addresses of the objects whose functions are in vgpu_real: the driver and NVML. */

static void take(const struct object *object, bool nvml, _Atomic bool *found)
{
    void *functions[FUNCTION_COUNT];
    /* Keep the driver loaded even if the program closes it, because the function pointers are never cleared. */
    real_dlopen(object->path, RTLD_LAZY | RTLD_NOLOAD);
    for (int i = 0; i < FUNCTION_COUNT; i++)
        functions[i] = names[i].nvml == nvml ? object_symbol(object, names[i].symbol) : NULL;
    if (!nvml)
        forms_look();
    lock_take(&resolve_lock);
    /* Another thread may meanwhile have found the driver under its standard name. */
    for (int i = 0; i < FUNCTION_COUNT && !atomic_load_explicit(found, memory_order_relaxed); i++)
        if (names[i].nvml == nvml)
            __atomic_store_n(&vgpu_real[i], functions[i], __ATOMIC_RELAXED);
    atomic_store_explicit(&taken[nvml], object->low, memory_order_release);
    /* A library with another name may open the driver later and forward calls to it through these hooks. If the
     * functions of such a library were kept as the driver's, that library and the hooks would call each other for ever.
     * So the search ends only when the driver with the standard name is found. */
    if (strcmp(object->soname, soname_of(nvml)) == 0)
        atomic_store_explicit(found, true, memory_order_release);
    lock_drop(&resolve_lock);
}

static bool resolve(bool nvml, _Atomic bool *found)
{
    struct object object;
    if (atomic_load_explicit(found, memory_order_acquire))
        return true;
    if (!driver_object(nvml, &object))
        return false;
    threads_ready();
    if (atomic_load_explicit(&taken[nvml], memory_order_acquire) != object.low)
        take(&object, nvml, found);
    return true;
}

bool driver_ready(void)
{
    return resolve(false, &driver_found);
}

bool driver_settled(void)
{
    return atomic_load_explicit(&driver_found, memory_order_acquire);
}

bool nvml_ready(void)
{
    return resolve(true, &nvml_found);
}

static _Atomic int nvml_state; /* State of NVML: 0 is not tried, 1 is initialised, 2 is not available. */

/* Several threads may initialise NVML at once. That is harmless, because NVML counts its initialisations. */
bool nvml_load(void)
{
    int state = atomic_load_explicit(&nvml_state, memory_order_acquire);
    if (state)
        return state == 1;
    bool works = (nvml_ready() || real_dlopen("libnvidia-ml.so.1", RTLD_LAZY)) && nvml_ready() && REAL_HAS(nvmlInit_v2) &&
                 REAL(nvmlInit_v2)() == NVML_SUCCESS;
    atomic_store_explicit(&nvml_state, works ? 1 : 2, memory_order_release);
    return works;
}

bool capture_relax(int *mode)
{
    *mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (REAL_HAS(cuThreadExchangeStreamCaptureMode) && REAL(cuThreadExchangeStreamCaptureMode)(mode) == CUDA_SUCCESS)
        return true;
    *mode = -1;
    /* A driver without this function has no capture modes, so there is no mode to change. */
    return !REAL_HAS(cuThreadExchangeStreamCaptureMode);
}

void capture_restore(int mode)
{
    if (mode >= 0)
        REAL(cuThreadExchangeStreamCaptureMode)(&mode);
}

void driver_reset(void)
{
    atomic_store_explicit(&resolve_lock.word, 0, memory_order_relaxed);
    /* NVML's initialisation in the parent is not valid in a forked child. */
    atomic_store_explicit(&nvml_state, 0, memory_order_relaxed);
}
