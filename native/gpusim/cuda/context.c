/* SPDX-License-Identifier: Apache-2.0 */
/* Creates and destroys contexts, charges their memory, and keeps each thread's stack of current contexts. */
#include "graph.h"
#include "hostile.h"

#include <stdlib.h>
#include <string.h>

/* Bytes of address space for each byte of GPU memory. The surplus keeps fragmented addresses from looking like a full
 * GPU. */
#define ARENA_FACTOR 4

static __thread struct {
    int depth;
    CUcontext stack[MAX_STACK];
} thread;

CUcontext context_current(void)
{
    return thread.depth ? thread.stack[thread.depth - 1] : NULL;
}

struct arena *device_arena(int device)
{
    struct device *d = &driver.devices[device];
    pthread_mutex_lock(&driver.mutex);
    if (!d->arena)
        d->arena = arena_create(sim_state()->gpus[d->gpu].total * ARENA_FACTOR, false);
    pthread_mutex_unlock(&driver.mutex);
    return d->arena;
}

CUresult context_check(CUcontext context)
{
    REQUIRE(context && context->magic == CONTEXT_MAGIC, CUDA_ERROR_INVALID_CONTEXT);
    context_pass(context);
    if (!atomic_load_explicit(&context->alive, memory_order_acquire))
        return context->primary ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_CONTEXT_IS_DESTROYED;
    const struct sim_gpu *gpu = &sim_state()->gpus[context->gpu];
    /* The error is sticky: the context stays lost even after the GPU recovers. */
    if (__builtin_expect(gpu->lost, 0))
        atomic_store(&context->broken, CUDA_ERROR_UNKNOWN);
    else if (__builtin_expect(gpu->ecc_double[1] != context->ecc_seen, 0))
        atomic_store(&context->broken, CUDA_ERROR_ECC_UNCORRECTABLE);
    return atomic_load_explicit(&context->broken, memory_order_relaxed);
}

CUresult context_use(CUcontext *out)
{
    *out = context_current();
    if (*out && (*out)->home) {
        REQUIRE(atomic_load_explicit(&(*out)->alive, memory_order_acquire), CUDA_ERROR_CONTEXT_IS_DESTROYED);
        *out = (*out)->home;
    }
    return context_check(*out);
}

CUresult status_to_result(enum sim_status status)
{
    return status == SIM_OK           ? CUDA_SUCCESS
           : status == SIM_ERR_MEMORY ? CUDA_ERROR_OUT_OF_MEMORY
           : status == SIM_ERR_LOST   ? CUDA_ERROR_UNKNOWN
                                      : CUDA_ERROR_OPERATING_SYSTEM;
}

/* True if the compute mode admits this process. NVML_COMPUTEMODE_* 1 and 3 admit one process, 2 admits none. */
static bool mode_admits(const struct sim_gpu *gpu, int index)
{
    if (gpu->compute_mode == 0)
        return true;
    bool admits = gpu->compute_mode != 2;
    sim_lock();
    sim_reap();
    for (uint32_t slot = 0; admits && slot < sim_state()->proc_high; slot++)
        if ((int)slot != sim_slot() && sim_state()->procs[slot].use[index].contexts > 0)
            admits = false;
    sim_unlock();
    return admits;
}

/* Allocates the context's memory and queue on the GPU. */
static CUresult context_start(CUcontext context)
{
    struct sim_gpu *gpu = &sim_state()->gpus[context->gpu];
    REQUIRE(!gpu->lost && mode_admits(gpu, context->gpu), CUDA_ERROR_DEVICE_UNAVAILABLE);
    REQUIRE(device_arena(context->device), CUDA_ERROR_OUT_OF_MEMORY);
    enum sim_status status = sim_charge(context->gpu, SIM_CONTEXT, gpu->context_bytes);
    if (status != SIM_OK)
        return status_to_result(status);
    context->channel = sim_channel_open(context->gpu);
    if (context->channel < 0) {
        sim_uncharge(context->gpu, SIM_CONTEXT, gpu->context_bytes);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    context->id = atomic_fetch_add(&driver.next_id, 1);
    context->legacy = (struct CUstream_st){.magic = STREAM_MAGIC, .context = context, .order = SIM_STREAM_LEGACY,
                                           .id = atomic_fetch_add(&driver.next_id, 1)};
    context->next_order = 1;
    atomic_store(&context->broken, CUDA_SUCCESS);
    atomic_store(&context->last, 0);
    atomic_store(&context->waited, 0);
    context->peers = 0;
    context->ecc_seen = gpu->ecc_double[1];
    context->limits[0] = DEFAULT_STACK;
    context->limits[1] = DEFAULT_FIFO;
    context->limits[2] = DEFAULT_HEAP;
    context->limits[3] = 2;
    context->limits[4] = 2048;
    context->limits[5] = 128;
    context->limits[6] = 0;
    context->stack_bytes = context->heap_bytes = 0;
    context->cache_config = 0;
    context->shared_config = 1;
    atomic_store_explicit(&context->alive, true, memory_order_release);
    return CUDA_SUCCESS;
}

static bool device_in_use(int device)
{
    bool used = false;
    pthread_mutex_lock(&driver.mutex);
    for (CUcontext context = driver.contexts; context; context = context->next)
        used = used || (context->device == device && atomic_load(&context->alive));
    pthread_mutex_unlock(&driver.mutex);
    return used;
}

static void greens_stop(CUcontext home)
{
    for (CUcontext context = driver.contexts; context; context = context->next)
        if (context->home == home)
            context_green_end(context);
}

static void context_stop(CUcontext context)
{
    /* Wait without the context's lock, because a thread that holds it may need the mutex of primary contexts, which the
     * caller holds. */
    context_drain(context);
    greens_stop(context);
    atomic_store(&context->alive, false);
    streams_destroy(context);
    events_destroy(context);
    modules_unload(context);
    memory_release_all(context);
    if (!device_in_use(context->device)) {
        pools_end(context->device);
        graph_memory_end_device(context->device);
    }
    context_heaps_end(context);
    sim_channel_close(context->gpu, context->channel);
    sim_uncharge(context->gpu, SIM_CONTEXT, sim_state()->gpus[context->gpu].context_bytes);
}

static CUcontext context_new(int device, unsigned flags, unsigned version, bool primary)
{
    CUcontext context = calloc(1, sizeof *context);
    if (!context)
        return NULL;
    context->magic = CONTEXT_MAGIC;
    context->device = device;
    context->gpu = driver.devices[device].gpu;
    context->flags = flags;
    context->version = version;
    context->primary = primary;
    pthread_mutexattr_t recursive;
    pthread_mutexattr_init(&recursive);
    pthread_mutexattr_settype(&recursive, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&context->mutex, NULL);
    pthread_mutex_init(&context->entry, &recursive);
    pthread_mutex_init(&context->loading, &recursive);
    pthread_mutexattr_destroy(&recursive);
    pthread_mutex_lock(&driver.mutex);
    context->next = driver.contexts;
    /* The record is never freed. A stale handle must stay readable, so that it can be refused. */
    driver.contexts = context;
    pthread_mutex_unlock(&driver.mutex);
    return context;
}

CUcontext context_green(CUcontext home, unsigned sms)
{
    CUcontext green = context_new(home->device, home->flags, home->version, false);
    if (!green)
        return NULL;
    green->home = home;
    green->sms = sms;
    green->id = atomic_fetch_add(&driver.next_id, 1);
    green->own = stream_of(home, green, 1, 0);
    atomic_store_explicit(&green->alive, green->own != NULL, memory_order_release);
    return green->own ? green : NULL;
}

bool context_green_end(CUcontext green)
{
    bool alive = atomic_exchange(&green->alive, false);
    if (alive)
        sim_uncharge(green->gpu, SIM_CONTEXT, GREEN_BYTES);
    return alive;
}

/* ---- primary contexts ------------------------------------------------------------------------------------------ */

static pthread_mutex_t primary_mutex = PTHREAD_MUTEX_INITIALIZER;

static CUresult primary_make(int device)
{
    struct device *d = &driver.devices[device];
    if (!d->primary)
        d->primary = context_new(device, d->primary_flags, 3020, true);
    REQUIRE(d->primary, CUDA_ERROR_OUT_OF_MEMORY);
    d->primary->flags = d->primary_flags;
    return context_start(d->primary);
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    ENTER();
    REQUIRE(context, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_valid(device), CUDA_ERROR_INVALID_DEVICE);
    struct device *d = &driver.devices[device];
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&primary_mutex);
    bool made = d->primary_refs == 0;
    if (made)
        result = primary_make(device);
    if (result == CUDA_SUCCESS) {
        d->primary_refs++;
        *context = d->primary;
    }
    pthread_mutex_unlock(&primary_mutex);
    if (made && result == CUDA_SUCCESS)
        tool_call(GPUSIM_CONTEXT_CREATED, *context);
    return result;
}

static CUresult primary_drop(CUdevice device, bool all)
{
    ENTER();
    REQUIRE(device_valid(device), CUDA_ERROR_INVALID_DEVICE);
    struct device *d = &driver.devices[device];
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&primary_mutex);
    if (d->primary_refs == 0) {
        result = all ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
    } else if (all) {
        /* Destroys the context with any retain count; the next retain creates a new one. */
        context_stop(d->primary);
        d->primary_refs = 0;
    } else if (--d->primary_refs == 0) {
        context_stop(d->primary);
    }
    pthread_mutex_unlock(&primary_mutex);
    return result;
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    return primary_drop(device, false);
}

EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice device)
{
    return primary_drop(device, false);
}

EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice device)
{
    return primary_drop(device, true);
}

EXPORT CUresult cuDevicePrimaryCtxReset(CUdevice device)
{
    return primary_drop(device, true);
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    ENTER();
    REQUIRE(flags && active, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_valid(device), CUDA_ERROR_INVALID_DEVICE);
    /* Reads without a lock, because this call must not wait for a thread that creates or destroys the context. */
    *flags = __atomic_load_n(&driver.devices[device].primary_flags, __ATOMIC_RELAXED);
    *active = __atomic_load_n(&driver.devices[device].primary_refs, __ATOMIC_RELAXED) > 0;
    return CUDA_SUCCESS;
}

static CUresult primary_flags(CUdevice device, unsigned flags)
{
    ENTER();
    REQUIRE(device_valid(device), CUDA_ERROR_INVALID_DEVICE);
    REQUIRE((flags & ~0xffu) == 0, CUDA_ERROR_INVALID_VALUE);
    pthread_mutex_lock(&primary_mutex);
    driver.devices[device].primary_flags = flags;
    if (driver.devices[device].primary)
        driver.devices[device].primary->flags = flags;
    pthread_mutex_unlock(&primary_mutex);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags)
{
    return primary_flags(device, flags);
}

EXPORT CUresult cuDevicePrimaryCtxSetFlags(CUdevice device, unsigned flags)
{
    return primary_flags(device, flags);
}

/* ---- created contexts --------------------------------------------------------------------------------------------- */

CUresult context_create(CUcontext *out, unsigned flags, CUdevice device, unsigned version)
{
    ENTER();
    REQUIRE(out && (flags & ~0xffu) == 0, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_valid(device), CUDA_ERROR_INVALID_DEVICE);
    REQUIRE(thread.depth < MAX_STACK, CUDA_ERROR_OUT_OF_MEMORY);
    CUcontext context = context_new(device, flags, version, false);
    REQUIRE(context, CUDA_ERROR_OUT_OF_MEMORY);
    CUresult result = context_start(context);
    if (result != CUDA_SUCCESS)
        return result; /* The unused record stays in the list: this is rare, so it costs little. */
    thread.stack[thread.depth++] = context;
    *out = context;
    tool_call(GPUSIM_CONTEXT_CREATED, context);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxCreate(CUcontext *context, unsigned flags, CUdevice device)
{
    return context_create(context, flags, device, 3010);
}

EXPORT CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device)
{
    return context_create(context, flags, device, 3020);
}

/* Execution affinity needs MPS, which this driver does not have. */
EXPORT CUresult cuCtxCreate_v3(CUcontext *context, void *affinity, int count, unsigned flags, CUdevice device)
{
    if (count > 0 && affinity)
        return CUDA_ERROR_NOT_SUPPORTED;
    return context_create(context, flags, device, 3020);
}

static CUresult destroy(CUcontext context)
{
    ENTER();
    REQUIRE(context && context->magic == CONTEXT_MAGIC && !context->primary && !context->home, CUDA_ERROR_INVALID_CONTEXT);
    pthread_mutex_lock(&primary_mutex);
    bool alive = atomic_load(&context->alive);
    if (alive)
        context_stop(context);
    pthread_mutex_unlock(&primary_mutex);
    REQUIRE(alive, CUDA_ERROR_CONTEXT_IS_DESTROYED);
    if (context_current() == context)
        thread.depth--;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxDestroy_v2(CUcontext context)
{
    return destroy(context);
}

EXPORT CUresult cuCtxDestroy(CUcontext context)
{
    return destroy(context);
}

EXPORT CUresult cuCtxAttach(CUcontext *context, unsigned flags)
{
    ENTER_CONTEXT(current);
    REQUIRE(context && flags == 0, CUDA_ERROR_INVALID_VALUE);
    *context = current;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxDetach(CUcontext context)
{
    return destroy(context);
}

/* ---- the stack of a thread ------------------------------------------------------------------------------------------ */

/* Makes a context current in this thread. Fails for a green context (a part of a GPU's SMs) that is current in another
 * thread. */
static bool enter(CUcontext context)
{
    unsigned nobody = 0;
    return !context->home || atomic_compare_exchange_strong(&context->inside, &nobody, 1);
}

static void leave(CUcontext context)
{
    if (context->home)
        atomic_store(&context->inside, 0);
}

static CUresult push(CUcontext context)
{
    ENTER();
    REQUIRE(context && context->magic == CONTEXT_MAGIC, CUDA_ERROR_INVALID_CONTEXT);
    context_pass(context->home ? context->home : context);
    REQUIRE(atomic_load(&context->alive), CUDA_ERROR_INVALID_CONTEXT);
    REQUIRE(thread.depth < MAX_STACK, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(enter(context), CUDA_ERROR_INVALID_CONTEXT);
    thread.stack[thread.depth++] = context;
    return CUDA_SUCCESS;
}

static CUresult pop(CUcontext *context)
{
    ENTER();
    REQUIRE(thread.depth > 0, CUDA_ERROR_INVALID_CONTEXT);
    leave(thread.stack[--thread.depth]);
    if (context)
        *context = thread.stack[thread.depth];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context)
{
    return push(context);
}

EXPORT CUresult cuCtxPushCurrent(CUcontext context)
{
    return push(context);
}

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
    return pop(context);
}

EXPORT CUresult cuCtxPopCurrent(CUcontext *context)
{
    return pop(context);
}

EXPORT CUresult cuCtxSetCurrent(CUcontext context)
{
    ENTER();
    if (!context) {
        if (thread.depth > 0)
            leave(thread.stack[--thread.depth]);
        return CUDA_SUCCESS;
    }
    REQUIRE(context->magic == CONTEXT_MAGIC && atomic_load(&context->alive), CUDA_ERROR_INVALID_CONTEXT);
    context_pass(context->home ? context->home : context);
    if (context == context_current())
        return CUDA_SUCCESS;
    REQUIRE(enter(context), CUDA_ERROR_INVALID_CONTEXT);
    if (thread.depth > 0)
        leave(thread.stack[thread.depth - 1]);
    thread.depth += thread.depth == 0;
    thread.stack[thread.depth - 1] = context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *context)
{
    ENTER();
    REQUIRE(context, CUDA_ERROR_INVALID_VALUE);
    *context = context_current();
    return CUDA_SUCCESS;
}
