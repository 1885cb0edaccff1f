/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The lowest package (folder of the sources). It has the log lines on stderr, the lock for threads, and the limits of
 * this process.
 *
 * Rules of the library: nothing runs before the first CUDA or NVML call of the process, so there are no constructors.
 * The program's umask, signals and descriptors stay unchanged, and so does the way in which it exits. If the library
 * fails, a hook (replacement of a driver function) returns an error code of the driver and writes one line to stderr;
 * the program is never aborted.
 */
#ifndef VGPU_LIMITS_H
#define VGPU_LIMITS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "vgpu_abi.h"

/* Symbols without EXPORT are hidden, so that calls need no indirection and no other library can replace the symbols.
 * Every header begins with this pragma. */
#pragma GCC visibility push(hidden)

#define EXPORT __attribute__((visibility("default")))
#define MIB (1024ull * 1024ull)

/* --- log.c: log lines on stderr, and the lock for threads ------------------------------------------- */

enum log_level { LOG_ERROR, LOG_WARN, LOG_INFO, LOG_CALLS, LOG_DEBUG, LOG_TRACE };
extern _Atomic int vgpu_log_level;
#define vgpu_log(level, ...) \
    do { \
        if ((int)(level) <= atomic_load_explicit(&vgpu_log_level, memory_order_relaxed)) \
            vgpu_log_line(level, __VA_ARGS__); \
    } while (0)
/* From this call on, log lines go to the file to which descriptor 2 refers now. The first log line also calls this
 * function. */
void log_begin(void);
void vgpu_log_line(enum log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Returns true at the first call and each time `count` doubles, so that a message in a loop does not flood stderr. */
bool vgpu_log_again(_Atomic unsigned *count);

/*
 * A build with -DVGPU_WATCH (make WATCH=1) reports every lock that it takes and every call of the dynamic loader to a
 * preloaded test library. That library checks that no lock of libvgpu is held during such a call
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

/* A lock on a futex instead of a pthread mutex: so the library also loads with an old glibc, and a forked child may
 * simply set the word to 0. */
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
    /* OFF: there is neither a limits file nor a variable that sets limits, so the library does nothing. */
    CONTROL_OFF,
    CONTROL_ON,    /* ON: limits apply. */
    CONTROL_BROKEN /* BROKEN: limits should apply but cannot be read, so no context may be created. */
};
/* The limits that were read last. They are up to date while *sequence_at (the sequence number in the file) equals
 * `sequence`. */
struct cached_limits {
    enum control control;
    uint32_t sequence;
    const uint32_t *sequence_at;
    bool oversubscribe;
    /* driver_limited: true if the driver of some device enforces the limit itself (the device has card_bytes in the
     * limits file). */
    bool driver_limited;
    /* plain: true if allocations may use the fast path: limits apply, and oversubscription (host memory in place of
     * device memory) and the logging of calls are off. */
    bool plain;
    /* Cached results of limits_memory by the device's index in the ledger; 0: not cached. */
    uint64_t memory[VGPU_MAX_DEVICES];
};
extern _Atomic(struct cached_limits *) vgpu_cached_limits; /* NULL: no limits have been read yet. */

/* Returns the current state. Reads the limits file again if its sequence number has changed. Otherwise makes no system
 * call. */
enum control limits_control(void);
/* Points to the sequence number in the mapped limits file. If there is no file, it points to a word that stays 0. */
extern const uint32_t *vgpu_limits_sequence;
/* Writes one line to stderr that names the limits file and says why no context can be created. */
void limits_complain(void);
/* Returns true if no context may be created. Reads the limits file again if it has changed. */
bool limits_denied(void);
/* Returns true if contexts and code count against the memory limit. */
bool limits_count_context(void);
/* Returns the bytes that the container may use of this device; UINT64_MAX: no limit. *known is false if the limits file
 * does not name the device. nvml_index (-1: unknown) is used only if all limits come from the environment. */
uint64_t limits_memory(const char *uuid, int nvml_index, bool *known);
/* Some drivers enforce the container's limit themselves and report this limit as the card's size. In this case returns
 * the real size of the card, otherwise 0. */
uint64_t limits_card_asked(const char *uuid);
static inline uint64_t limits_card(const char *uuid)
{
    const struct cached_limits *cached = atomic_load_explicit(&vgpu_cached_limits, memory_order_acquire);
    return cached && cached->driver_limited ? limits_card_asked(uuid) : 0;
}
/*
 * Returns the container's percentage of SM time, 1 to 99; 0: no limit. This and the next four functions return the
 * values of the last read of the limits file, so they are cheap. Every hook calls limits_control() on entry, which
 * reads a changed file again. A thread of the library itself calls no hook, so it must call limits_control() before.
 */
unsigned limits_sm_percent(const char *uuid, int nvml_index);
/* Returns true if the environment sets a lower percentage than the limits file. */
bool limits_sm_lowered(const char *uuid, int nvml_index);
enum vgpu_core_policy limits_core_policy(void);
int limits_priority(void); /* Returns the priority of this process's compute work: 0 is high, 1 is low. */
bool limits_oom_killer(void);
static inline bool limits_oversubscribe(void)
{
    const struct cached_limits *cached = atomic_load_explicit(&vgpu_cached_limits, memory_order_acquire);
    return cached && cached->oversubscribe;
}
/* Lists the UUIDs of the limits file in the file's order. Returns 0 if there is no file. */
int limits_devices(char uuids[VGPU_MAX_DEVICES][VGPU_UUID_SIZE]);
/* Returns true if a limit depends on a device's index in NVML's order. */
bool limits_need_index(void);
/* Returns true if the limits are those of an allocation by the device plugin. The node has initialised the ledger of
 * such an allocation before the container was started. */
bool limits_of_an_allocation(void);
/*
 * Returns the number of shares of this container. A share is one allocation, with its own limits file and ledger; most
 * containers have one. Functions without the parameter `share` return values for all shares together.
 */
unsigned limits_shares(void);
/* Returns the memory limit of a device in one share, without limits from the environment; UINT64_MAX: no limit. *named
 * is false if the share does not name the device. */
uint64_t limits_share_memory(unsigned share, const char *uuid, bool *named);
/* Returns true if the share's limits file belongs to the given allocation. If the library was preloaded by hand and not
 * by the node's ld.so.preload, always returns true. */
bool limits_same_allocation(unsigned share, const char allocation[VGPU_ALLOCATION_SIZE]);
/* Returns the path of the share's ledger, the file in which the container's charges are recorded. */
const char *limits_ledger_path(unsigned share);
/* Returns true if the ledger is a file of this user in a folder in which all users can write. */
bool limits_ledger_is_own(void);
/* Returns true if this process may create the ledger. It may not if the node's ld.so.preload loads this library,
 * because then the node creates the ledger. */
bool limits_ledger_create(void);
/* Returns true if both UUIDs name the same device. */
bool uuid_same(const char *left, const char *right);
void limits_reset(void);

#pragma GCC visibility pop

#endif
