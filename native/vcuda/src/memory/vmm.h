/* SPDX-License-Identifier: Apache-2.0 */
/* Private to vmm.c and vmm_shared.c: physical memory that cuMemCreate created (an object), and the program's handles to
 * it. The ledger is the file in which all processes of the container record their charges. */
#ifndef VGPU_VMM_H
#define VGPU_VMM_H

#include "memory.h"

#pragma GCC visibility push(hidden)

struct physical {
    /* next: the next object in the list of objects that this process has released while other processes have them
     * open. */
    struct physical *next;
    /* device: device to which the memory is charged. NULL if the memory was imported, because then the exporting
     * process is charged. */
    const struct device *device;
    uint64_t bytes;              /* bytes: bytes that this process is charged. */
    /* shared: number that marks the shareable handles of this memory (shareable.c); 0 if none exist. */
    uint64_t shared;
    /* import: set for imported memory: a lock on a byte of the ledger, by which other processes see that the memory is
     * still imported. */
    void *import;
    unsigned handles, mappings;
    unsigned calls; /* calls: number of driver calls that use the object now. */
    int exporting;  /* exporting: number of those calls that create a shareable handle. */
    bool host; /* host: true if the memory lies in host memory (host_memory.c) instead of on the card. */
    /* kept: true if something uses the memory that the library does not track (vmm.c). Then the memory stays charged
     * until this process ends. */
    bool kept;
    bool exported; /* exported: true if the process's slot (entry) in the ledger counts the memory as exported. */
};

/* Protects these structures, vgpu_handles and vgpu_mappings; never held during a driver call. */
extern struct lock vmm_lock;

static inline struct physical *physical_of(uint64_t owner)
{
    return (struct physical *)(uintptr_t)owner;
}
/* Returns the object of a handle or mapping and keeps it from being uncharged until vmm_done. NULL: unknown. */
struct physical *vmm_begin(struct block_map *map, uint64_t key);
void vmm_done(struct physical *object);
/* Records a handle that the driver has returned. `fresh` is true if no other open handle can have the same value. If
 * there is no host memory for the record, releases the handle and returns CUDA_ERROR_OUT_OF_MEMORY. */
CUresult vmm_remember(struct physical *object, CUmemGenericAllocationHandle handle, bool fresh);
/* Returns true if this process has itself imported the shared memory of that number. Needs the lock. */
bool vmm_imported_here(uint64_t shared);

#pragma GCC visibility pop

#endif
