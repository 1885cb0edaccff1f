/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Defines the hooks (replacements) of all launch functions, and their fast path. If the device has no compute limit, a
 * launch costs only two loads and a comparison more than the driver's own call. With a limit, it also costs a table
 * look-up and a sum. In both cases a launch makes no system call and writes no word that another thread reads.
 */
#include "limiter.h"

#include "memory/memory.h"

#define LIKELY(condition) __builtin_expect(!!(condition), 1)

/* Returns true if the thread's device has no compute limit and the limits file has not changed since that was checked.
 * With several limits files it returns false, and limiter_before() checks them. */
static inline bool off(void)
{
    return LIKELY((__atomic_load_n(vgpu_limits_sequence, __ATOMIC_RELAXED) | 1) == vgpu_thread.off);
}

/* The fast path: counts the launch in the open segment (the group of launches that is measured together) and returns
 * true if the launch may start. Returns false if the slow path (limiter.c) must decide. The steps are ordered so that
 * few values need registers at a time. */
static inline bool fast(uint32_t key, uintptr_t stream)
{
    struct thread_state *thread = &vgpu_thread;
    struct flow *flow = thread->current;
    if (thread->ready != atomic_load_explicit(&vgpu_launch_epoch, memory_order_relaxed) || flow->stream != stream)
        return false;
    uint64_t item = cost_index(key);
    __asm__("" : "+r"(item));
    uint64_t cost = atomic_load_explicit(&vgpu_costs.entry[item], memory_order_relaxed);
    if ((uint32_t)cost != key)
        return false;
    uint64_t count = flow->segment.count, ns = cost >> 32;
    flow->segment.items[count] = (uint16_t)item; /* No code reads this item before `count` includes it. */
    if (!segment_looks(count, ns))
        limiter_unlooked(thread);
    /* A flow (the launches of this thread into one stream) without a begun segment counts as full, so that its next
     * launch takes the slow path. */
    else if (flow->segment.predicted + ns >= thread->segment_ns || count >= SEGMENT_LAUNCHES || !limiter_looked(thread, limiter_ticks()))
        return false;
    flow->segment.predicted += ns;
    flow->segment.count++;
    return true;
}

/* The fast path of a thread that switches between its streams. */
static bool fast_other(uint32_t key, uintptr_t stream)
{
    struct thread_state *thread = &vgpu_thread;
    struct flow *flow = flow_find(thread, stream);
    if (!thread->ready || !flow || flow == thread->current)
        return false;
    thread->current = flow;
    return fast(key, stream);
}

static bool there(enum function function, CUresult *status)
{
    vgpu_enter();
    *status = vgpu_real[function] ? CUDA_SUCCESS : driver_ready() ? CUDA_ERROR_NOT_FOUND : CUDA_ERROR_NO_DEVICE;
    return *status == CUDA_SUCCESS;
}

/* SLOW defines the slow path of a launch function, LAUNCH its hook. `off` and `fast` may have become true through
 * another launch function, so the hook also checks that the driver has the hook's own function: an old driver may lack
 * it. KERNEL is for functions that exist in every supported driver, so it needs no such check. */
#define SLOW(symbol, parameters, arguments, key, stream, per_thread) \
    static __attribute__((noinline, used)) CUresult slow_##symbol parameters \
    { \
        struct ticket ticket; \
        CUresult status; \
        if (!there(F_##symbol, &status)) \
            return status; \
        if (fast_other(key, flow_stream(stream, per_thread))) \
            return REAL(symbol) arguments; \
        limiter_before(&ticket, key, stream, per_thread); \
        status = REAL(symbol) arguments; \
        limiter_after(&ticket, status); \
        return status; \
    }
#define LAUNCH(symbol, parameters, arguments, key, stream, per_thread) \
    SLOW(symbol, parameters, arguments, key, stream, per_thread) \
    EXPORT CUresult symbol parameters \
    { \
        if (LIKELY(REAL_HAS(symbol)) && (off() || fast(key, flow_stream(stream, per_thread)))) \
            return REAL(symbol) arguments; \
        return slow_##symbol arguments; \
    }

#define SHAPE unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz
#define KERNEL_KEY cost_key(function, gx, gy, gz, bx)

/*
 * The hooks of the most frequent launches are written so that no parameter is copied. If a hook declared all eleven
 * parameters, the compiler would copy those on the stack before the jump to the driver. On x86-64 the hook declares
 * only the six parameters that are passed in registers. It reads the stream from its position in the ABI (third on the
 * stack) and leaves the stack unchanged.
 *
 * That is correct only if the last call is a jump. The attribute musttail ensures a jump if the compiler has it;
 * otherwise the requested optimisation does. A build without optimisation or with a sanitizer uses plain C.
 * tests/native/vcuda/test_compilers.py launches through each such build.
 */
#if defined(__has_attribute)
#if __has_attribute(musttail)
#define JUMP __attribute__((musttail)) return
#endif
#endif
#ifdef JUMP
#define JUMPS
#else
#define JUMP return
#define JUMPS __attribute__((optimize("optimize-sibling-calls")))
#endif
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define SANITIZED
#endif
#elif defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED
#endif
#if defined(__x86_64__) && !defined(__ILP32__) && defined(__OPTIMIZE__) && !defined(SANITIZED)
#define STACK(n) (((const uintptr_t *)__builtin_dwarf_cfa())[n])
#define KERNEL(symbol, parameters, arguments, per_thread) \
    SLOW(symbol, parameters, arguments, KERNEL_KEY, stream, per_thread) \
    typedef CUresult (*six_##symbol)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned); \
    static JUMPS __attribute__((noinline)) CUresult on_##symbol(CUfunction function, unsigned gx, unsigned gy, unsigned gz, \
                                                          unsigned bx, unsigned by) \
    { \
        six_##symbol target = (six_##symbol)(void (*)(void))slow_##symbol; \
        if (LIKELY(fast(KERNEL_KEY, STACK(2) | (per_thread ? FLOW_PER_THREAD : 0)))) \
            target = (six_##symbol)vgpu_real[F_##symbol]; \
        JUMP target(function, gx, gy, gz, bx, by); \
    } \
    EXPORT CUresult entry_##symbol(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by) \
        __asm__(#symbol); \
    EXPORT JUMPS CUresult entry_##symbol(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by) \
    { \
        if (off()) \
            JUMP ((six_##symbol)vgpu_real[F_##symbol])(function, gx, gy, gz, bx, by); \
        JUMP on_##symbol(function, gx, gy, gz, bx, by); \
    }
#else
#define KERNEL(symbol, parameters, arguments, per_thread) \
    LAUNCH(symbol, parameters, arguments, KERNEL_KEY, stream, per_thread)
#endif

#define WITH_EXTRA (CUfunction function, SHAPE, unsigned shared, CUstream stream, void **parameters, void **extra)
#define WITHOUT_EXTRA (CUfunction function, SHAPE, unsigned shared, CUstream stream, void **parameters)
KERNEL(cuLaunchKernel, WITH_EXTRA, (function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra), false)
KERNEL(cuLaunchKernel_ptsz, WITH_EXTRA, (function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra), true)
KERNEL(cuLaunchCooperativeKernel, WITHOUT_EXTRA, (function, gx, gy, gz, bx, by, bz, shared, stream, parameters), false)
KERNEL(cuLaunchCooperativeKernel_ptsz, WITHOUT_EXTRA, (function, gx, gy, gz, bx, by, bz, shared, stream, parameters), true)

#define CONFIG_KEY cost_key(function, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX)
/* Used to compute the key if the program passes no configuration; the driver reports that error. */
static const CUlaunchConfig no_config;
#define EX(symbol, per_thread) \
    static __attribute__((noinline)) CUresult slow_##symbol(const CUlaunchConfig *config, CUfunction function, \
                                                            void **parameters, void **extra) \
    { \
        struct ticket ticket; \
        CUresult status; \
        const CUlaunchConfig *given = config; \
        if (!there(F_##symbol, &status)) \
            return status; \
        config = config ? config : &no_config; \
        limiter_before(&ticket, CONFIG_KEY, config->hStream, per_thread); \
        status = REAL(symbol)(given, function, parameters, extra); \
        limiter_after(&ticket, status); \
        return status; \
    } \
    EXPORT CUresult symbol(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) \
    { \
        if (LIKELY(REAL_HAS(symbol)) && (off() || (config && fast(CONFIG_KEY, flow_stream(config->hStream, per_thread))))) \
            return REAL(symbol)(config, function, parameters, extra); \
        return slow_##symbol(config, function, parameters, extra); \
    }

EX(cuLaunchKernelEx, false)
EX(cuLaunchKernelEx_ptsz, true)

/* Defines the hook of a graph launch. A graph is charged as a whole; its key is its executable handle. */
#define GRAPH(symbol, per_thread) \
    EXPORT CUresult symbol(CUgraphExec exec, CUstream stream) \
    { \
        struct ticket ticket; \
        CUresult status; \
        if (!there(F_##symbol, &status)) \
            return status; \
        if (off()) \
            return graph_memory_run(exec, stream, REAL(symbol)); \
        limiter_before(&ticket, cost_key(exec, 0, 0, 0, 0), stream, per_thread); \
        status = graph_memory_run(exec, stream, REAL(symbol)); \
        limiter_after(&ticket, status); \
        return status; \
    }

GRAPH(cuGraphLaunch, false)
GRAPH(cuGraphLaunch_ptsz, true)

/* These are the launch calls from before CUDA 4. The block shape is stored in the function, so only the function and
 * the grid are known here. */
LAUNCH(cuLaunch, (CUfunction function), (function), cost_key(function, 1, 1, 1, 1), CU_STREAM_LEGACY, false)
LAUNCH(cuLaunchGrid, (CUfunction function, int width, int height), (function, width, height),
       cost_key(function, (unsigned)width, (unsigned)height, 1, 1), CU_STREAM_LEGACY, false)
LAUNCH(cuLaunchGridAsync, (CUfunction function, int width, int height, CUstream stream), (function, width, height, stream),
       cost_key(function, (unsigned)width, (unsigned)height, 1, 1), stream, false)

/* Launches one kernel on several devices. The limiter charges and throttles this as one launch on the device of the
 * first entry. The launches on the other devices wait with it. */
EXPORT CUresult cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *list, unsigned int count, unsigned int flags)
{
    struct ticket ticket = {.flow = NULL};
    CUresult status;
    if (!there(F_cuLaunchCooperativeKernelMultiDevice, &status))
        return status;
    CUcontext before = NULL, context = NULL;
    bool moved = false;
    if (list && count && REAL_HAS(cuStreamGetCtx) && REAL_HAS(cuCtxGetCurrent) && REAL_HAS(cuCtxSetCurrent)) {
        /* Make the context of the first stream current, because the limiter works in the current context. */
        moved = REAL(cuCtxGetCurrent)(&before) == CUDA_SUCCESS &&
                REAL(cuStreamGetCtx)(list[0].hStream, &context) == CUDA_SUCCESS && context != before &&
                REAL(cuCtxSetCurrent)(context) == CUDA_SUCCESS;
        if (moved)
            limiter_forget_thread();
        const CUDA_LAUNCH_PARAMS *one = &list[0];
        limiter_before(&ticket,
                       cost_key(one->function, one->gridDimX, one->gridDimY, one->gridDimZ, one->blockDimX),
                       one->hStream, false);
    }
    status = REAL(cuLaunchCooperativeKernelMultiDevice)(list, count, flags);
    limiter_after(&ticket, status);
    if (moved) {
        limiter_forget_thread();
        REAL(cuCtxSetCurrent)(before);
    }
    return status;
}
