/* SPDX-License-Identifier: Apache-2.0 */
/* The type of a physical allocation of CUDA's virtual memory management, for vmm.c and ipc.c. */
#ifndef GPUSIM_VMM_H
#define GPUSIM_VMM_H

#include "driver.h"

#define VMM_GRANULARITY ((uint64_t)2 << 20)
#define PHYSICAL_MAGIC 0x50485931u

struct physical {
    uint32_t magic;
    int device;
    size_t bytes;
    /* Numbers of handles and mappings that keep the memory alive. */
    unsigned handles, mapped;
    /* Address in the arena (arena.h); 0 for imported memory. */
    uintptr_t base;
    /* Descriptor of the memory file that has the bytes. */
    int fd;
    /* Offset in the memory file. */
    uint64_t offset;
    /* True for memory of another process; that process is charged for it. */
    bool imported;
    /* True for host memory, which is not charged. */
    bool host;
    /* Index + 1 of the shareable handle, or 0. */
    int shared;
    /* For imported memory: the reference that keeps it alive. */
    void *hold;
    CUmemAllocationProp prop;
};

/* Creates a handle for another process's memory; takes ownership of fd and hold. */
CUresult vmm_import(int device, int fd, const struct sim_shared *shared, void *hold, CUmemGenericAllocationHandle *out);

/* vmm_take and vmm_take_at find memory by handle or by address, and add the reference of a tile or a multicast object.
 * They return NULL for unknown memory. vmm_let_go removes the reference. */
struct physical *vmm_take(CUmemGenericAllocationHandle handle);
struct physical *vmm_take_at(CUdeviceptr pointer);
void vmm_let_go(struct physical *physical);

/* Defined in bind.c: */

/* Removes all bindings of a destroyed array or multicast object. */
void bindings_end(const void *to);
/* Returns false if the handle is no multicast object. */
bool multicast_release(CUmemGenericAllocationHandle handle);

/* Defined in array.c: */
bool array_sparse(const void *array);

#endif
