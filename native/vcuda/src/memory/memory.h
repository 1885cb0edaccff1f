/* SPDX-License-Identifier: Apache-2.0 */
/* Memory by every route. What reclaims, and what a context leaves behind, is listed in events.c. */
#ifndef VGPU_MEMORY_H
#define VGPU_MEMORY_H

#include "account/account.h"

#pragma GCC visibility push(hidden)

/* --- memory.c: plain memory ---------------------------------------------------------------------------- */

CUresult memory_free(CUdeviceptr pointer, CUresult (*release)(CUdeviceptr pointer, void *data), void *data);
void memory_gone(const struct block *block); /* freed: uncharged */

/* --- leaving.c ------------------------------------------------------------------------------------------ */

struct leaving;
void memory_context_leaving(struct leaving *leaving);
void memory_context_left(struct leaving *leaving);

/* --- pool.c ---------------------------------------------------------------------------------------------- */

/* Charges pools what the driver says they hold now; trim: and asks them to hold no more than is in use. */
void pools_settle(bool trim);
void pools_reset(void);
void pools_waited(bool done); /* a wait of the program may have let pools shrink */
void pool_freed(uint64_t pool, uint64_t bytes);
extern _Atomic uint32_t vgpu_pools_dirty;

/* --- ipc.c ----------------------------------------------------------------------------------------------- */

extern _Atomic bool vgpu_exported_any; /* this process has handed out a handle */
/* Was it exported? Taken out of the table before the driver frees it, for another thread may get the same address at once. */
static inline bool ipc_exported(CUdeviceptr pointer, struct block *exported)
{
    return atomic_load_explicit(&vgpu_exported_any, memory_order_relaxed) && block_take(&vgpu_exported, pointer, exported);
}
/* Exported memory was freed: uncharged as soon as nobody has it open. */
void ipc_freed(const struct block *exported);
/* Looks again at what was freed while others had it open; events.c. */
void ipc_settle(bool trim);
void ipc_reset(void);

/* --- external.c ------------------------------------------------------------------------------------------- */

extern _Atomic bool vgpu_external_any; /* this process has imported something */
/* For a pointer that is in no table of ours: taken before the driver frees it, settled after. NULL: from no import. */
struct external_buffer *external_take(CUdeviceptr pointer);
void external_settle(struct external_buffer *taken, bool freed);
void external_reset(void);

/* --- vmm.c ------------------------------------------------------------------------------------------------- */

/* Looks again at what was let go while others had it; events.c. */
void vmm_settle(bool trim);
void vmm_reset(void);

/* --- graph_memory.c --------------------------------------------------------------------------------------- */

/* The same for what the devices keep for graphs; events.c. */
void graph_memory_settle(bool trim);
void graph_memory_reset(void);
/* Around the launch or upload of an executable graph: charges what its memory nodes may take. One load without any. */
CUresult graph_memory_run(CUgraphExec exec, CUstream stream, CUresult (*call)(CUgraphExec exec, CUstream stream));
/* A stream-ordered allocation is about to become a node of the graph that is being captured. */
CUresult graph_memory_captured(enum control control);

#pragma GCC visibility pop

#endif
