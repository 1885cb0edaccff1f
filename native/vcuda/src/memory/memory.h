/* SPDX-License-Identifier: Apache-2.0 */
/* Functions of the hooks of all memory calls. events.c lists the functions that release unused memory, and the
 * functions that run when a context ends. */
#ifndef VGPU_MEMORY_H
#define VGPU_MEMORY_H

#include "account/account.h"

#pragma GCC visibility push(hidden)

/* --- memory.c: plain memory ---------------------------------------------------------------------------- */

CUresult memory_free(CUdeviceptr pointer, CUresult (*release)(CUdeviceptr pointer, void *data), void *data);
void memory_gone(const struct block *block); /* Uncharges a freed block. */

/* --- leaving.c ------------------------------------------------------------------------------------------ */

struct leaving;
void memory_context_leaving(struct leaving *leaving);
void memory_context_left(struct leaving *leaving);

/* --- pool.c ---------------------------------------------------------------------------------------------- */

/* Charges each pool what the driver reports as its size. trim: first makes the pools release unused memory. */
void pools_settle(bool trim);
void pools_reset(void);
/* Called after the program has waited for the GPU, because pools may have shrunk. */
void pools_waited(bool done);
void pool_freed(uint64_t pool, uint64_t bytes);
extern _Atomic uint32_t vgpu_pools_dirty;

/* --- ipc.c ----------------------------------------------------------------------------------------------- */

extern _Atomic bool vgpu_exported_any; /* vgpu_exported_any: this process has exported a handle. */
/* The next function returns true if the memory was exported, and removes it from the table. Call before the driver
 * frees it, because another thread may get the same address at once. */
static inline bool ipc_exported(CUdeviceptr pointer, struct block *exported)
{
    return atomic_load_explicit(&vgpu_exported_any, memory_order_relaxed) && block_take(&vgpu_exported, pointer, exported);
}
/* Called after exported memory was freed. The memory is uncharged as soon as no process has it open. */
void ipc_freed(const struct block *exported);
/* Checks again memory that was freed while another process had it open; called by events.c. */
void ipc_settle(bool trim);
void ipc_reset(void);

/* --- external.c ------------------------------------------------------------------------------------------- */

extern _Atomic bool vgpu_external_any; /* vgpu_external_any: this process has imported external memory. */
/* If a pointer is in no other table of this process, call external_take before the driver frees it and external_settle
 * afterwards. NULL: the pointer is not from an import. */
struct external_buffer *external_take(CUdeviceptr pointer);
void external_settle(struct external_buffer *taken, bool freed);
void external_reset(void);

/* --- vmm.c ------------------------------------------------------------------------------------------------- */

/* Checks again memory that was released while another process had it open; called by events.c. */
void vmm_settle(bool trim);
void vmm_reset(void);

/* --- graph_memory.c --------------------------------------------------------------------------------------- */

/* Charges each device's memory that the driver keeps for graphs; called by events.c. */
void graph_memory_settle(bool trim);
void graph_memory_reset(void);
/* Runs the launch or upload of an executable graph and charges the memory of its nodes. Costs one load for graphs
 * without memory nodes. */
CUresult graph_memory_run(CUgraphExec exec, CUstream stream, CUresult (*call)(CUgraphExec exec, CUstream stream));
/* Checks a stream-ordered allocation that is about to become a node of a captured graph. */
CUresult graph_memory_captured(enum control control);

#pragma GCC visibility pop

#endif
