/* SPDX-License-Identifier: Apache-2.0 */
/* Starts the library in a process, and defines what every hook (replacement of a driver function) does first. */
#ifndef VGPU_PROCESS_H
#define VGPU_PROCESS_H

#include "driver/real.h"
#include "limits/limits.h"

#pragma GCC visibility push(hidden)

/*
 * The state of this process: whether the library was started, and the cached limits, NULL until the driver was found.
 * The state is in a page that the kernel clears in a forked child, so that the library is started again in the child.
 */
struct process_state {
    _Atomic bool started;
    _Atomic(struct cached_limits *) limits;
};
extern _Atomic(struct process_state *) vgpu_process; /* This pointer is never NULL. */
enum control vgpu_enter_again(void);
/* Returns the cached limits if the limits file is unchanged. Otherwise returns NULL, and the caller must call
 * vgpu_enter(), which reads the file again if needed. */
static inline struct cached_limits *vgpu_limits_now(void)
{
    struct process_state *process = atomic_load_explicit(&vgpu_process, memory_order_acquire);
    struct cached_limits *cached = atomic_load_explicit(&process->limits, memory_order_acquire);
    bool same = cached && __atomic_load_n(cached->sequence_at, __ATOMIC_ACQUIRE) == cached->sequence;
    return __builtin_expect(same, 1) ? cached : NULL;
}
/* Called first by every hook. If it returns CONTROL_OFF, the hook only calls the driver. */
static inline enum control vgpu_enter(void)
{
    const struct cached_limits *cached = vgpu_limits_now();
    return __builtin_expect(cached != NULL, 1) ? cached->control : vgpu_enter_again();
}
enum control vgpu_enter_nvml(void);

/* The first lines of most hooks. If the driver does not have the function, the hook returns an error; if no limits
 * apply, it only calls the driver. */
#define ENTER(symbol, arguments) \
    enum control control = vgpu_enter(); \
    if (!REAL_HAS(symbol)) \
        return driver_ready() ? CUDA_ERROR_NOT_FOUND : CUDA_ERROR_NO_DEVICE; \
    if (control == CONTROL_OFF) \
        return REAL(symbol) arguments; \
    vgpu_log(LOG_CALLS, "%s", #symbol)

#pragma GCC visibility pop

#endif
