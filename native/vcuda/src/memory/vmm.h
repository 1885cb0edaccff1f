/* SPDX-License-Identifier: Apache-2.0 */
/* Private to vmm.c and vmm_shared.c: physical memory, and the program's handles to it. */
#ifndef VGPU_VMM_H
#define VGPU_VMM_H

#include "memory.h"

#pragma GCC visibility push(hidden)

struct physical {
    struct physical *next;       /* Next object that other processes still have open. */
    const struct device *device; /* NULL: imported, and the exporting process is charged. */
    uint64_t bytes;              /* Bytes charged to this process. */
    uint64_t shared;             /* The object number of its shareable handles; 0: none exist. */
    void *import;                  /* For an import: the ledger byte that shows it. */
    unsigned handles, mappings;
    unsigned calls; /* Driver calls that use it now. */
    int exporting;  /* Those of the calls that create a shareable handle. */
    bool host; /* In host memory instead of on the card: host_memory.c. */
    bool kept; /* kept by something that is not counted (see vmm.c): charged as long as this process lives. */
    bool exported; /* The ledger slot counts it as exported. */
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
