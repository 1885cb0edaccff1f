/* SPDX-License-Identifier: Apache-2.0 */
/* What those who charge device memory and give it back ask of each other, by file. The end of vgpu.h. */
#ifndef VGPU_CHARGES_H
#define VGPU_CHARGES_H

#include "vgpu.h"

#pragma GCC visibility push(hidden)

/* --- charge.c: charge around a call of the driver ------------------------------------------------------ */

enum block_kind { BLOCK_PLAIN = 1, BLOCK_POOL, BLOCK_LENT /* plain, and others may have it open */, BLOCK_HOST };
/* Charges bytes to the device, or answers the error that the caller gets. Asks own pools to give back first. */
CUresult memory_charge(const struct device *device, enum account account, uint64_t bytes);
void memory_keep(struct block_map *map, uint64_t key, uint64_t bytes, const struct device *device, int kind, uint64_t owner);
/* The device and context of a hook that allocates in the current context; NULL: *status is what the caller gets. */
const struct device *memory_target(enum control control, CUcontext *context, CUresult *status);
/* Of a hook that allocates elsewhere: the current context, if there is one, is charged like any. */
CUresult memory_meet(void);
CUresult memory_refuse(const char *what); /* a thing that cannot be charged exactly: one line, NOT_SUPPORTED */
CUresult memory_broken(void);
/*
 * The frame of a hook that allocates in the current context: in flight from the first of these that answers CUDA_SUCCESS until
 * allocation_end, which is called then whatever the driver answers.
 */
struct allocation {
    const struct device *device;
    CUcontext context;
    uint64_t bytes; /* charged */
    int kind;       /* enum block_kind that it is kept as */
};
CUresult allocation_target(enum control control, struct allocation *allocation); /* nothing is charged yet */
CUresult allocation_begin(enum control control, struct allocation *allocation, uint64_t bytes);
CUresult allocation_resize(struct allocation *allocation, uint64_t bytes); /* an error: as it was */
/* Kept in the table under the key (NULL: by the caller), or uncharged where the driver answered an error. */
CUresult allocation_end(struct allocation *allocation, CUresult status, struct block_map *map, uint64_t key);

/* --- memory.c: plain memory ---------------------------------------------------------------------------- */

CUresult memory_free(CUdeviceptr pointer, CUresult (*release)(CUdeviceptr pointer, void *data), void *data);
/*
 * Memory, arrays and modules of a context that is about to go: taken out of their tables before the driver frees them,
 * for another thread may get the same addresses at once. Afterwards uncharged, or put back if the context stayed.
 */
enum { SWEPT_MAPS = 3 };
struct swept {
    uint64_t owner;
    struct block *blocks;
    size_t count, room;
};
void memory_sweep_context(CUcontext context, struct swept swept[SWEPT_MAPS]);
void memory_sweep_end(struct swept swept[SWEPT_MAPS], bool gone);

/* --- residue.c: what the driver takes without being asked ------------------------------------------------- */

void residue_begin(const struct device *device); /* a context was made */
/* One was found that was not seen to be made: looks at once. False: that did not tell what it takes. Context lock held. */
bool residue_begin_now(const struct device *device);
void residue_context_gone(int device);           /* context lock held */
void residue_reset(void);

/* --- oom.c ------------------------------------------------------------------------------------------------ */

/* Ends this process if the container is over a limit and nobody holds more. True: over, and this is not the one. */
bool oom_check(void);

/* --- host_memory.c: device memory that is not on the card (S above 1) ------------------------------------ */

/* Is oversubscription on and the card too full for so many bytes? A context is current. */
bool host_memory_wanted(const struct device *device, uint64_t bytes);
/* As much unified memory that lives in host memory; the caller has charged it and keeps it as BLOCK_HOST. */
CUresult host_memory_take(const struct device *device, CUdeviceptr *pointer, uint64_t bytes);
void host_memory_freed(int device, uint64_t bytes);
uint64_t host_memory_held(int device); /* by this process: charged as used, and not on the card */
void host_memory_reset(void);

/* --- measure.c: what contexts and modules really cost --------------------------------------------------- */

struct measure {
    const struct device *device;
    nvmlDevice_t handle;
    uint64_t own, card, charged;
    bool nvml, quiet;
};
void measure_begin(struct measure *measure, const struct device *device);
enum measured {
    MEASURED_NOT,
    MEASURED_BUSY, /* another thread has been inside an allocation or free for seconds */
    MEASURED_CARD, /* by the card's figure: neighbours may be in it */
    MEASURED_OWN,  /* by this process's own figure */
};
/* Bytes that came to this process since, without what was charged as allocations. */
enum measured measure_end(const struct measure *measure, uint64_t *bytes);
/* Bytes by which this process's own figure fell, without what was uncharged; 0 where NVML does not show it. */
uint64_t measure_fall(const struct measure *measure);
/* The size of a context by creating others beside it, given what the card's figure says (0: nothing). 0: unknown. */
uint64_t measure_by_second(CUcontext context, CUdevice ordinal, uint64_t card);

/* --- code.c ---------------------------------------------------------------------------------------------- */

/* Unloads a module or library, and uncharges what really went with it, in every context. */
CUresult code_unload(enum control control, const void *holder, CUresult (*unload)(const void *holder));
/* The context is gone: what was loaded there must be measured again in another of the same address. */
void code_leave_context(CUcontext context);

/* --- pool.c ---------------------------------------------------------------------------------------------- */

/* Charges pools what the driver says they hold now; trim: and asks them to hold no more than is in use. */
void pools_settle(bool trim);
void pool_freed(uint64_t pool, uint64_t bytes);
extern _Atomic uint32_t vgpu_pools_dirty;

/* --- ipc.c ----------------------------------------------------------------------------------------------- */

extern _Atomic bool vgpu_lent_any; /* this process has handed out a handle */
/* Was it lent? Taken out of the table before the driver frees it, for another thread may get the same address at once. */
static inline bool ipc_lent(CUdeviceptr pointer, struct block *loan)
{
    return atomic_load_explicit(&vgpu_lent_any, memory_order_relaxed) && block_take(&vgpu_lent, pointer, loan);
}
/* Memory that was lent was freed: uncharged as soon as nobody has it open. */
void ipc_freed(const struct block *loan);
/* Looks again at what was freed while others had it open; pools_settle calls it. */
void ipc_settle(void);

/* --- external.c ------------------------------------------------------------------------------------------- */

extern _Atomic bool vgpu_external_any; /* this process has imported something */
/* For a pointer that is in no table of ours: taken before the driver frees it, settled after. NULL: from no import. */
struct external_buffer *external_take(CUdeviceptr pointer);
void external_settle(struct external_buffer *taken, bool freed);

/* --- green.c ----------------------------------------------------------------------------------------------- */

extern _Atomic bool vgpu_green_any; /* this process has made one */
/* The context that a thread of ours may enter for work of this one: of a green one its primary. */
CUcontext green_enters(CUcontext context);
bool green_is(CUcontext context); /* is this a green one? */
/* The device of a green context's stream, whose context the driver does not tell. */
bool green_ordinal(CUstream stream, CUdevice *ordinal);
/* Device locked. A primary context is about to go, and its green ones with it; it is gone. */
void green_primary_leaves(int device, CUcontext primary);
void green_primary_gone(int device);

/* --- shareable.c ------------------------------------------------------------------------------------------- */

/* Marks a descriptor that the driver has just made for an object; *object 0: a new one. False: what is kept alive by it can
 * not be known. */
bool shareable_mark(int descriptor, uint64_t *object);
/* This process has made a handle that cannot be marked. */
void shareable_unmarked(void);
/* Is any descriptor of the object open, in whatever process? Also where it cannot be known. */
bool shareable_open(uint64_t object);
enum shareable_origin {
    SHAREABLE_UNKNOWN, /* this container has handles that are not marked: it may be one of them */
    SHAREABLE_OURS,    /* made by a process of this container, and charged there */
    SHAREABLE_FOREIGN,
};
/* The byte of the ledger that stands for imports of an object, 0: of one that is not known. */
uint64_t shareable_lent_byte(uint64_t object);
/* Does this descriptor carry the mark of a container, whichever? */
bool shareable_marked(int descriptor);
/* Of a descriptor; -1: a handle of another kind, which is never marked. */
enum shareable_origin shareable_origin(int descriptor, uint64_t *object);

/* --- vmm.c ------------------------------------------------------------------------------------------------- */

/* Looks again at what was let go while others had it; pools_settle calls it. */
void vmm_settle(void);

/* --- graph_memory.c --------------------------------------------------------------------------------------- */

/* The same for what the devices keep for graphs; pools_settle calls it. */
void graph_memory_settle(bool trim);
/* Around the launch or upload of an executable graph: charges what its memory nodes may take. One load without any. */
CUresult graph_memory_run(CUgraphExec exec, CUstream stream, CUresult (*call)(CUgraphExec exec, CUstream stream));
/* A stream-ordered allocation is about to become a node of the graph that is being captured. */
CUresult graph_memory_captured(enum control control);

#pragma GCC visibility pop

#endif
