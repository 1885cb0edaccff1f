/* SPDX-License-Identifier: Apache-2.0 */
/* A physical handle, for vmm.c and ipc.c. */
#ifndef GPUSIM_VMM_H
#define GPUSIM_VMM_H

#include "driver.h"

#define VMM_GRANULARITY ((uint64_t)2 << 20)
#define PHYSICAL_MAGIC 0x50485931u

struct physical {
    uint32_t magic;
    int device;
    size_t bytes;
    unsigned handles, mapped; /* who keeps it alive */
    uintptr_t base;           /* in the arena; 0 where imported */
    int fd;                   /* the memory file … */
    uint64_t offset;          /* … and where in it */
    bool imported;            /* another process's, charged there */
    bool host;                /* in host memory, charged nowhere */
    int shared;               /* index + 1 of its shareable handle, 0: none */
    void *hold;               /* of an import */
    CUmemAllocationProp prop;
};

/* A handle on another process's memory; takes fd and hold over. */
CUresult vmm_import(int device, int fd, const struct sim_shared *shared, void *hold, CUmemGenericAllocationHandle *out);

/* One more or one less who keeps it alive: a tile, a multicast object. NULL: no such handle, nothing mapped there. */
struct physical *vmm_take(CUmemGenericAllocationHandle handle);
struct physical *vmm_take_at(CUdeviceptr pointer);
void vmm_let_go(struct physical *physical);

/* bind.c */
void bindings_end(const void *to);                              /* the array or object is gone */
bool multicast_release(CUmemGenericAllocationHandle handle);    /* false: not a multicast object */

/* array.c */
bool array_sparse(const void *array);

#endif
