/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ground: lines on stderr, the lock of threads, and what limits this process.
 *
 * Rules of the library: nothing runs before the first CUDA or NVML call of the process (no constructors); the host
 * program's umask, signals, descriptors and exit are left alone; a failure of ours is an error code of the driver and
 * one line on stderr, never an abort.
 */
#ifndef VGPU_LIMITS_H
#define VGPU_LIMITS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "vgpu_abi.h"

/* All that is not EXPORT is this library's alone: calls and variables without the detour through which another library could
 * replace them. Every header begins so. */
#pragma GCC visibility push(hidden)

#define EXPORT __attribute__((visibility("default")))
#define MIB (1024ull * 1024ull)

/* --- log.c: lines on stderr, and the lock of threads ------------------------------------------------ */

enum log_level { LOG_ERROR, LOG_WARN, LOG_INFO, LOG_CALLS, LOG_DEBUG, LOG_TRACE };
extern _Atomic int vgpu_log_level;
#define vgpu_log(level, ...) \
    do { \
        if ((int)(level) <= atomic_load_explicit(&vgpu_log_level, memory_order_relaxed)) \
            vgpu_log_line(level, __VA_ARGS__); \
    } while (0)
void log_begin(void); /* lines go to what descriptor 2 is now; the first line calls it too */
void vgpu_log_line(enum log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* True once for each place (and once more each time `count` doubles): a loop must not flood stderr. */
bool vgpu_log_again(_Atomic unsigned *count);

/*
 * A build with -DVGPU_WATCH (make WATCH=1) reports its locks, and its calls of the dynamic loader, to a library of the tests
 * that is preloaded: no lock of ours may be held in such a call (tests/native/vcuda/programs/loader_watch.c).
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
    CONTROL_OFF,   /* no limits file and no variable: the library is not there */
    CONTROL_ON,    /* limits hold */
    CONTROL_BROKEN /* limits should hold and cannot be read: no context */
};
/* The last limits that were read. While *sequence_at holds that sequence nothing has changed. */
struct cached_limits {
    enum control control;
    uint32_t sequence;
    const uint32_t *sequence_at;
    bool oversubscribe;
    bool driver_limited; /* a device of the limits file has card_bytes */
    bool plain; /* limits hold, memory comes from the card alone, call logging is off: allocations may use the fast path */
    /* What limits_memory answers, kept by the device's index in the ledger once it was asked; 0: ask. */
    uint64_t memory[VGPU_MAX_DEVICES];
};
extern _Atomic(struct cached_limits *) vgpu_cached_limits; /* NULL: none could be read yet */
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
/* Bytes of the card where the driver itself enforces the container's limit, and shows that limit as its card; else 0. */
uint64_t limits_card_asked(const char *uuid);
static inline uint64_t limits_card(const char *uuid)
{
    const struct cached_limits *cached = atomic_load_explicit(&vgpu_cached_limits, memory_order_acquire);
    return cached && cached->driver_limited ? limits_card_asked(uuid) : 0;
}
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
    const struct cached_limits *cached = atomic_load_explicit(&vgpu_cached_limits, memory_order_acquire);
    return cached && cached->oversubscribe;
}
/* UUIDs of the limits file in its order; 0 where there is none. */
int limits_devices(char uuids[VGPU_MAX_DEVICES][VGPU_UUID_SIZE]);
bool limits_need_index(void);
/* Whether this is a slice that the device plugin made: its ledger was laid out before the container began. */
bool limits_of_an_allocation(void);
/*
 * The shares of this container, which have a ledger each, by their place among them; most containers have one. All other
 * functions answer for all shares together.
 */
unsigned limits_shares(void);
/* Bytes that a share has of a device, UINT64_MAX: no limit, *named false: none; whatever the environment says. */
uint64_t limits_share_memory(unsigned share, const char *uuid, bool *named);
/* Where our preload is in force: whether these are limits of that allocation; elsewhere always. */
bool limits_same_allocation(unsigned share, const char allocation[VGPU_ALLOCATION_SIZE]);
const char *limits_ledger_path(unsigned share);
bool limits_ledger_is_own(void); /* of this user, in a folder that all users write */
bool limits_ledger_create(void); /* may it be made? Where our preload is in force the node has made it */
bool uuid_same(const char *left, const char *right);
void limits_reset(void);

#pragma GCC visibility pop

#endif
