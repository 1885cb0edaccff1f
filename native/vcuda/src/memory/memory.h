/* SPDX-License-Identifier: Apache-2.0 */
/* Declares the functions that the hooks of all kinds of device memory have in common. A hook is this library's
 * replacement of a driver function. events.c lists which of these functions release unused memory, and which run when a
 * context ends. */
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

/* Uncharges the memory that pools no longer have, according to the size that the driver reports. With `trim` the pools
 * first release unused memory to the driver. */
void pools_settle(bool trim);
void pools_reset(void);
/* Called after the program has waited for the GPU, because pools may have shrunk. */
void pools_waited(bool done);
/* Called after a block of the pool was freed. */
void pool_freed(uint64_t pool, uint64_t bytes);
/* Not 0 if a pool may have shrunk, or if another process may have closed exported memory, so that a check is needed. */
extern _Atomic uint32_t vgpu_pools_dirty;

/* --- ipc.c ----------------------------------------------------------------------------------------------- */

extern _Atomic bool vgpu_exported_any; /* vgpu_exported_any: true if this process has exported an IPC handle. */
/* ipc_exported returns true if the memory was exported, and removes it from the table of exported memory. Must be
 * called before the driver frees the memory, because another thread may get the same address at once. */
static inline bool ipc_exported(CUdeviceptr pointer, struct block *exported)
{
    return atomic_load_explicit(&vgpu_exported_any, memory_order_relaxed) && block_take(&vgpu_exported, pointer, exported);
}
/* Called after exported memory was freed. The memory is uncharged when no process has it open any more. */
void ipc_freed(const struct block *exported);
/* Some memory was freed while another process had it open, so it stayed charged. Uncharges it if that process has
 * closed it. */
void ipc_settle(bool trim);
void ipc_reset(void);

/* --- external.c ------------------------------------------------------------------------------------------- */

/* vgpu_external_any: true if this process has imported memory of another interface (cuImportExternalMemory). */
extern _Atomic bool vgpu_external_any;
/* Called for a pointer that is in no other table: external_take before the driver frees the pointer, external_settle
 * afterwards. external_take returns NULL if the pointer is not from an import. */
struct external_buffer *external_take(CUdeviceptr pointer);
void external_settle(struct external_buffer *taken, bool freed);
void external_reset(void);

/* --- vmm.c ------------------------------------------------------------------------------------------------- */

/* Some memory was released while another process had it open, so it stayed charged. Uncharges it if that process has
 * closed it. */
void vmm_settle(bool trim);
void vmm_reset(void);

/* --- graph_memory.c --------------------------------------------------------------------------------------- */

/* Uncharges the memory that the driver no longer keeps for graphs. With `trim` the driver first releases memory that no
 * graph uses. */
void graph_memory_settle(bool trim);
void graph_memory_reset(void);
/* Calls the driver to launch or upload an executable graph, and charges the memory that the graph's nodes allocate. In
 * a process without such nodes the charge costs only one load. */
CUresult graph_memory_run(CUgraphExec exec, CUstream stream, CUresult (*call)(CUgraphExec exec, CUstream stream));
/* While a stream is being captured, a stream-ordered allocation becomes a memory node of the graph. Checks such an
 * allocation. */
CUresult graph_memory_captured(enum control control);

#pragma GCC visibility pop

#endif
