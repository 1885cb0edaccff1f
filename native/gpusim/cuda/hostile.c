/* SPDX-License-Identifier: Apache-2.0 */
/* Implements the hostile behaviours of a driver: those that CUDA allows and most drivers avoid (hostile.h). Also has
 * the private table of functions, which a library that intercepts the driver API cannot see (private.h). */
#include "hostile.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- context-lock: while code is loaded or a wait lasts, other threads' calls on the context wait -------------- */

bool context_lock(CUcontext context)
{
    if (!hostile(SIM_HOSTILE_CONTEXT_LOCK))
        return false;
    pthread_mutex_lock(&context->entry);
    return true;
}

void context_unlock(CUcontext context, bool held)
{
    if (held)
        pthread_mutex_unlock(&context->entry);
}

void context_pass(CUcontext context)
{
    context_unlock(context, context_lock(context));
}

/* ---- waiting-frees: a free waits for all contexts of the process on the GPU ------------------------------------ */

CUresult free_wait(CUcontext context)
{
    CUresult result = context_wait(context);
    if (result != CUDA_SUCCESS || !hostile(SIM_HOSTILE_WAITING_FREES))
        return result;
    pthread_mutex_lock(&driver.mutex);
    CUcontext other = driver.contexts; /* Contexts are never removed from the list, so the loop needs no lock. */
    pthread_mutex_unlock(&driver.mutex);
    for (; other; other = other->next)
        if (other != context && other->device == context->device && !other->home && atomic_load(&other->alive))
            context_wait(other);
    return context_check(context);
}

/* ---- callbacks: the driver calls a tool, a library that the program loads, during some calls ------------------- */

static struct {
    pthread_mutex_t mutex;
    gpusim_callback function;
    void *data;
} tool = {.mutex = PTHREAD_MUTEX_INITIALIZER};
/* True inside a tool's callback. Driver calls of the tool are not reported to the tool. */
static __thread bool in_tool;

void tool_call(enum gpusim_moment moment, void *handle)
{
    if (!hostile(SIM_HOSTILE_CALLBACKS) || in_tool)
        return;
    pthread_mutex_lock(&tool.mutex);
    gpusim_callback function = tool.function;
    void *data = tool.data;
    pthread_mutex_unlock(&tool.mutex);
    if (!function)
        return;
    in_tool = true;
    function(data, moment, handle);
    in_tool = false;
}

static int subscribe(gpusim_callback callback, void *data)
{
    ENTER();
    REQUIRE(hostile(SIM_HOSTILE_CALLBACKS), CUDA_ERROR_NOT_SUPPORTED);
    pthread_mutex_lock(&tool.mutex);
    tool.function = callback;
    tool.data = data;
    pthread_mutex_unlock(&tool.mutex);
    return CUDA_SUCCESS;
}

void tool_load(void)
{
    const char *path = getenv("CUDA_INJECTION64_PATH");
    if (!path || !hostile(SIM_HOSTILE_CALLBACKS))
        return;
    void *library = dlopen(path, RTLD_NOW);
    int (*begin)(void) = library ? (int (*)(void))dlsym(library, "InitializeInjection") : NULL;
    if (begin)
        begin();
    else
        fprintf(stderr, "gpusim: CUDA_INJECTION64_PATH: expected a library with InitializeInjection, found: %s\n", dlerror());
}

/* ---- teardown: once the driver's destructor has started, a call of the driver aborts the process --------------- */

/* Duration of the teardown at the process's end. In this time a real driver frees memory and queues, while the
 * process's threads still run. */
#define TEARDOWN_US 20000

void driver_late(const char *function)
{
    sim_state()->late_calls++;
    fprintf(stderr, "gpusim: pid %d called the driver (%s) after its teardown had begun; end every thread that uses it in "
            "an atexit handler that was registered later than the driver's\n", (int)getpid(), function);
    abort();
}

/* Lets a forked child allocate in the name of the process that opened the driver. On hardware a raw ioctl could do
 * that. */
CUresult driver_forked(void)
{
    if (!sim_state()->forked_children || sim_attach(SIM_ROLE_CUDA) != SIM_OK)
        return CUDA_ERROR_NOT_INITIALIZED;
    driver.forks = sim_forks();
    return CUDA_SUCCESS;
}

static __attribute__((destructor)) void teardown(void)
{
    if (atomic_load(&driver.ready) != 1 || sim_forks() != driver.forks || !hostile(SIM_HOSTILE_TEARDOWN))
        return;
    atomic_store(&driver.ready, DRIVER_ENDED);
    usleep(TEARDOWN_US);
}

/* ---- the private table of functions ---------------------------------------------------------------------------- */

/* Calls of these functions reach the driver's own definitions, even if a library is preloaded, because the linker
 * option -Bsymbolic binds them. */
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device);
CUresult cuCtxSetCurrent(CUcontext context);

static int primary_retain(void **context, int device)
{
    return cuDevicePrimaryCtxRetain((CUcontext *)context, device);
}

static int set_current(void *context)
{
    return cuCtxSetCurrent(context);
}

static int raw_take(int device, size_t bytes)
{
    return sim_attach(SIM_ROLE_CUDA) == SIM_OK && device >= 0 && device < driver.count &&
           sim_charge(driver.devices[device].gpu, SIM_MEMORY, bytes) == SIM_OK;
}

const void *private_table(const CUuuid *id)
{
    static const struct gpusim_private table = {.bytes = sizeof table, .primary_retain = primary_retain,
                                                .primary_release = cuDevicePrimaryCtxRelease_v2,
                                                .set_current = set_current, .subscribe = subscribe,
                                                .raw_take = raw_take};
    _Static_assert(sizeof(GPUSIM_PRIVATE_ID) - 1 == sizeof id->bytes, "an id has 16 bytes");
    return memcmp(id->bytes, GPUSIM_PRIVATE_ID, sizeof id->bytes) == 0 ? &table : NULL;
}
