/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Internal interfaces of libvgpu.so, grouped by the file that implements them.
 *
 * Rules of the house: nothing runs before the first CUDA or NVML call of the process (no constructors); the host
 * program's umask, signals, descriptors and exit are left alone; a failure of ours is an error code of the driver and
 * one line on stderr, never an abort.
 */
#ifndef VGPU_H
#define VGPU_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "account.h"
#include "cuda_abi.h"
#include "vgpu_abi.h"

#define EXPORT __attribute__((visibility("default")))
/* Everything else is this library's alone: calls and variables without the detour that another library could take over. */
#pragma GCC visibility push(hidden)
#define MIB (1024ull * 1024ull)

/* --- log.c: lines on stderr, and the lock of threads ------------------------------------------------ */

enum log_level { LOG_ERROR, LOG_WARN, LOG_INFO, LOG_CALLS, LOG_DEBUG, LOG_TRACE };
extern _Atomic int vgpu_log_level;
#define vgpu_log(level, ...) \
    do { \
        if ((int)(level) <= atomic_load_explicit(&vgpu_log_level, memory_order_relaxed)) \
            vgpu_log_line(level, __VA_ARGS__); \
    } while (0)
void vgpu_log_line(enum log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* True once for each place (and once more each time `count` doubles): a loop must not flood stderr. */
bool vgpu_log_again(_Atomic unsigned *count);

/* A futex lock: no pthread symbols of a new glibc, and a forked child may simply zero it. */
struct lock {
    _Atomic uint32_t word;
};
void lock_wait(struct lock *lock);
void lock_wake(struct lock *lock);
/* 0 free, 1 held, 2 held and somebody sleeps. */
static inline bool lock_try(struct lock *lock)
{
    uint32_t expected = 0;
    return atomic_compare_exchange_strong_explicit(&lock->word, &expected, 1, memory_order_acquire, memory_order_relaxed);
}
static inline void lock_take(struct lock *lock)
{
    if (__builtin_expect(!lock_try(lock), 0))
        lock_wait(lock);
}
static inline void lock_drop(struct lock *lock)
{
    if (__builtin_expect(atomic_exchange_explicit(&lock->word, 0, memory_order_release) == 2, 0))
        lock_wake(lock);
}

/* --- elf.c: what is loaded, read from memory -------------------------------------------------------- */

struct object {
    uintptr_t base, low, high;
    const char *soname; /* or "" */
    const char *path;
    const void *symbols, *hash, *gnu_hash;
    const char *strings;
};
/* Calls `visit` for every object in load order until it answers non-zero, and answers that. */
int object_each(int (*visit)(const struct object *object, void *data), void *data);
bool object_with_soname(const char *soname, struct object *found);
bool object_at(const void *address, struct object *found);
void *object_symbol(const struct object *object, const char *name);
bool object_exports(const struct object *object, const void *address); /* as a function, under any name */

/* --- driver.c: the real functions ------------------------------------------------------------------- */

enum function {
#define HOOK(symbol, name, since, stream, result, parameters) F_##symbol,
#define NVML(symbol, result, parameters) F_##symbol,
#include "hooks.def"
#undef HOOK
#undef NVML
    HOOK_COUNT,
    CALL_FIRST = HOOK_COUNT - 1,
#define CALL(symbol, result, parameters) F_##symbol,
#define CALL_NVML(symbol, result, parameters) F_##symbol,
#include "calls.def"
#undef CALL
#undef CALL_NVML
    FUNCTION_COUNT
};
#define HOOK(symbol, name, since, stream, result, parameters) EXPORT result symbol parameters;
#define NVML(symbol, result, parameters) EXPORT result symbol parameters;
#include "hooks.def"
#undef HOOK
#undef NVML
#define CALL(symbol, result, parameters) result symbol parameters;
#define CALL_NVML(symbol, result, parameters) result symbol parameters;
#include "calls.def"
#undef CALL
#undef CALL_NVML

extern void *vgpu_real[FUNCTION_COUNT];
/* The driver's own function; only after driver_ready() or nvml_ready(), and only where REAL_HAS. */
#define REAL(symbol) ((__typeof__(&symbol))vgpu_real[F_##symbol])
#define REAL_HAS(symbol) (vgpu_real[F_##symbol] != NULL)

struct hook {
    const char *symbol, *name;
    int since, stream;
    bool nvml;
    void *ours;
};
extern const struct hook vgpu_hooks[HOOK_COUNT];
const struct hook *hook_find(const char *symbol);

bool driver_ready(void); /* libcuda.so.1 is loaded; never loads it */
bool nvml_ready(void);   /* libnvidia-ml.so.1 is loaded; never loads it */
void driver_reset(void);
bool nvml_load(void);    /* loads and initialises NVML for the library's own questions */

/* --- route.c ---------------------------------------------------------------------------------------- */

void *real_dlsym(void *handle, const char *name);
void *real_dlopen(const char *path, int flags);
bool is_driver(const struct object *object); /* libcuda.so.1 or libnvidia-ml.so.1, under any path */

/* --- limits.c: limits file and environment ---------------------------------------------------------- */

enum control {
    CONTROL_OFF,   /* no limits file and no variable: the library is not there */
    CONTROL_ON,    /* limits hold */
    CONTROL_BROKEN /* limits should hold and cannot be read: no context */
};
/* The last limits that were read. While *sequence_at holds that sequence nothing has changed. */
struct standing {
    enum control control;
    uint32_t sequence;
    const uint32_t *sequence_at;
    bool oversubscribe;
    bool plain; /* limits hold, memory comes from the card alone, calls are not told: an allocation may take the short way */
    /* What limits_memory answers, kept by the device's index in the ledger once it was asked; 0: ask. */
    uint64_t memory[VGPU_MAX_DEVICES];
};
extern _Atomic(struct standing *) vgpu_standing; /* NULL: none could be read yet */
/* The state now: looks at the file's sequence, reads it again when it changed. No system call while it did not. */
enum control limits_control(void);
/* The sequence word of the mapped limits file; a word that stays 0 where there is none. */
extern const uint32_t *vgpu_limits_sequence;
/* Why contexts fail: one line naming the file. */
void limits_complain(void);
bool limits_denied(void); /* looks at the file again */
bool limits_count_context(void);
/* Bytes that the container may use of this device; UINT64_MAX: no limit; *known false: not among its devices.
 * nvml_index is asked only where the environment rules; -1: not known. */
uint64_t limits_memory(const char *uuid, int nvml_index, bool *known);
/*
 * Percent of SM time, 1 to 99; 0: no limit. This and the four below are two loads and answer from the last look at the
 * file: every hook takes one on its way in, a thread of our own must call limits_control() to see a live change.
 */
unsigned limits_sm_percent(const char *uuid, int nvml_index);
bool limits_sm_lowered(const char *uuid, int nvml_index); /* by the environment, below the limits file */
enum vgpu_core_policy limits_core_policy(void);
int limits_priority(void); /* 0 high, 1 low */
bool limits_oom_killer(void);
static inline bool limits_oversubscribe(void)
{
    const struct standing *standing = atomic_load_explicit(&vgpu_standing, memory_order_acquire);
    return standing && standing->oversubscribe;
}
/* UUIDs of the limits file in its order; 0 where there is none. */
int limits_devices(char uuids[VGPU_MAX_DEVICES][VGPU_UUID_SIZE]);
bool limits_need_index(void);
/* Whether this is a slice that the device plugin made: its ledger was laid out before the container began. */
bool limits_of_an_allocation(void);
const char *limits_ledger_path(void);
bool limits_ledger_create(void); /* may it be made? Where our preload is in force the node has made it */
bool uuid_same(const char *left, const char *right);

/* env.c */
bool env_bytes(const char *text, uint64_t *bytes); /* whole number, suffix k, m, g of 1024 in either case */
bool env_flag(const char *text, bool *value);
bool env_number(const char *text, int low, int high, int *value);

/* --- ledger.c: the container's account -------------------------------------------------------------- */

enum charge { CHARGE_OK, CHARGE_FULL, CHARGE_BROKEN };

/* Opens the ledger and takes a slot; false with a line on stderr when there is none to take. */
bool ledger_join(void);
/* Index of a device in the ledger, entered if new; -1: no room or no ledger. */
int ledger_device(const char *uuid);
/* Checks the total of the container against the limit and charges, in one step for all its processes. */
enum charge ledger_charge(int device, enum account account, uint64_t bytes, uint64_t limit);
void ledger_uncharge(int device, enum account account, uint64_t bytes);
/* What this process has charged. */
uint64_t ledger_own(int device, enum account account);
/* Bytes of the container's live processes, contexts included. Joins nothing: nvidia-smi takes no slot. */
bool ledger_total(const char *uuid, uint64_t *bytes);
/*
 * The container's live processes that hold something of the device, as this process's pid namespace sees them: at most
 * `room` are written, the answer is how many there are; -1 without a ledger.
 */
struct ledger_process {
    uint32_t pid;
    uint64_t bytes; /* contexts included */
};
int ledger_processes(const char *uuid, struct ledger_process *list, int room);
/* What this process and the container's living hold of the device, and whether nobody holds more (of equals the lowest
 * slot); false where this process holds nothing or nothing is known. */
bool ledger_shares(const char *uuid, uint64_t *own, uint64_t *total, bool *largest);
/* Does /proc show this process's own pid namespace? Where it does not, its names are other processes'. */
bool ledger_proc_is_ours(void);
/* What one context costs on this device; 0: not measured yet. */
uint64_t ledger_context_bytes(int device);
void ledger_learn_context(int device, uint64_t bytes);
/* Only one process of the container measures at a time; the kernel drops the lock with its holder. A handle, or -1. */
int ledger_measure_begin(int device);
void ledger_measure_end(int handle, int device);
/* The device's memory that other processes may have open: more, or less. */
void ledger_lend(int device, uint64_t bytes, bool more);
/* Does anybody hold this byte (0: any) of those that stand for open handles? Also where it cannot be known. */
bool ledger_lent_open(uint64_t byte);
/* Does a process of this container hold the byte that says that a handle was made here? Not where it cannot be known. */
bool ledger_made_here(uint64_t byte);
/* Holds a byte until it is returned, or this process is gone; NULL: the ledger cannot be had. */
void *ledger_borrow(uint64_t byte);
void ledger_return(void *loan);
/* Around fork(): no join is under way meanwhile. */
void ledger_hold(void);
void ledger_release(void);

/* --- ledger_file.c: the file itself ------------------------------------------------------------------ */

/* Opens, lays out if empty, checks. A descriptor, or -1 after a line on stderr. */
int ledger_file_open(const char *path, bool write);
bool ledger_header_ok(const struct vgpu_ledger *ledger);
/* 1 a process holds the byte, 0 nobody does, -1 cannot be known. */
int ledger_byte_held(int descriptor, uint64_t byte);
bool ledger_byte_take(int descriptor, uint64_t byte);

/* --- blocks.c: what each pointer and handle was charged ---------------------------------------------- */

struct block {
    uint64_t key;
    uint64_t bytes;
    uint64_t owner; /* context, pool, or object that it belongs to */
    int32_t device;
    int32_t kind;
};
struct block_map;
extern struct block_map vgpu_memory, vgpu_arrays, vgpu_contexts, vgpu_modules, vgpu_handles, vgpu_mappings, vgpu_graphs, vgpu_parts, vgpu_lent,
    vgpu_borrowed, vgpu_greens;
/* false: no memory for the table. */
bool block_put(struct block_map *map, const struct block *block);
bool block_take(struct block_map *map, uint64_t key, struct block *block); /* removes */
bool block_get(struct block_map *map, uint64_t key, struct block *block);
/* Removes every block for which `match` answers true. */
void block_sweep(struct block_map *map, bool (*match)(const struct block *block, void *data), void *data);
void blocks_reset(void);

/* --- device.c ----------------------------------------------------------------------------------------- */

struct device {
    char uuid[VGPU_UUID_SIZE];
    int ledger;     /* index in the ledger */
    int nvml_index; /* -1 where nobody needs it */
    struct tally *tally;
};
/* The device of a CUDA ordinal; NULL: the driver does not know it (*status says how) or the ledger has no room. */
const struct device *device_of(CUdevice device, CUresult *status);
/* nvml_device.c: the place of a GPU in NVML's order, of a MIG device that of its GPU (its own counts within that one); -1 */
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
static inline uint64_t standing_memory(const struct standing *standing, const struct device *device)
{
    return __atomic_load_n(&standing->memory[device->ledger], __ATOMIC_RELAXED);
}
static inline uint64_t device_limit(const struct device *device, bool *known)
{
    const struct standing *standing = atomic_load_explicit(&vgpu_standing, memory_order_acquire);
    uint64_t bytes = standing ? standing_memory(standing, device) : 0;
    *known = true;
    return bytes ? bytes : device_limit_asked(device, known);
}
void devices_reset(void);

/* --- state.c: start of the library in a process, and its rebirth in a child ---------------------------- */

/*
 * What is true of this process only: that it started the library, and then what rules in it, once the driver was found.
 * It lies in a page that the kernel hands to a child empty.
 */
struct witness {
    _Atomic bool started;
    _Atomic(struct standing *) standing;
};
extern _Atomic(struct witness *) vgpu_witness; /* never NULL */
enum control vgpu_enter_anew(void);
/* What rules now, if the short way in is open and nothing has changed; else NULL: ask vgpu_enter(). */
static inline struct standing *vgpu_standing_now(void)
{
    struct witness *witness = atomic_load_explicit(&vgpu_witness, memory_order_acquire);
    struct standing *standing = atomic_load_explicit(&witness->standing, memory_order_acquire);
    bool same = standing && __atomic_load_n(standing->sequence_at, __ATOMIC_ACQUIRE) == standing->sequence;
    return __builtin_expect(same, 1) ? standing : NULL;
}
/* First line of every hook; CONTROL_OFF: call the driver and nothing else. */
static inline enum control vgpu_enter(void)
{
    const struct standing *standing = vgpu_standing_now();
    return __builtin_expect(standing != NULL, 1) ? standing->control : vgpu_enter_anew();
}
enum control vgpu_enter_nvml(void);
/* limiter.c, fence.c: the compute limiter. The thread's current context has changed; a context is about to go; the program
 * has waited for the GPU. */
void limiter_forget_thread(void);
void limiter_reset(void);
void fence_context_gone(CUcontext context);
void fence_settle(void);
/* context.c: contexts and modules of a device are made and ended one at a time, for they are measured. */
void context_lock(int device);
/* The current context, which may be one that no hook saw: charged as any. An error: nothing may be allocated in it. *known
 * false: it could not be looked at now. */
CUresult context_meet(const struct device *device, CUcontext context, CUdevice ordinal, bool *known);
/* With the lock held. The device's primary context as far as it is charged, NULL: none. */
CUcontext context_primary(int device);
void context_used(CUcontext context); /* one more keeps it alive */
/* One less: `end` is the driver's call for it; reset: it ends the primary context whatever its users. */
CUresult context_end_use(int device, CUdevice ordinal, CUresult (*end)(void *data), void *data, bool reset);
void context_unlock(int device);
bool context_try(int device); /* false: somebody holds it, perhaps this thread */
/* The frame of a hook: leaves where the driver lacks the function or the library has nothing to say. */
#define ENTER(symbol, arguments) \
    enum control control = vgpu_enter(); \
    if (!REAL_HAS(symbol)) \
        return driver_ready() ? CUDA_ERROR_NOT_FOUND : CUDA_ERROR_NO_DEVICE; \
    if (control == CONTROL_OFF) \
        return REAL(symbol) arguments; \
    vgpu_log(LOG_CALLS, "%s", #symbol)
void context_reset(void);
void pools_reset(void);
void graph_memory_reset(void);
void vmm_reset(void);
void ipc_reset(void);
void external_reset(void);
void ledger_reset(void);
void limits_reset(void);

#pragma GCC visibility pop

#include "charges.h"

#endif
