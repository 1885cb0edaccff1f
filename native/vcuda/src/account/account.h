/* SPDX-License-Identifier: Apache-2.0 */
/* The account of device memory: how many bytes of each device are charged to this container and to this process. The
 * charges are kept in the ledger, a file that all processes of the container map, with one slot for each process. A
 * container may have several allocations of GPUs. Each of them is called a share and has its own ledger. A hook is this
 * library's replacement of a driver function. counters.h has the fast path of a charge. */
#ifndef VGPU_ACCOUNT_H
#define VGPU_ACCOUNT_H

#include "counters.h"
#include "driver/real.h"
#include "limits/limits.h"

#pragma GCC visibility push(hidden)

/* --- ledger.c: the container's account -------------------------------------------------------------- */

enum charge { CHARGE_OK, CHARGE_FULL, CHARGE_BROKEN };

/* Opens the ledger and claims a slot for this process. Returns false after writing a line to stderr if no slot is
 * available. */
bool ledger_join(void);
/* Returns the index by which this process knows a device; adds a device that is new. In most containers the index
 * equals the device's index in the ledger. -1: the ledger is full or not open. */
int ledger_device(const char *uuid);
/* Charges the bytes to this process if the container's total then stays within the limit. Checking and charging are one
 * step for all processes of the container. */
enum charge ledger_charge(int device, enum account account, uint64_t bytes, uint64_t limit);
void ledger_uncharge(int device, enum account account, uint64_t bytes);
/* Returns the bytes that this process is charged. */
uint64_t ledger_own(int device, enum account account);
/* Reads the bytes that all live processes of the container are charged, contexts included. Claims no slot for the
 * calling process, so nvidia-smi does not count as a process of the container. */
bool ledger_total(const char *uuid, uint64_t *bytes);
/*
 * Lists the container's live processes that use memory of the device, with pids of this process's pid namespace. Writes
 * at most `room` entries and returns the number of processes; -1 if the ledger cannot be read.
 */
struct ledger_process {
    uint32_t pid;
    uint64_t bytes; /* Bytes that the process is charged for allocations and contexts. */
};
int ledger_processes(const char *uuid, struct ledger_process *list, int room);
/* Reads the charges for a device in the ledger of one share. *own is what this process is charged there, *total is the
 * sum of all live processes. *largest is true if this process is charged the most; if several are charged equally much,
 * it is true only for the one with the lowest slot. Returns false if this process is charged nothing or the ledger
 * cannot be read. */
bool ledger_shares(unsigned share, const char *uuid, uint64_t *own, uint64_t *total, bool *largest);
/* Returns true if /proc belongs to this process's pid namespace. If it does not, a pid of this process's namespace
 * means another process in /proc. */
bool ledger_proc_is_ours(void);
/* Returns how many bytes the driver counted in addition to the ledger when the two were last compared. Only a driver
 * that enforces the container's limit itself can make this more than 0. */
uint64_t ledger_beyond(const char *uuid);
void ledger_beyond_is(int device, uint64_t bytes);
/* Returns the bytes that one context costs on this device; 0: no process of the container has measured that yet. */
uint64_t ledger_context_bytes(int device);
void ledger_learn_context(int device, uint64_t bytes);
/* Takes the lock under which a process measures the cost of a context. Only one process of the container may measure at
 * a time. The kernel releases the lock when its holder dies. Returns a handle for ledger_measure_end, or -1 if the lock
 * was not obtained. */
int ledger_measure_begin(int device);
void ledger_measure_end(int handle, int device);
/* Changes the recorded number of this process's bytes that other processes may have open: adds `bytes`, or subtracts
 * them if `more` is false. */
void ledger_export(int device, uint64_t bytes, bool more);
/* Locks on bytes of the ledger file show whether shared memory is open: each handle that is shared between processes
 * has a byte, and a process that opens the handle locks this byte. Returns true if any process has a lock on `byte`, or
 * if that is unknown. If `byte` is 0, returns true if any process has a lock on the byte of any handle. */
bool ledger_import_open(uint64_t byte);
/* Returns true if the lock on this byte shows that a process of this container created the handle. Returns false if
 * that is unknown. */
bool ledger_made_here(uint64_t byte);
/* Locks a byte until ledger_import_end or until this process ends. Returns NULL if the ledger cannot be opened or
 * locked. */
void *ledger_import(uint64_t byte);
void ledger_import_end(void *import);
/* ledger_hold and ledger_release are called around fork(), so that no other thread joins the ledger meanwhile.
 * ledger_reset is called in the child. */
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
/* Stores a block (what one pointer or handle was charged). This function and block_swap return false if there is no
 * host memory for the table. */
bool block_put(struct block_map *map, const struct block *block);
/* Stores the block, and copies the block that had the same key before to *former. If there was none, sets the kind of
 * *former to 0. */
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
    int ledger; /* ledger: index that ledger_device() returned. */
    /* nvml_index: index of the GPU in NVML's order; -1 if no limit needs it. */
    int nvml_index;
    struct counters *counters;
};
/* Returns the device of a CUDA ordinal. NULL: the driver does not know the ordinal (*status is the driver's error) or
 * the ledger is full. */
const struct device *device_of(CUdevice device, CUresult *status);
/* location_on_card and device_at find the device of a memory location. For host memory device_at returns NULL with
 * CUDA_SUCCESS. A NUMA node of the host that has no processors and belongs to no GPU of this container may be the
 * memory of another container's GPU. For such a node device_at returns NULL with an error. */
/* Returns true if the location is a GPU's memory or one of its locality domains (parts of the memory). */
bool location_on_card(const CUmemLocation *location, CUdevice *ordinal);
const struct device *device_at(const CUmemLocation *location, CUresult *status);
/* Returns a GPU's index in NVML's order; for a MIG device the index of its GPU. -1: unknown. */
int nvml_gpu_index(nvmlDevice_t handle, const char *uuid);
/* Returns a device by its index in the ledger. NULL: this process has not used that device. */
const struct device *device_in_ledger(int index);
/* The context that this thread used last, and its device. Valid only while `epoch` equals device_epoch, that is as long
 * as no context was created or destroyed since. Epoch 0 is never valid. */
extern __thread struct used_last {
    CUcontext context;
    const struct device *device;
    uint32_t epoch;
} device_last __attribute__((tls_model("initial-exec")));
extern _Atomic uint32_t device_epoch;
/* Returns the device of the thread's current context, and the context in *context. Asks the driver each time, because
 * driver functions without a hook can change the current context. */
const struct device *device_current(CUcontext *context, CUresult *status);
/* Like device_current, but for a hook that allocates: if the context may not allocate memory, it returns NULL too. */
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
/* Must be called after a context was created or destroyed, because the address of a destroyed context may be used again
 * for a context of another device. */
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

/* Kinds of a stored block of memory: PLAIN is an ordinary allocation, POOL is from a memory pool, EXPORTED is an
 * ordinary allocation that other processes may have open, HOST is device memory that lies in host memory. */
enum block_kind { BLOCK_PLAIN = 1, BLOCK_POOL, BLOCK_EXPORTED, BLOCK_HOST };
/* Charges bytes to the device, or returns the error for the caller. If the limit is reached, first makes this process's
 * memory pools release unused memory and tries again. */
CUresult memory_charge(const struct device *device, enum account account, uint64_t bytes);
/*
 * Some drivers enforce the container's limit themselves and may count more bytes than the ledger. This function records
 * in the ledger how many bytes are free by the ledger but not by the driver, so that NVML hooks show these bytes as
 * used. `unused` is the driver's free memory. Call the function after the failed request was uncharged.
 */
void memory_beyond(const struct device *device, uint64_t unused);
/* Calls memory_beyond if the driver refused memory. status: the driver's return value. */
void memory_refused(const struct device *device, CUresult status);
/* Stores the block in the table. If there is no host memory for the table, the charge stays until exit, and a line on
 * stderr reports that. */
void memory_put(struct block_map *map, const struct block *block, uint64_t bytes);
/* Reports on stderr that bytes stay charged until this process exits. */
void memory_lost(uint64_t bytes);
void memory_keep(struct block_map *map, uint64_t key, uint64_t bytes, const struct device *device, int kind, uint64_t owner);
/* Returns the device and context for a hook that allocates in the current context. NULL: the hook must return
 * *status. */
const struct device *memory_target(enum control control, CUcontext *context, CUresult *status);
/* For a hook that allocates outside the current context. If no hook saw the creation of the current context, it is
 * charged now. Returns an error if the context may not allocate. */
CUresult memory_meet(void);
/* Refuses a kind of memory that cannot be charged exactly: reports it on stderr and returns
 * CUDA_ERROR_NOT_SUPPORTED. */
CUresult memory_refuse(const char *what);
CUresult memory_broken(void);
/*
 * The steps of a hook that allocates in the current context. A hook that knows the size begins with allocation_begin,
 * which charges it. A hook that does not know the size yet begins with allocation_target, which charges nothing. If
 * this first step returns CUDA_SUCCESS, the thread is in flight: until the driver returns, the charge and the driver's
 * figure may differ. The flight lasts until allocation_end, which must be called whatever the driver returns.
 */
struct allocation {
    const struct device *device;
    CUcontext context;
    uint64_t bytes; /* Bytes charged so far. */

    int kind; /* Kind of the block to store (enum block_kind). */
};
CUresult allocation_target(enum control control, struct allocation *allocation);
CUresult allocation_begin(enum control control, struct allocation *allocation, uint64_t bytes);
/* Changes the charge to `bytes`. On error the charge is unchanged. */
CUresult allocation_resize(struct allocation *allocation, uint64_t bytes);
/* If the driver succeeded, stores the block in the table under the key (if map is NULL, the caller stores it).
 * Otherwise uncharges the bytes. Ends the flight. */
CUresult allocation_end(struct allocation *allocation, CUresult status, struct block_map *map, uint64_t key);

/* --- oom.c ------------------------------------------------------------------------------------------------ */

/* Applies the setting ACTIVE_OOM_KILLER: if the container is over a limit and this process is charged the most, kills
 * this process. Returns true if the container is over a limit but another process is charged more. */
bool oom_check(void);

/* --- host_memory.c: device memory in host memory (oversubscription) --------------------------------------- */

/* Returns true if the limits allow oversubscription and the card does not have `bytes` free. Needs a current
 * context. */
bool host_memory_wanted(const struct device *device, uint64_t bytes);
/* Allocates unified memory that stays in host memory. The caller has charged it before and stores the block as
 * BLOCK_HOST. */
CUresult host_memory_take(const struct device *device, CUdeviceptr *pointer, uint64_t bytes);
/* host_memory_physical_wanted and host_memory_create do the same for cuMemCreate, on the device that the properties
 * name. Other processes cannot open such memory. */
bool host_memory_physical_wanted(const struct device *device, const CUmemAllocationProp *properties, uint64_t bytes);
CUresult host_memory_create(const struct device *device, CUmemGenericAllocationHandle *handle, uint64_t bytes,
                            const CUmemAllocationProp *properties);
/* Returns true if this driver can create physical memory on the host. Needs a current context. */
bool host_memory_complete(void);
void host_memory_freed(int device, uint64_t bytes);
/* Returns how many bytes of this process are charged to the device but lie in host memory. */
uint64_t host_memory_held(int device);
void host_memory_reset(void);

/* --- shareable.c: which handles to device memory other processes have open --------------------------------- */

/* Marks a file descriptor that the driver has just created as a shareable handle. By the mark (a lock on the
 * descriptor's file) any process can see whether the descriptor is still open. *object is the number of the memory
 * object; 0 assigns a new number. Returns false if the mark failed. Then no process can see how long the descriptor
 * keeps the memory alive. */
bool shareable_mark(int descriptor, uint64_t *object);
/* Records in the ledger that this process has created a handle that cannot be marked. */
void shareable_unmarked(void);
/* Returns true if any process has a descriptor of the object open, or if that is unknown. */
bool shareable_open(uint64_t object);
/* Records, for each device, how many bytes of this process's charge it has released while they are open elsewhere. NVML
 * does not show these bytes for this process. They are recorded before memory that was closed is uncharged, so that
 * shareable_released() is never more than the charge that was read before. */
void shareable_release(const uint64_t bytes[VGPU_MAX_DEVICES]);
uint64_t shareable_released(int device);
void shareable_reset(void);
enum shareable_origin {
    /* UNKNOWN: the handle's mark cannot be checked. This container has created handles, so the handle may be one of
     * them. */
    SHAREABLE_UNKNOWN,
    SHAREABLE_OURS,    /* OURS: a process of this container created the handle and is charged for it. */
    /* FOREIGN: another container created the handle. */
    SHAREABLE_FOREIGN,
};
/* Returns the byte of the ledger that a process locks as long as it has an import of the object. For object 0 returns
 * the byte that is locked for imports of an unknown object. */
uint64_t shareable_import_byte(uint64_t object);
/* Returns true if the descriptor carries the mark of any container. */
bool shareable_marked(int descriptor);
/* Returns which container created the handle, and the number of its object in *object (0: unknown). Pass -1 for a
 * handle that is not a descriptor, because such a handle is never marked. */
enum shareable_origin shareable_origin(int descriptor, uint64_t *object);

#pragma GCC visibility pop

#endif
