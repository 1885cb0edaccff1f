/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The lowest package: lines on stderr, the lock for threads, and the limits of this process.
 *
 * Rules of the library: nothing runs before the first CUDA or NVML call of the process (no constructors). The host
 * program's umask, signals, descriptors and exit stay unchanged. A failure of the library is an error code of the
 * driver and one line on stderr, never an abort.
 */
#ifndef VGPU_LIMITS_H
#define VGPU_LIMITS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "vgpu_abi.h"

/* Symbols without EXPORT are hidden, so that calls and variables are direct and no other library can replace them.
 * Every header begins with this pragma. */
#pragma GCC visibility push(hidden)

#define EXPORT __attribute__((visibility("default")))
#define MIB (1024ull * 1024ull)

/* --- log.c: lines on stderr, and the lock for threads ----------------------------------------------- */

enum log_level { LOG_ERROR, LOG_WARN, LOG_INFO, LOG_CALLS, LOG_DEBUG, LOG_TRACE };
extern _Atomic int vgpu_log_level;
#define vgpu_log(level, ...) \
    do { \
        if ((int)(level) <= atomic_load_explicit(&vgpu_log_level, memory_order_relaxed)) \
            vgpu_log_line(level, __VA_ARGS__); \
    } while (0)
/* From this call on, lines go to the file that descriptor 2 is now. The first line also calls this function. */
void log_begin(void);
void vgpu_log_line(enum log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Returns true at the first call and each time `count` doubles, so that a loop does not flood stderr. */
bool vgpu_log_again(_Atomic unsigned *count);

/*
 * A build with -DVGPU_WATCH (make WATCH=1) reports its locks and its calls of the dynamic loader to a preloaded test
 * library. That library checks that no lock of libvgpu is held during such a call
 * (tests/native/vcuda/programs/loader_watch.c).
 */
#ifdef VGPU_WATCH
EXPORT void vgpu_watch_lock(const void *lock, bool held);
EXPORT void vgpu_watch_loader(const char *function);
#define watch_lock(lock, held) vgpu_watch_lock(lock, held)
#define watch_loader(function) vgpu_watch_loader(function)
#else
#define watch_lock(lock, held) ((void)0)
#define watch_loader(function) ((void)0)
#endif

/* A futex lock: it needs no pthread symbols of a new glibc, and a forked child may simply set it to 0. */
struct lock {
    _Atomic uint32_t word;
};
void lock_wait(struct lock *lock);
void lock_wake(struct lock *lock);
/* The word is 0 if the lock is free, 1 if it is locked, and 2 if it is locked and a thread sleeps. */
static inline bool lock_try(struct lock *lock)
{
    uint32_t expected = 0;
    bool took = atomic_compare_exchange_strong_explicit(&lock->word, &expected, 1, memory_order_acquire, memory_order_relaxed);
    if (took)
        watch_lock(lock, true);
    return took;
}
static inline void lock_take(struct lock *lock)
{
    if (__builtin_expect(!lock_try(lock), 0)) {
        lock_wait(lock);
        watch_lock(lock, true);
    }
}
static inline void lock_drop(struct lock *lock)
{
    watch_lock(lock, false);
    if (__builtin_expect(atomic_exchange_explicit(&lock->word, 0, memory_order_release) == 2, 0))
        lock_wake(lock);
}

/* --- limits.c: limits file and environment ---------------------------------------------------------- */

enum control {
    CONTROL_OFF,   /* OFF: there is neither a limits file nor a variable, so the library does nothing. */
    CONTROL_ON,    /* ON: limits apply. */
    CONTROL_BROKEN /* BROKEN: limits should apply but cannot be read, so no context may be created. */
};
/* The limits that were read last. They are current while *sequence_at equals the stored sequence. */
struct cached_limits {
    enum control control;
    uint32_t sequence;
    const uint32_t *sequence_at;
    bool oversubscribe;
    bool driver_limited; /* driver_limited: a device of the limits file has card_bytes. */
    /* plain: allocations may use the fast path, because limits apply, and oversubscription and the logging of calls are
     * off. */
    bool plain;
    /* Cached results of limits_memory by the device's index in the ledger; 0: not cached. */
    uint64_t memory[VGPU_MAX_DEVICES];
};
extern _Atomic(struct cached_limits *) vgpu_cached_limits; /* NULL: no limits have been read yet. */

/* Returns the current state. Reads the file again if its sequence has changed. Makes no system call if the sequence has
 * not changed. */
enum control limits_control(void);
/* The sequence word of the mapped limits file; without a file a word that stays 0. */
extern const uint32_t *vgpu_limits_sequence;
/* Writes one line that names the file and why contexts fail. */
void limits_complain(void);
/* Returns true if no context may be created. Reads the file again. */
bool limits_denied(void);
bool limits_count_context(void);
/* Returns the bytes that the container may use of this device; UINT64_MAX: no limit. *known false: the limits do not
 * name it. nvml_index is used only if the environment alone sets limits; -1: unknown. */
uint64_t limits_memory(const char *uuid, int nvml_index, bool *known);
/* Returns the card's bytes if the driver itself enforces the container's limit and reports that limit as the card's
 * size; else 0. */
uint64_t limits_card_asked(const char *uuid);
static inline uint64_t limits_card(const char *uuid)
{
    const struct cached_limits *cached = atomic_load_explicit(&vgpu_cached_limits, memory_order_acquire);
    return cached && cached->driver_limited ? limits_card_asked(uuid) : 0;
}
/*
 * Returns the percentage of SM time, 1 to 99; 0: no limit. This and the next four functions cost two loads and return
 * values of the last read of the file. Every hook reads the file on entry; a thread of the library must call
 * limits_control() to see a live change.
 */
unsigned limits_sm_percent(const char *uuid, int nvml_index);
/* Returns true if the environment sets a lower percentage than the limits file. */
bool limits_sm_lowered(const char *uuid, int nvml_index);
enum vgpu_core_policy limits_core_policy(void);
int limits_priority(void); /* Returns 0 for high priority, 1 for low. */
bool limits_oom_killer(void);
static inline bool limits_oversubscribe(void)
{
    const struct cached_limits *cached = atomic_load_explicit(&vgpu_cached_limits, memory_order_acquire);
    return cached && cached->oversubscribe;
}
/* Lists the UUIDs of the limits file in its order. Returns 0 without a file. */
int limits_devices(char uuids[VGPU_MAX_DEVICES][VGPU_UUID_SIZE]);
bool limits_need_index(void);
/* Returns true for a slice of the device plugin, whose ledger was initialised before the container began. */
bool limits_of_an_allocation(void);
/*
 * The shares of this container, by index. Each has its own ledger; most containers have one. All other functions return
 * values for all shares together.
 */
unsigned limits_shares(void);
/* Returns the bytes of a device in one share, regardless of the environment; UINT64_MAX: no limit. *named false: the
 * share does not name it. */
uint64_t limits_share_memory(unsigned share, const char *uuid, bool *named);
/* Returns true if the share's limits are those of `allocation`. Always true unless the node's ld.so.preload loads this
 * library. */
bool limits_same_allocation(unsigned share, const char allocation[VGPU_ALLOCATION_SIZE]);
const char *limits_ledger_path(unsigned share);
/* Returns true if the ledger is this user's own file in a folder that all users can write. */
bool limits_ledger_is_own(void);
/* Returns true if this process may create the ledger. If the node's ld.so.preload loads this library, the node creates
 * the ledger. */
bool limits_ledger_create(void);
bool uuid_same(const char *left, const char *right);
void limits_reset(void);

#pragma GCC visibility pop

#endif
