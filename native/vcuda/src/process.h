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
struct witness {
    _Atomic bool started;
    _Atomic(struct standing *) standing;
};
extern _Atomic(struct witness *) vgpu_witness; /* never NULL */
enum control vgpu_enter_anew(void);
/* What rules now, if the short way in is open and nothing has changed; else NULL: ask vgpu_enter(). */
static inline struct standing *vgpu_standing_now(void)
{
    struct witness *witness = atomic_load_explicit(&vgpu_witness, memory_order_acquire);
    struct standing *standing = atomic_load_explicit(&witness->standing, memory_order_acquire);
    bool same = standing && __atomic_load_n(standing->sequence_at, __ATOMIC_ACQUIRE) == standing->sequence;
    return __builtin_expect(same, 1) ? standing : NULL;
}
/* First line of every hook; CONTROL_OFF: call the driver and nothing else. */
static inline enum control vgpu_enter(void)
{
    const struct standing *standing = vgpu_standing_now();
    return __builtin_expect(standing != NULL, 1) ? standing->control : vgpu_enter_anew();
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
