/* SPDX-License-Identifier: Apache-2.0 */
/* Hostile behaviours: CUDA allows them and most drivers avoid them. The profile's key `hostile` enables them, so that
 * tests can show that programs tolerate them (enum sim_hostile). */
#ifndef GPUSIM_HOSTILE_H
#define GPUSIM_HOSTILE_H

#include "driver.h"
#include "private.h"

static inline bool hostile(enum sim_hostile what)
{
    return __builtin_expect((sim_state()->hostile & what) != 0, 0);
}

/*
 * The behaviour `context-lock` locks the context against calls of other threads. Calls of the same thread pass, so that
 * a tool in a callback inside a load can use the driver. Returns whether the context was locked; the caller passes this
 * value to context_unlock().
 */
bool context_lock(CUcontext context);
void context_unlock(CUcontext context, bool held);
void context_pass(CUcontext context); /* Waits while another thread has the lock. */

/* Before a free, waits for this context's work or, with `waiting-frees`, for the work of all contexts on the device. */
CUresult free_wait(CUcontext context);

/* The behaviour `callbacks` reports moments of driver calls to a tool, a library that the program loads. */
void tool_call(enum gpusim_moment moment, void *handle);
void tool_load(void); /* Loads the tool that CUDA_INJECTION64_PATH names, as the real driver does. */

#endif
