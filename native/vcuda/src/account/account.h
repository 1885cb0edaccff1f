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
/* Reads the bytes of the container's live processes, contexts included. The calling process does not claim a slot, so
 * nvidia-smi does not count as a process of the container. */
bool ledger_total(const char *uuid, uint64_t *bytes);
/*
 * Lists the container's live processes that use memory of the device, with pids of this process's pid namespace. Writes
 * at most `room` entries and returns the number of processes; -1 without a ledger.
 */
struct ledger_process {
    uint32_t pid;
    uint64_t bytes; /* Bytes of allocations and contexts. */
};
int ledger_processes(const char *uuid, struct ledger_process *list, int room);
/* Reads how many bytes of a device are charged in one share: to this process (*own) and to all live processes (*total).
 * *largest is true if no process is charged more; among equal processes it is true for the lowest slot. Returns false
 * if this process is charged nothing or nothing is known. */
bool ledger_shares(unsigned share, const char *uuid, uint64_t *own, uint64_t *total, bool *largest);
/* Returns true if /proc shows this process's own pid namespace. Otherwise its entries are other processes. */
bool ledger_proc_is_ours(void);
/* Returns the bytes that, at the last query, the driver counted in addition to the ledger. They exist only where the
 * driver enforces a limit itself. */
uint64_t ledger_beyond(const char *uuid);
void ledger_beyond_is(int device, uint64_t bytes);
/* Returns the bytes that one context costs on this device; 0: not measured yet. */
uint64_t ledger_context_bytes(int device);
void ledger_learn_context(int device, uint64_t bytes);
/* Only one process of the container measures at a time. The kernel drops the lock when its holder dies. Returns a
 * handle, or -1. */
int ledger_measure_begin(int device);
void ledger_measure_end(int handle, int device);
/* Adds to (or subtracts from) the memory of the device that other processes may have open. */
void ledger_export(int device, uint64_t bytes, bool more);
/* Returns true if any process has a lock on this byte of the open handles (0: on any of these bytes), or if that is
 * unknown. */
bool ledger_import_open(uint64_t byte);
/* Returns true if a process of this container made the handle of this byte. Returns false if that is unknown. */
bool ledger_made_here(uint64_t byte);
/* Locks a byte until ledger_import_end or until this process ends. Returns NULL if the ledger cannot be opened. */
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
    uint64_t owner; /* The context, pool or object to which the block belongs. */
    int32_t device;
    int32_t kind;
};
struct block_map;
extern struct block_map vgpu_memory, vgpu_arrays, vgpu_contexts, vgpu_handles, vgpu_mappings, vgpu_graphs,
    vgpu_exported, vgpu_imported, vgpu_greens;
/* The functions that store a block return false if there is no memory for the table. */
bool block_put(struct block_map *map, const struct block *block);
/* Stores the block in place of a block with the same key, which is returned in *former (kind 0: no such block). */
bool block_swap(struct block_map *map, const struct block *block, struct block *former);
/* Removes the block with this key and copies it to *block. */
bool block_take(struct block_map *map, uint64_t key, struct block *block);
bool block_get(struct block_map *map, uint64_t key, struct block *block);
/* Removes every block for which `match` returns true. */
void block_sweep(struct block_map *map, bool (*match)(const struct block *block, void *data), void *data);
void blocks_reset(void);

/* --- device.c ----------------------------------------------------------------------------------------- */

struct device {
    char uuid[VGPU_UUID_SIZE];
    int ledger; /* ledger: the value that ledger_device() returned. */
    /* nvml_index is -1 if no limit needs the index in NVML's order. */
    int nvml_index;
    struct counters *counters;
};
/* Returns the device of a CUDA ordinal. NULL: the driver does not know the ordinal (*status is its error) or the
 * ledger is full. */
const struct device *device_of(CUdevice device, CUresult *status);
/* Both functions below map a memory location to a device. device_at returns NULL with CUDA_SUCCESS for host memory.
 * A host node that has no processors and belongs to no GPU of this container may be another container's GPU, so it
 * is refused. */
/* Returns true if the location is a card's memory or a locality domain of a card. */
bool location_on_card(const CUmemLocation *location, CUdevice *ordinal);
const struct device *device_at(const CUmemLocation *location, CUresult *status);
/* Returns a GPU's index in NVML's order; for a MIG device the index of its GPU. -1: unknown. */
int nvml_gpu_index(nvmlDevice_t handle, const char *uuid);
/* Returns a device by its index in the ledger. NULL: this process has not used that device. */
const struct device *device_in_ledger(int index);
/* The context that this thread used last, and its device. Valid only while `epoch` equals device_epoch, that is
 * while no context was created or destroyed since. Epoch 0 is never valid. */
extern __thread struct used_last {
    CUcontext context;
    const struct device *device;
    uint32_t epoch;
} device_last __attribute__((tls_model("initial-exec")));
extern _Atomic uint32_t device_epoch;
/* Returns the device of the thread's current context, and the context in *context. Asks the driver each time,
 * because calls without a hook can change the current context. */
const struct device *device_current(CUcontext *context, CUresult *status);
/* Does the same for an allocation: returns NULL also if the context may not allocate. */
const struct device *device_to_allocate(CUcontext *context, CUresult *status);
/* Returns true if the current context is the one that this thread used last; then *device is its device. */
static inline bool device_known(CUcontext *context, const struct device **device)
{
    *context = NULL;
    bool same = REAL(cuCtxGetCurrent)(context) == CUDA_SUCCESS && *context == device_last.context &&
                device_last.epoch == atomic_load_explicit(&device_epoch, memory_order_acquire);
    *device = device_last.device;
    return __builtin_expect(same, 1);
}
/* Call after a context was created or destroyed: a context address may belong to another device from now on. */
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

/* Kinds of a stored block of memory. BLOCK_EXPORTED is plain memory that other processes may have open. */
enum block_kind { BLOCK_PLAIN = 1, BLOCK_POOL, BLOCK_EXPORTED, BLOCK_HOST };
/* Charges bytes to the device, or returns the error for the caller. If the limit is reached, first asks this
 * process's pools to release memory. */
CUresult memory_charge(const struct device *device, enum account account, uint64_t bytes);
/*
 * Where the driver also enforces the container's limit, it may count more bytes than the ledger. This function records
 * the bytes that are free in the ledger but not for the driver, so that they are shown as used. Call it after the
 * failed request was uncharged.
 */
void memory_beyond(const struct device *device, uint64_t unused);
void memory_refused(const struct device *device, CUresult status); /* status is the driver's return value. */
/* memory_put stores the block in the table. Without memory for the table the charge stays until exit, and a line on
 * stderr reports that. */
void memory_put(struct block_map *map, const struct block *block, uint64_t bytes);
/* Writes the line on stderr about bytes that stay charged until exit. */
void memory_lost(uint64_t bytes);
void memory_keep(struct block_map *map, uint64_t key, uint64_t bytes, const struct device *device, int kind, uint64_t owner);
/* Returns the device and context for a hook that allocates in the current context. NULL: *status is the caller's
 * error. */
const struct device *memory_target(enum control control, CUcontext *context, CUresult *status);
/* For a hook that allocates outside the current context: charges the current context if no hook saw its creation. */
CUresult memory_meet(void);
/* Reports on stderr a kind of memory that cannot be charged exactly. Returns CUDA_ERROR_NOT_SUPPORTED. */
CUresult memory_refuse(const char *what);
CUresult memory_broken(void);
/*
 * The steps of a hook that allocates in the current context. The thread is in flight from the first function that
 * returns CUDA_SUCCESS until allocation_end, which must then be called whatever the driver returns.
 */
struct allocation {
    const struct device *device;
    CUcontext context;
    uint64_t bytes; /* Bytes charged so far. */

    int kind; /* A value of enum block_kind for the stored block. */
};
/* The first step of a hook that does not know the bytes yet; charges nothing. */
CUresult allocation_target(enum control control, struct allocation *allocation);
CUresult allocation_begin(enum control control, struct allocation *allocation, uint64_t bytes);
/* Changes the charge to `bytes`. On error the charge is unchanged. */
CUresult allocation_resize(struct allocation *allocation, uint64_t bytes);
/* Stores the block in the table under the key (map NULL: the caller stores it), or uncharges it if the driver
 * failed. */
CUresult allocation_end(struct allocation *allocation, CUresult status, struct block_map *map, uint64_t key);

/* --- oom.c ------------------------------------------------------------------------------------------------ */

/* Kills this process if the container is over a limit and no process is charged more. Returns true if the container
 * is over a limit but another process is charged more. */
bool oom_check(void);

/* --- host_memory.c: device memory in host memory (oversubscription) --------------------------------------- */

/* Returns true if oversubscription is on and the card is too full for so many bytes. Needs a current context. */
bool host_memory_wanted(const struct device *device, uint64_t bytes);
/* Allocates unified memory that stays in host memory. The caller has charged it and stores it as BLOCK_HOST. */
CUresult host_memory_take(const struct device *device, CUdeviceptr *pointer, uint64_t bytes);
/* These two functions do the same for cuMemCreate on the device that the properties name. Only this process can use
 * handles of such memory. */
bool host_memory_physical_wanted(const struct device *device, const CUmemAllocationProp *properties, uint64_t bytes);
CUresult host_memory_create(const struct device *device, CUmemGenericAllocationHandle *handle, uint64_t bytes,
                            const CUmemAllocationProp *properties);
/* Returns true if this driver can create physical host memory. Needs a current context. */
bool host_memory_complete(void);
void host_memory_freed(int device, uint64_t bytes);
/* Returns the bytes of this process that are charged to the device but lie in host memory. */
uint64_t host_memory_held(int device);
void host_memory_reset(void);

/* --- shareable.c ------------------------------------------------------------------------------------------- */

/* Marks a descriptor that the driver has just created for an object. *object 0: assigns a new object. Returns false
 * if the mark failed, so that it cannot be detected how long the descriptor keeps memory alive. */
bool shareable_mark(int descriptor, uint64_t *object);
/* Records that this process has created a handle that cannot be marked. */
void shareable_unmarked(void);
/* Returns true if any process has a descriptor of the object open, or if that is unknown. */
bool shareable_open(uint64_t object);
enum shareable_origin {
    SHAREABLE_UNKNOWN, /* UNKNOWN: this container has unmarked handles, and the descriptor may be one of them. */
    SHAREABLE_OURS,    /* OURS: a process of this container created the handle and is charged for it. */
    SHAREABLE_FOREIGN,
};
/* Returns the ledger byte for imports of an object. For object 0 returns the byte for imports of an unknown object. */
uint64_t shareable_import_byte(uint64_t object);
/* Returns true if the descriptor carries the mark of any container. */
bool shareable_marked(int descriptor);
/* Returns whether this container created the descriptor's handle. Pass -1 for a handle that is no descriptor: it is
 * never marked. */
enum shareable_origin shareable_origin(int descriptor, uint64_t *object);

#pragma GCC visibility pop

#endif
