/* SPDX-License-Identifier: Apache-2.0 */
/* What the driver does where the profile says `hostile = …` (enum sim_hostile). */
#ifndef GPUSIM_HOSTILE_H
#define GPUSIM_HOSTILE_H

#include "driver.h"
#include "private.h"

static inline bool hostile(enum sim_hostile what)
{
    return __builtin_expect((sim_state()->hostile & what) != 0, 0);
}

/*
 * context-lock: a thread that holds a context keeps all others out of its calls. The holder's own calls pass, so that
 * a tool that is called back inside a load may use the driver. True: held, to be given to context_unlock.
 */
bool context_lock(CUcontext context);
void context_unlock(CUcontext context, bool held);
void context_pass(CUcontext context); /* waits while another thread holds it */

/* waiting-frees: waits until what is freed is not in use: for this context, or for all of them on its device */
CUresult free_wait(CUcontext context);

/* callbacks */
void tool_call(enum gpusim_moment moment, void *handle);
void tool_load(void); /* the one that CUDA_INJECTION64_PATH names, as the real driver does */

#endif
