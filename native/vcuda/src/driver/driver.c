/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The driver's own functions. They are looked up once, when the first hook runs, in the libraries that the program has
 * loaded itself: a program without CUDA never gets CUDA from us.
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

bool is_driver(const struct object *object)
{
    return strcmp(object->soname, "libcuda.so.1") == 0 || strcmp(object->soname, "libnvidia-ml.so.1") == 0;
}

static struct lock resolve_lock;
static _Atomic bool driver_found, nvml_found;

static bool resolve(const char *soname, bool nvml, _Atomic bool *found)
{
    if (atomic_load_explicit(found, memory_order_acquire))
        return true;
    struct object object;
    if (!object_with_soname(soname, &object))
        return false;
    lock_take(&resolve_lock);
    if (!atomic_load_explicit(found, memory_order_relaxed)) {
        for (int i = 0; i < FUNCTION_COUNT; i++)
            if (names[i].nvml == nvml)
                vgpu_real[i] = object_symbol(&object, names[i].symbol);
        /* The functions are kept for good, so the library must stay although its opener may close it. */
        real_dlopen(object.path, RTLD_LAZY | RTLD_NOLOAD);
        atomic_store_explicit(found, true, memory_order_release);
    }
    lock_drop(&resolve_lock);
    return true;
}

bool driver_ready(void)
{
    return resolve("libcuda.so.1", false, &driver_found);
}

bool nvml_ready(void)
{
    return resolve("libnvidia-ml.so.1", true, &nvml_found);
}

static struct lock nvml_lock;
static _Atomic int nvml_state; /* 0 not tried, 1 works, 2 there is none */

bool nvml_load(void)
{
    if (atomic_load_explicit(&nvml_state, memory_order_acquire))
        return atomic_load_explicit(&nvml_state, memory_order_relaxed) == 1;
    lock_take(&nvml_lock);
    if (!atomic_load_explicit(&nvml_state, memory_order_relaxed)) {
        bool works = (nvml_ready() || real_dlopen("libnvidia-ml.so.1", RTLD_LAZY)) && nvml_ready() &&
                     REAL_HAS(nvmlInit_v2) && REAL(nvmlInit_v2)() == NVML_SUCCESS;
        atomic_store_explicit(&nvml_state, works ? 1 : 2, memory_order_release);
    }
    lock_drop(&nvml_lock);
    return atomic_load_explicit(&nvml_state, memory_order_relaxed) == 1;
}

void driver_reset(void)
{
    atomic_store_explicit(&resolve_lock.word, 0, memory_order_relaxed);
    atomic_store_explicit(&nvml_lock.word, 0, memory_order_relaxed);
    atomic_store_explicit(&nvml_state, 0, memory_order_relaxed); /* what a parent initialised serves no child */
}
