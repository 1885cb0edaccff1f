/* SPDX-License-Identifier: Apache-2.0 */
/* What this container and this process are charged for each device. The fast path is in counters.h. */
#ifndef VGPU_ACCOUNT_H
#define VGPU_ACCOUNT_H

#include "counters.h"
#include "driver/real.h"
#include "limits/limits.h"

#pragma GCC visibility push(hidden)

/* --- ledger.c: the container's account -------------------------------------------------------------- */

enum charge { CHARGE_OK, CHARGE_FULL, CHARGE_BROKEN };

/* Opens the ledger and claims a slot. Returns false after a line on stderr if no slot is available. */
bool ledger_join(void);
/* Returns the index of a device in this process and adds a new device. In most containers it equals the index in the
 * ledger. -1: the ledger is full or not open. */
int ledger_device(const char *uuid);
/* Compares the container's total with the limit and charges, as one step for all processes of the container. */
enum charge ledger_charge(int device, enum account account, uint64_t bytes, uint64_t limit);
void ledger_uncharge(int device, enum account account, uint64_t bytes);
/* Returns what this process is charged. */
uint64_t ledger_own(int device, enum account account);
/* Reads the bytes of the container's live processes, contexts included. Claims no slot, so nvidia-smi does not get
 * one. */
bool ledger_total(const char *uuid, uint64_t *bytes);
/*
 * Lists the container's live processes that use memory of the device, with pids of this process's pid namespace. Writes
 * at most `room` entries and returns the number of processes; -1 without a ledger.
 */
struct ledger_process {
    uint32_t pid;
    uint64_t bytes; /* contexts included */
};
int ledger_processes(const char *uuid, struct ledger_process *list, int room);
/* Reads what this process (*own) and all live processes (*total) are charged of a share's part of the device.
 * *largest: no process is charged more; among equals the lowest slot counts. Returns false if this process is
 * charged nothing or nothing is known. */
bool ledger_shares(unsigned share, const char *uuid, uint64_t *own, uint64_t *total, bool *largest);
/* Returns true if /proc shows this process's own pid namespace. Otherwise its entries are other processes. */
bool ledger_proc_is_ours(void);
/* Bytes that the driver was last seen to count in addition to the ledger, where the driver enforces a limit itself. */
uint64_t ledger_beyond(const char *uuid);
void ledger_beyond_is(int device, uint64_t bytes);
/* Bytes that one context costs on this device; 0: not measured yet. */
uint64_t ledger_context_bytes(int device);
void ledger_learn_context(int device, uint64_t bytes);
/* Only one process of the container measures at a time. The kernel drops the lock when its holder dies. Returns a
 * handle, or -1. */
int ledger_measure_begin(int device);
void ledger_measure_end(int handle, int device);
/* Adds to (or subtracts from) the memory of the device that other processes may have open. */
void ledger_export(int device, uint64_t bytes, bool more);
/* Returns true if any process holds this byte of the open handles (0: any of these bytes), or if that is unknown. */
bool ledger_import_open(uint64_t byte);
/* Returns true if a process of this container made the handle of this byte. Returns false if that is unknown. */
bool ledger_made_here(uint64_t byte);
/* Holds a byte until ledger_import_end or until this process ends. Returns NULL if the ledger cannot be opened. */
void *ledger_import(uint64_t byte);
void ledger_import_end(void *import);
/* Called around fork(), so that no thread joins the ledger meanwhile. */
void ledger_hold(void);
void ledger_release(void);
void ledger_reset(void);

/* --- blocks.c: what each pointer and handle was charged ---------------------------------------------- */

struct block {
    uint64_t key;
    uint64_t bytes;
    uint64_t owner; /* the context, pool or object that the block belongs to */
    int32_t device;
    int32_t kind;
};
struct block_map;
extern struct block_map vgpu_memory, vgpu_arrays, vgpu_contexts, vgpu_handles, vgpu_mappings, vgpu_graphs,
    vgpu_exported, vgpu_imported, vgpu_greens;
/* The functions that store a block return false if there is no memory for the table. */
bool block_put(struct block_map *map, const struct block *block);
bool block_swap(struct block_map *map, const struct block *block, struct block *former); /* former->kind 0: there was none */
bool block_take(struct block_map *map, uint64_t key, struct block *block); /* removes */
bool block_get(struct block_map *map, uint64_t key, struct block *block);
/* Removes every block for which `match` answers true. */
void block_sweep(struct block_map *map, bool (*match)(const struct block *block, void *data), void *data);
void blocks_reset(void);

/* --- device.c ----------------------------------------------------------------------------------------- */

struct device {
    char uuid[VGPU_UUID_SIZE];
    int ledger;     /* ledger_device() */
    int nvml_index; /* -1 where nobody needs it */
    struct counters *counters;
};
/* The device of a CUDA ordinal; NULL: the driver does not know it (*status says how) or the ledger has no room. */
const struct device *device_of(CUdevice device, CUresult *status);
/* The device that memory at a location is on. NULL and CUDA_SUCCESS: the host's own. A node of the host that is no GPU's of this
 * container and has no processors may be another's: that is refused. */
/* A card's memory, or that of a part of one. */
bool location_on_card(const CUmemLocation *location, CUdevice *ordinal);
const struct device *device_at(const CUmemLocation *location, CUresult *status);
/* The place of a GPU in NVML's order, of a MIG device that of its GPU (its own counts within that one); -1 */
int nvml_gpu_index(nvmlDevice_t handle, const char *uuid);
/* A device by its index in the ledger; NULL: none of this process. */
const struct device *device_in_ledger(int index);
/* The context that this thread used last and its device; good as long as no context was made or ended since, and never
 * while there is none: no epoch is 0. */
extern __thread struct used_last {
    CUcontext context;
    const struct device *device;
    uint32_t epoch;
} device_last __attribute__((tls_model("initial-exec")));
extern _Atomic uint32_t device_epoch;
/* The device of the thread's current context; *context gets the context. The driver is asked each time: it may change by
 * ways that are not hooked. */
const struct device *device_current(CUcontext *context, CUresult *status);
/* The same for an allocation: NULL also where the context may have no memory. */
const struct device *device_to_allocate(CUcontext *context, CUresult *status);
/* The same where that is known without asking further; else false. */
static inline bool device_known(CUcontext *context, const struct device **device)
{
    *context = NULL;
    bool same = REAL(cuCtxGetCurrent)(context) == CUDA_SUCCESS && *context == device_last.context &&
                device_last.epoch == atomic_load_explicit(&device_epoch, memory_order_acquire);
    *device = device_last.device;
    return __builtin_expect(same, 1);
}
/* A context was made or is gone: its address may mean another device from now on. */
void device_forget_contexts(void);
uint64_t device_limit_asked(const struct device *device, bool *known);
static inline uint64_t cached_memory(const struct cached_limits *cached, const struct device *device)
{
    return __atomic_load_n(&cached->memory[device->ledger], __ATOMIC_RELAXED);
}
static inline uint64_t device_limit(const struct device *device, bool *known)
{
    const struct cached_limits *cached = atomic_load_explicit(&vgpu_cached_limits, memory_order_acquire);
    uint64_t bytes = cached ? cached_memory(cached, device) : 0;
    *known = true;
    return bytes ? bytes : device_limit_asked(device, known);
}
struct leaving;
void devices_context_left(struct leaving *leaving);
void devices_reset(void);

/* --- charge.c: charge around a call of the driver ------------------------------------------------------ */

enum block_kind { BLOCK_PLAIN = 1, BLOCK_POOL, BLOCK_EXPORTED /* plain, and others may have it open */, BLOCK_HOST };
/* Charges bytes to the device, or answers the error that the caller gets. Asks own pools to give back first. */
CUresult memory_charge(const struct device *device, enum account account, uint64_t bytes);
/*
 * Where the driver enforces the container's limit too it may count more than the ledger does: room of the ledger that is not
 * among the free bytes that the driver shows is kept, and shown as used. After what was asked for is uncharged.
 */
void memory_beyond(const struct device *device, uint64_t unused);
void memory_refused(const struct device *device, CUresult status); /* what the driver answered; its free bytes are asked for */
/* Into the table; where there is no memory for that the charge stays until exit, and a line says so. */
void memory_put(struct block_map *map, const struct block *block, uint64_t bytes);
void memory_lost(uint64_t bytes); /* that line */
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

/* --- oom.c ------------------------------------------------------------------------------------------------ */

/* Ends this process if the container is over a limit and nobody holds more. True: over, and this is not the one. */
bool oom_check(void);

/* --- host_memory.c: device memory that is not on the card (S above 1) ------------------------------------ */

/* Is oversubscription on and the card too full for so many bytes? A context is current. */
bool host_memory_wanted(const struct device *device, uint64_t bytes);
/* As much unified memory that lives in host memory; the caller has charged it and keeps it as BLOCK_HOST. */
CUresult host_memory_take(const struct device *device, CUdeviceptr *pointer, uint64_t bytes);
/* The same for physical memory of virtual addresses, of the device that the properties name. Handles of it are for this process
 * alone. */
bool host_memory_physical_wanted(const struct device *device, const CUmemAllocationProp *properties, uint64_t bytes);
CUresult host_memory_create(const struct device *device, CUmemGenericAllocationHandle *handle, uint64_t bytes,
                            const CUmemAllocationProp *properties);
bool host_memory_complete(void); /* does this driver make physical memory of the host's? A context is current */
void host_memory_freed(int device, uint64_t bytes);
uint64_t host_memory_held(int device); /* by this process: charged as used, and not on the card */
void host_memory_reset(void);

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
uint64_t shareable_import_byte(uint64_t object);
/* Does this descriptor carry the mark of a container, whichever? */
bool shareable_marked(int descriptor);
/* Of a descriptor; -1: a handle of another kind, which is never marked. */
enum shareable_origin shareable_origin(int descriptor, uint64_t *object);

#pragma GCC visibility pop

#endif
