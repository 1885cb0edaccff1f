/* SPDX-License-Identifier: Apache-2.0 */
/* Private to vmm.c and vmm_shared.c: physical memory, and its handles as the program has them. */
#ifndef VGPU_VMM_H
#define VGPU_VMM_H

#include "memory.h"

#pragma GCC visibility push(hidden)

struct physical {
    struct physical *next;       /* of those that wait */
    const struct device *device; /* NULL: imported, charged to its maker */
    uint64_t bytes;              /* that this process is charged */
    uint64_t shared;             /* the object that its shareable handles stand for; 0: there are none */
    void *import;                  /* of an import: the byte of the ledger that says so */
    unsigned handles, mappings;
    unsigned calls; /* of the driver, that use it now */
    int exporting;  /* of those, that make a shareable handle */
    bool host; /* not on the card: host_memory.c */
    bool kept; /* by something that nobody counts, see above: charged as long as this process lives */
    bool exported; /* its slot says that others may have it */
};

/* Of these structures, vgpu_handles and vgpu_mappings; never held in the driver. */
extern struct lock vmm_lock;

static inline struct physical *physical_of(uint64_t owner)
{
    return (struct physical *)(uintptr_t)owner;
}
/* The object behind a handle or mapping, which stays until vmm_done; NULL: none that is known. */
struct physical *vmm_begin(struct block_map *map, uint64_t key);
void vmm_done(struct physical *object);
/* The driver has handed out a handle. `fresh`: no other of that value can be open. Where there is no host memory to remember it,
 * it goes back to the driver, and the answer is OUT_OF_MEMORY. */
CUresult vmm_remember(struct physical *object, CUmemGenericAllocationHandle handle, bool fresh);

#pragma GCC visibility pop

#endif
