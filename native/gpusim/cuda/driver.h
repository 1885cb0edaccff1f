/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of libcuda.so.1 share: the driver's process-wide state, contexts, streams, and the rules of entry. */
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

/* Both forms of an entry point whose default stream depends on how the caller was compiled. The body sees the stream
 * with 0 already replaced by the one that is meant. */
#define LEGACY_STREAM(stream) ((stream) ? (stream) : CU_STREAM_LEGACY)
#define PER_THREAD_STREAM(stream) ((stream) ? (stream) : CU_STREAM_PER_THREAD)

struct CUstream_st {
    uint32_t magic;
    uint32_t order; /* the engine's stream number, SIM_STREAM_NONBLOCKING included */
    CUcontext context;
    CUstream next;
    unsigned flags;
    int priority;
    uint64_t id;
    _Atomic uint64_t last; /* newest item queued */
    struct capture *capture;
    CUcontext green; /* whose SMs it runs on; NULL: all */
};

struct CUctx_st {
    uint32_t magic;
    int device;
    unsigned flags;
    unsigned version; /* API version */
    bool primary;
    _Atomic bool alive;
    _Atomic int broken; /* a sticky error: every later call answers it */
    int gpu, channel;
    uint64_t ecc_seen; /* uncorrectable errors of the GPU that it was not there for */
    uint64_t id;
    _Atomic uint64_t last;   /* newest item queued by anybody */
    _Atomic uint64_t waited; /* all up to here is known to be done */
    pthread_mutex_t mutex;
    pthread_mutex_t entry;   /* recursive; held by calls that keep all others out: hostile.h */
    pthread_mutex_t loading; /* recursive; of library code, taken after `entry` */
    uint32_t next_order;
    struct CUstream_st legacy;
    CUstream streams;
    CUmodule modules;
    uint64_t peers; /* devices whose memory it may access */
    size_t limits[8];
    uint64_t stack_bytes, heap_bytes; /* charged beyond what every context takes: context_state.c */
    int cache_config, shared_config;
    struct event_table *events;
    /* Of a green context: the primary one that all but its streams belong to, its share of the SMs, its default stream. */
    CUcontext home;
    unsigned sms;
    CUstream own;
    void *handle; /* the CUgreenCtx that it was made for */
    _Atomic unsigned inside; /* threads that it is current in: one at most */
    CUcontext next;
};

/* CUlimit: bytes of stack of each thread, of the buffer of printf, of the heap of malloc */
#define DEFAULT_STACK 1024u
#define DEFAULT_FIFO 1048576u
#define DEFAULT_HEAP 8388608u

struct device {
    int gpu;    /* in the state */
    int gi, ci; /* the MIG instance that it is, -1: the whole GPU */
    CUcontext primary; /* made at the first retain, its address never changes */
    unsigned primary_refs, primary_flags;
    struct arena *arena;
    CUmemoryPool default_pool, current_pool, pools;
    _Atomic bool pools_due; /* something was freed since the last synchronisation */
    uint64_t graph_used, graph_used_high, graph_reserved, graph_reserved_high;
};

#define DRIVER_ENDED 2 /* its teardown has begun, and a call faults: hostile.c */

struct driver {
    _Atomic int ready; /* 0 not initialised, 1 ready, DRIVER_ENDED */
    unsigned forks;
    CUresult failure;
    int count;
    struct device devices[SIM_MAX_GPUS];
    struct arena *low; /* for the entry points with 32-bit pointers */
    pthread_mutex_t mutex; /* device and context tables */
    CUcontext contexts;
    _Atomic uint64_t next_id;
};
extern struct driver driver;

#define CONTEXT_MAGIC 0x43545831u
#define STREAM_MAGIC 0x53545231u

/* First line of every entry point but cuInit. A forked child of an initialised process has no driver (as on hardware). */
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
/* … and of every one that works in the current context. */
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

/* context.c */
/* Makes one and puts it on the thread's stack. */
CUresult context_create(CUcontext *out, unsigned flags, CUdevice device, unsigned version);
CUcontext context_current(void);                /* NULL: none; may be a green one, see context_use */
CUresult context_use(CUcontext *out);           /* current, alive, not broken, its GPU still there; of a green one its home */
#define GREEN_BYTES ((uint64_t)6 << 20)         /* what a green context takes in addition to its primary one */
CUcontext context_green(CUcontext home, unsigned sms); /* NULL: no memory */
bool context_green_end(CUcontext green);               /* false: it was ended before */
CUresult context_check(CUcontext context);      /* the same for any context */
CUresult context_primary(int device, CUcontext *out); /* retain without a user count, for device-wide calls */
struct arena *device_arena(int device);
static inline struct device *device_of(CUcontext context)
{
    return &driver.devices[context->device];
}
static inline bool device_valid(CUdevice device)
{
    return device >= 0 && device < driver.count;
}

/* context_state.c: memory of stacks and heaps above their defaults */
CUresult context_heaps(CUcontext context); /* a module is loaded: heaps get the size that was set */
void context_heaps_end(CUcontext context);

/* memory.c */
CUresult memory_alloc(CUcontext context, uint64_t bytes, enum block_kind kind, CUdeviceptr *out);
CUresult memory_free(CUdeviceptr pointer);
bool memory_find(CUdeviceptr pointer, struct block *out, int *device);
bool memory_free_owned(CUdeviceptr pointer, unsigned kinds); /* kinds: a mask of 1 << enum block_kind */
void memory_migrate(CUdeviceptr pointer, bool to_host); /* managed memory; nothing for any other */
void memory_release_all(CUcontext context);
struct arena *memory_arena(CUdeviceptr pointer, int *device);
CUresult status_to_result(enum sim_status status);

/* host.c */
bool host_find(uintptr_t address, uintptr_t *base, size_t *bytes, unsigned *flags, CUcontext *context);

/* ipc.c: memory that another process has open is freed later */
bool ipc_defer(CUdeviceptr pointer);
void ipc_free_deferred(void);
bool external_free(CUdeviceptr pointer); /* external.c; false: no buffer that was mapped there */

/* vmm.c: [base, base + bytes) is the run of neighbouring mappings that the device may access */
bool vmm_find(CUdeviceptr pointer, CUdeviceptr *base, size_t *bytes, int *device);
CUresult vmm_adopt(CUdeviceptr base, size_t bytes, int device); /* memory of another process, mapped here */
bool vmm_disown(CUdeviceptr base);

/* pool.c */
CUresult pool_free(CUdeviceptr pointer, const struct block *block);
/* Gives back what pools of the device hold above their thresholds (all: whatever is unused). True if anything was. */
bool pools_trim(int device, bool all);
void pools_trim_if_due(int device); /* after a synchronisation */
void pools_end(int device);         /* the last context is gone, and the memory of pools with it */
CUresult pool_alloc(CUmemoryPool pool, uint64_t bytes, CUdeviceptr *out);
CUmemoryPool pool_current(int device);

/* stream.c */
CUstream stream_of(CUcontext context, CUcontext green, unsigned flags, int priority);
CUresult stream_resolve(CUcontext context, CUstream stream, CUstream *out);
CUresult stream_submit(CUstream stream, struct sim_work *work, uint64_t *seq);
CUresult stream_wait(CUstream stream);
CUresult context_drain(CUcontext context); /* until its queue is empty */
CUresult context_wait(CUcontext context);  /* the same as a call of the driver that holds the context meanwhile */
void streams_destroy(CUcontext context);
uint64_t copy_cost(uint64_t bytes, bool over_bus);

void stream_queued(CUstream stream, uint64_t seq);
CUresult capture_check(CUstream stream); /* graph_capture.c: may this stream be synchronised or queried now? */

/* callback.c */
CUresult callback_add(CUstream stream, CUhostFn function, CUstreamCallback callback, void *data);

/* event.c */
void events_keep(CUcontext context, const struct sim_work *overwritten);
void events_destroy(CUcontext context);

/* module.c */
struct kernel_cost {
    uint64_t ns; /* SIM_COST_FOREVER: until the context ends */
    uint64_t most; /* 0: always ns; else each launch draws from ns to this, as many from each octave */
    unsigned sms; /* 0: all of the GPU */
};
CUresult function_of(const void *handle, CUfunction *out); /* a CUfunction, or a CUkernel in the current context */

/* hostile.c: the table of that id, NULL: none */
const void *private_table(const CUuuid *id);

/* launch.c */
CUresult launch_submit(CUstream stream, CUfunction function, const unsigned grid[3], const unsigned block[3]);

/* copy.c */
CUresult copy_queue(CUstream stream, uint64_t bytes, bool over_bus);

void modules_unload(CUcontext context);

#endif
