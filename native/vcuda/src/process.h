/* SPDX-License-Identifier: Apache-2.0 */
/* The start of the library in a process, and the first line of every hook. */
#ifndef VGPU_PROCESS_H
#define VGPU_PROCESS_H

#include "driver/real.h"
#include "limits/limits.h"

#pragma GCC visibility push(hidden)

/*
 * What is true of this process only: that it started the library, and then what rules in it, once the driver was found.
 * It lies in a page that the kernel hands to a child empty.
 */
struct process_state {
    _Atomic bool started;
    _Atomic(struct cached_limits *) limits;
};
extern _Atomic(struct process_state *) vgpu_process; /* never NULL */
enum control vgpu_enter_again(void);
/* What rules now, if the short way in is open and nothing has changed; else NULL: ask vgpu_enter(). */
static inline struct cached_limits *vgpu_limits_now(void)
{
    struct process_state *process = atomic_load_explicit(&vgpu_process, memory_order_acquire);
    struct cached_limits *cached = atomic_load_explicit(&process->limits, memory_order_acquire);
    bool same = cached && __atomic_load_n(cached->sequence_at, __ATOMIC_ACQUIRE) == cached->sequence;
    return __builtin_expect(same, 1) ? cached : NULL;
}
/* First line of every hook; CONTROL_OFF: call the driver and nothing else. */
static inline enum control vgpu_enter(void)
{
    const struct cached_limits *cached = vgpu_limits_now();
    return __builtin_expect(cached != NULL, 1) ? cached->control : vgpu_enter_again();
}
enum control vgpu_enter_nvml(void);

/* The frame of a hook: leaves where the driver lacks the function or the library has nothing to say. */
#define ENTER(symbol, arguments) \
    enum control control = vgpu_enter(); \
    if (!REAL_HAS(symbol)) \
        return driver_ready() ? CUDA_ERROR_NOT_FOUND : CUDA_ERROR_NO_DEVICE; \
    if (control == CONTROL_OFF) \
        return REAL(symbol) arguments; \
    vgpu_log(LOG_CALLS, "%s", #symbol)

#pragma GCC visibility pop

#endif
