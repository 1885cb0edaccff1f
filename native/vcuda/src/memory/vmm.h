/* SPDX-License-Identifier: Apache-2.0 */
/* Private to vmm.c and vmm_shared.c: physical memory, and the program's handles to it. */
#ifndef VGPU_VMM_H
#define VGPU_VMM_H

#include "memory.h"

#pragma GCC visibility push(hidden)

struct physical {
    struct physical *next;       /* next: the next object that other processes still have open. */
    const struct device *device; /* device: NULL if the memory was imported and the exporting process is charged. */
    uint64_t bytes;              /* bytes: charged to this process. */
    uint64_t shared;             /* shared: object number of the shareable handles, 0 if none exist. */
    void *import;                  /* import: for imported memory, the locked ledger byte that shows the import. */
    unsigned handles, mappings;
    unsigned calls; /* calls: number of driver calls that use the object now. */
    int exporting;  /* exporting: number of these calls that create a shareable handle. */
    bool host; /* host: the memory is host memory (host_memory.c), not memory of the card. */
    /* kept: an object that is not counted uses the memory (vmm.c), so it stays charged as long as this process
     * lives. */
    bool kept;
    bool exported; /* exported: the ledger slot counts the memory as exported. */
};

/* Protects these structures, vgpu_handles and vgpu_mappings; never held during a driver call. */
extern struct lock vmm_lock;

static inline struct physical *physical_of(uint64_t owner)
{
    return (struct physical *)(uintptr_t)owner;
}
/* Returns the object of a handle or mapping and keeps it until vmm_done. NULL: unknown. */
struct physical *vmm_begin(struct block_map *map, uint64_t key);
void vmm_done(struct physical *object);
/* Records a handle that the driver has returned. `fresh`: no other handle of that value can be open. Without host
 * memory to record it, releases the handle and returns OUT_OF_MEMORY. */
CUresult vmm_remember(struct physical *object, CUmemGenericAllocationHandle handle, bool fresh);

#pragma GCC visibility pop

#endif
