/* SPDX-License-Identifier: Apache-2.0 */
/* Shared declarations of the simulated libcuda.so.1: process-wide state, contexts, streams, and the macros at the start
 * of each entry point. */
#ifndef GPUSIM_DRIVER_H
#define GPUSIM_DRIVER_H

#include "arena.h"
#include "cuda_abi.h"
#include "sim.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_STACK 64

/* Replace stream 0 by a default stream. An entry point has two forms, for the legacy and (_ptsz, _ptds) the
 * per-thread default stream; the options of the caller's compilation choose the form. */
#define LEGACY_STREAM(stream) ((stream) ? (stream) : CU_STREAM_LEGACY)
#define PER_THREAD_STREAM(stream) ((stream) ? (stream) : CU_STREAM_PER_THREAD)

struct CUstream_st {
    uint32_t magic;
    uint32_t order; /* The value of sim_work.stream: the stream's number, and the bit SIM_STREAM_NONBLOCKING. */
    CUcontext context;
    CUstream next;
    unsigned flags;
    int priority;
    uint64_t id;
    _Atomic uint64_t last; /* Newest queued item of this stream. */
    struct capture *capture;
    CUcontext green; /* The green context on whose SMs the stream runs; NULL if it runs on all SMs. */
};

struct CUctx_st {
    uint32_t magic;
    int device;
    unsigned flags;
    unsigned version; /* API version that cuCtxGetApiVersion returns for this context. */
    bool primary;
    _Atomic bool alive;
    _Atomic int broken; /* A sticky error that every later call returns. */
    int gpu, channel;
    uint64_t ecc_seen; /* Number of the GPU's uncorrectable errors before this context existed. */
    uint64_t id;
    /* Newest item that any stream of the context queued. */
    _Atomic uint64_t last;
    /* Newest item up to which all items are known to be done. */
    _Atomic uint64_t waited;
    pthread_mutex_t mutex;
    /* Recursive lock of calls that exclude all other calls on the context (hostile.h). */
    pthread_mutex_t entry;
    /* Recursive lock for the load of a CUlibrary's code into this context, taken after `entry`. */
    pthread_mutex_t loading;
    uint32_t next_order;
    struct CUstream_st legacy;
    CUstream streams;
    CUmodule modules;
    uint64_t peers; /* Bitmap of the devices whose memory the context may access. */
    size_t limits[8];
    /* Bytes charged in addition to the context's basic memory (context_state.c). */
    uint64_t stack_bytes, heap_bytes;
    int cache_config, shared_config;
    struct event_table *events;
    /* For a green context, which is a part of the GPU's SMs: the primary context. The primary context owns everything
     * except the green context's streams, SMs and default stream. */
    CUcontext home;
    unsigned sms;
    CUstream own;
    /* The CUgreenCtx of this context. */
    void *handle;
    /* For a green context: 1 if it is current in a thread. It can be current in only one thread. */
    _Atomic unsigned inside;
    CUcontext next;
};

/* Defaults of CUlimit: bytes of each thread's stack, of printf's buffer, of malloc's heap. */
#define DEFAULT_STACK 1024u
#define DEFAULT_FIFO 1048576u
#define DEFAULT_HEAP 8388608u

struct device {
    /* Index of the GPU in the shared state. */
    int gpu;
    /* MIG instance of this device; -1 for a whole GPU. */
    int gi, ci;
    /* Created at the first retain; its address never changes. */
    CUcontext primary;
    unsigned primary_refs, primary_flags;
    struct arena *arena;
    CUmemoryPool default_pool, current_pool, pools;
    _Atomic bool pools_due; /* True if memory of a pool was freed since the last synchronization. */
    uint64_t graph_used, graph_used_high, graph_reserved, graph_reserved_high;
};

#define DRIVER_ENDED 2 /* The teardown has begun; every call aborts the process (hostile.c). */

struct driver {
    _Atomic int ready; /* 0 before cuInit, 1 after it, DRIVER_ENDED once the teardown has begun. */
    unsigned forks;
    CUresult failure;
    int count;
    struct device devices[SIM_MAX_GPUS];
    /* Arena below 4 GiB for the first API versions, whose pointers have 32 bits; NULL before its first use. */
    struct arena *low;
    /* Protects the tables of devices and contexts. */
    pthread_mutex_t mutex;
    CUcontext contexts;
    _Atomic uint64_t next_id;
};
extern struct driver driver;

#define CONTEXT_MAGIC 0x43545831u
#define STREAM_MAGIC 0x53545231u

/* First line of every entry point except cuInit. A forked child of an initialized process has no driver, as on
 * hardware. */
_Noreturn void driver_late(const char *function);
CUresult driver_forked(void);
static inline CUresult driver_enter(const char *function)
{
    int ready = atomic_load_explicit(&driver.ready, memory_order_acquire);
    if (__builtin_expect(!ready, 0))
        return CUDA_ERROR_NOT_INITIALIZED;
    if (__builtin_expect(sim_forks() != driver.forks, 0))
        return driver_forked();
    if (__builtin_expect(ready == DRIVER_ENDED, 0))
        driver_late(function);
    return CUDA_SUCCESS;
}
#define ENTER()                                  \
    do {                                         \
        CUresult entered_ = driver_enter(__func__); \
        if (entered_ != CUDA_SUCCESS)            \
            return entered_;                     \
    } while (0)
/* First line of every entry point that works in the current context. */
#define ENTER_CONTEXT(name)                      \
    ENTER();                                     \
    CUcontext name;                              \
    do {                                         \
        CUresult entered_ = context_use(&name);  \
        if (entered_ != CUDA_SUCCESS)            \
            return entered_;                     \
    } while (0)
#define REQUIRE(condition, error)                \
    do {                                         \
        if (!(condition))                        \
            return (error);                      \
    } while (0)

/* context.c: creates a context and pushes it on the thread's stack */
CUresult context_create(CUcontext *out, unsigned flags, CUdevice device, unsigned version);
/* Returns the current context or NULL. It may be a green context, see context_use(). */
CUcontext context_current(void);
/* Returns the current context if it is alive and not broken, and its GPU has not fallen off the bus. For a green
 * context returns its primary context. */
CUresult context_use(CUcontext *out);
/* Memory that a green context takes in addition to its primary context. */
#define GREEN_BYTES ((uint64_t)6 << 20)
/* Creates a green context. Returns NULL if there is no memory. */
CUcontext context_green(CUcontext home, unsigned sms);
/* Destroys a green context; returns false if it was destroyed before. */
bool context_green_end(CUcontext green);
/* Makes the same checks as context_use() for any context. */
CUresult context_check(CUcontext context);
struct arena *device_arena(int device);
static inline struct device *device_of(CUcontext context)
{
    return &driver.devices[context->device];
}
static inline bool device_valid(CUdevice device)
{
    return device >= 0 && device < driver.count;
}

/* context_state.c: context_heaps() is called when a module is loaded and allocates the heaps in the size that was set.
 * context_heaps_end() frees stacks and heaps above their defaults. */
CUresult context_heaps(CUcontext context);
void context_heaps_end(CUcontext context);

/* Defined in memory.c: */
CUresult memory_alloc(CUcontext context, uint64_t bytes, enum block_kind kind, CUdeviceptr *out);
CUresult memory_free(CUdeviceptr pointer);
bool memory_find(CUdeviceptr pointer, struct block *out, int *device);
/* Frees a block of one of the kinds, a mask of 1 << enum block_kind. */
bool memory_free_owned(CUdeviceptr pointer, unsigned kinds);
/* Moves a managed block to the GPU or the host; does nothing for other memory. */
void memory_migrate(CUdeviceptr pointer, bool to_host);
void memory_release_all(CUcontext context);
struct arena *memory_arena(CUdeviceptr pointer, int *device);
CUresult status_to_result(enum sim_status status);

/* Defined in host.c: */
bool host_find(uintptr_t address, uintptr_t *base, size_t *bytes, unsigned *flags, CUcontext *context);

/* ipc.c: defers the free of memory that another process has open */
bool ipc_defer(CUdeviceptr pointer);
void ipc_free_deferred(void);
/* external.c: frees a mapped buffer; returns false if none starts at pointer */
bool external_free(CUdeviceptr pointer);

/* vmm.c: finds the run of adjacent mappings [base, base + bytes) that the device may access */
bool vmm_find(CUdeviceptr pointer, CUdeviceptr *base, size_t *bytes, int *device);
/* Registers memory of another process that is mapped into this process. */
CUresult vmm_adopt(CUdeviceptr base, size_t bytes, int device);
bool vmm_disown(CUdeviceptr base);

/* Defined in pool.c: */
CUresult pool_free(CUdeviceptr pointer, const struct block *block);
/* Frees the device's unused pool memory above the release thresholds, or all unused pool memory if `all` is set.
 * Returns true if any was freed. */
bool pools_trim(int device, bool all);
/* Trims the device's pools after a synchronization if pool memory was freed. */
void pools_trim_if_due(int device);
/* Frees all pool memory after the last context was destroyed. */
void pools_end(int device);
CUresult pool_alloc(CUmemoryPool pool, uint64_t bytes, CUdeviceptr *out);
CUmemoryPool pool_current(int device);

/* Defined in stream.c: */
CUstream stream_of(CUcontext context, CUcontext green, unsigned flags, int priority);
CUresult stream_resolve(CUcontext context, CUstream stream, CUstream *out);
CUresult stream_submit(CUstream stream, struct sim_work *work, uint64_t *seq);
CUresult stream_wait(CUstream stream);
/* Waits until the context's queue is empty. */
CUresult context_drain(CUcontext context);
/* Does the same as context_drain(). If the hostile behaviour `context-lock` is on (hostile.h), other calls on the
 * context must wait meanwhile. */
CUresult context_wait(CUcontext context);
void streams_destroy(CUcontext context);
uint64_t copy_cost(uint64_t bytes, bool over_bus);

void stream_queued(CUstream stream, uint64_t seq);
/* capture.c: returns an error if a capture forbids a wait for this stream or a query of it */
CUresult capture_check(CUstream stream);

/* Defined in callback.c: */
CUresult callback_add(CUstream stream, CUhostFn function, CUstreamCallback callback, void *data);

/* Defined in event.c: */
void events_keep(CUcontext context, const struct sim_work *overwritten);
void events_destroy(CUcontext context);

/* Defined in module.c: */
struct kernel_cost {
    /* Duration of a launch in ns. A kernel with SIM_COST_FOREVER runs until the context ends. */
    uint64_t ns;
    /* Maximum duration, or 0 if the duration is fixed. Each launch takes a random time from `ns` to `most`; each octave
     * (range from a time to twice that time) is equally likely. */
    uint64_t most;
    /* Number of SMs; 0 means the whole GPU. */
    unsigned sms;
};
/* Returns the function of a CUfunction, or of a CUkernel in the current context. */
CUresult function_of(const void *handle, CUfunction *out);

/* hostile.c: returns the private table with that id, or NULL */
const void *private_table(const CUuuid *id);

/* Defined in launch.c: */
CUresult launch_submit(CUstream stream, CUfunction function, const unsigned grid[3], const unsigned block[3]);

/* Defined in copy.c: */
CUresult copy_queue(CUstream stream, uint64_t bytes, bool over_bus);

void modules_unload(CUcontext context);

#endif
