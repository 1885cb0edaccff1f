/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The data of a device that every allocation and every free uses, in one cache line: the gate (which stops new
 * allocations for a moment), the memory charged to this process, and a range of usage. When usage leaves the range, the
 * library compares its charges with the driver's figures. The charges are recorded in the ledger, a file that all
 * processes of the container map. A process's entry in it is called a slot.
 *
 * The common path is inline in the hooks (replacements of driver functions), because each instruction slows every
 * allocation. ledger.c documents the ledger and handles all uncommon cases, gate.c is the gate, and
 * context/unaccounted.c sets the range.
 */
#ifndef VGPU_COUNTERS_H
#define VGPU_COUNTERS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "limits/limits.h"
#include "vgpu_abi.h"

#pragma GCC visibility push(hidden)

enum account { ACCOUNT_USED, ACCOUNT_CONTEXT };
#define FREEING 0x10000u

struct counters {
    /* closed: the gate is shut, so new allocations wait. flying: the number of threads in flight. A thread is in flight
     * from a charge until the driver's allocation returns, and from the driver's free until the uncharge. Meanwhile the
     * ledger and the driver disagree, so their figures are compared only while no thread is in flight. A thread in a
     * free adds FREEING instead of 1: the comparison does not wait for frees, because the driver may delay a free until
     * the GPU has finished its work. */
    _Atomic uint32_t closed, flying;
    /* Not 0 if the charge has left its range. Then a thread that ends its flight calls flight_moved(). */
    _Atomic uint32_t due;
    /* The device's index in the ledger. */
    int32_t device;
    /* Pointers into the ledger. slot: this process's figure for allocations; VGPU_MAX_DEVICES entries later follows its
     * figure for contexts. total: the container's total. A container may have several shares (allocations), each with
     * its own ledger. Both pointers are NULL before this process has a slot, and for a GPU that a share other than the
     * first names. `slot` is set last. */
    uint64_t *slot, *total;
    /* This process's charges, one for each value of enum account, in memory that no other process can write. The slot
     * in the ledger holds a copy. */
    uint64_t own[2];
    /* While usage is within [low, low + span], the driver's figures are not read. A charge that leaves that range sets
     * `due`. */
    _Atomic uint64_t low, span;
} __attribute__((aligned(64)));
extern struct counters vgpu_counters[VGPU_MAX_DEVICES];
_Static_assert(sizeof(struct counters) == 64, "a cache line");
/* The empty asm makes the compiler compute the address once. Otherwise it would compute the address of each field
 * again. */
static inline struct counters *counters_of(int device)
{
    struct counters *counters = &vgpu_counters[device];
    __asm__("" : "+r"(counters));
    return counters;
}

/* --- flights ----------------------------------------------------------------------------------------- */

/* Called by a thread that finds the gate shut; waits until the gate opens. */
void flight_wait(struct counters *counters);
/* Called when a thread ends its flight and `due` is set. */
void flight_moved(int device);
/* Shuts the gate and waits until no thread is in flight (except frees). No thread begins a flight before gate_open().
 * Returns false if a thread that was in flight before stayed so for 10 ms. */
bool gate_shut(int device);
/* Returns true if a thread is inside a free. Then the driver's figure may lack memory that is still charged. */
bool gate_frees(int device);
/* Returns true if a thread has waited too long at the shut gate and passed it. Then the ledger and the driver's figure
 * may have been read in different states. */
bool gate_forced(int device);
void gate_open(int device);

static inline void counters_enter(struct counters *counters)
{
    atomic_fetch_add(&counters->flying, 1);
    if (__builtin_expect(atomic_load(&counters->closed) != 0, 0))
        flight_wait(counters);
}

static inline void counters_leave(struct counters *counters)
{
    atomic_fetch_sub(&counters->flying, 1);
    if (__builtin_expect(atomic_load_explicit(&counters->due, memory_order_relaxed) != 0, 0))
        flight_moved(counters->device);
}

static inline void counters_enter_free(struct counters *counters)
{
    atomic_fetch_add(&counters->flying, FREEING);
}

static inline void counters_leave_free(struct counters *counters)
{
    atomic_fetch_sub(&counters->flying, FREEING);
    if (__builtin_expect(atomic_load_explicit(&counters->due, memory_order_relaxed) != 0, 0))
        flight_moved(counters->device);
}

static inline void flight_begin(int device)
{
    if (device >= 0)
        counters_enter(counters_of(device));
}

static inline void flight_end(const int *device)
{
    if (*device >= 0)
        counters_leave(counters_of(*device));
}
#define FLIGHT(device) \
    __attribute__((cleanup(flight_end), unused)) const int flight = (device); \
    flight_begin(flight)

/* --- the lock of the ledger ---------------------------------------------------------------------------- */

/* What is needed to lock the ledger of each share, in the order of the shares. Only the first share has the fast
 * path. */
extern struct ledger_key {
    /* The lock, a word in the ledger. */
    uint64_t *lock;
    /* The value that this process stores in the lock to take it; it names the process. */
    uint64_t word;
} ledger_keys[VGPU_MAX_SHARES];
/* True if uncharges are pending: the lock was not obtained in time, so the bytes were only recorded in this process. */
extern _Atomic bool ledger_owes;

static inline bool key_try(const struct ledger_key *key)
{
    uint64_t unlocked = 0;
    bool took = __atomic_compare_exchange_n(key->lock, &unlocked, key->word, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
    if (took)
        watch_lock(key, true);
    return took;
}

static inline void key_drop(const struct ledger_key *key)
{
    watch_lock(key, false);
    /* Check first that this process still has the lock: if the tenant (the container's user) has overwritten the word,
     * another process may have the lock. While the lock contains this process's word, no correct process writes to it,
     * so no locked instruction is needed. */
    if (__builtin_expect(__atomic_load_n(key->lock, __ATOMIC_RELAXED) == key->word, 1))
        __atomic_store_n(key->lock, 0, __ATOMIC_RELEASE);
}

/* --- charging ------------------------------------------------------------------------------------------- */

/* The caller of counters_post, counters_charge and counters_give_back holds the ledger's lock. One 8-byte store changes
 * the process's figure, which is authoritative. The total is stored afterwards. If the process dies in between, the
 * process that takes the lock over computes the total again. */
static inline void counters_post(struct counters *counters, enum account account, uint64_t own, uint64_t total)
{
    __atomic_store_n(&counters->own[account], own, __ATOMIC_RELAXED);
    __atomic_store_n(&counters->slot[account * VGPU_MAX_DEVICES], own, __ATOMIC_RELAXED);
    __atomic_store_n(counters->total, total, __ATOMIC_RELAXED);
    if (account == ACCOUNT_USED && __builtin_expect(own - atomic_load_explicit(&counters->low, memory_order_relaxed) >
                                                        atomic_load_explicit(&counters->span, memory_order_relaxed), 0))
        atomic_store_explicit(&counters->due, 1, memory_order_relaxed);
}

static inline bool counters_charge(struct counters *counters, enum account account, uint64_t bytes, uint64_t limit)
{
    uint64_t total = __atomic_load_n(counters->total, __ATOMIC_RELAXED);
    bool fits = total <= limit && bytes <= limit - total;
    if (__builtin_expect(fits, 1))
        counters_post(counters, account, counters->own[account] + bytes, total + bytes);
    return fits;
}

/* Uncharges bytes. The total never falls below 0, even if the tenant (the container's user) has overwritten it. */
static inline void counters_give_back(struct counters *counters, enum account account, uint64_t bytes)
{
    uint64_t own = counters->own[account], total = __atomic_load_n(counters->total, __ATOMIC_RELAXED);
    if (__builtin_expect(bytes > own, 0))
        bytes = own;
    counters_post(counters, account, own - bytes, total - (total < bytes ? total : bytes));
}

static inline bool counters_lock(struct counters *counters)
{
    return __builtin_expect(__atomic_load_n(&counters->slot, __ATOMIC_ACQUIRE) && key_try(ledger_keys), 1);
}

/* Charges the bytes if they fit and the lock is free. Otherwise returns false without effect. The caller then calls
 * ledger_charge, which waits for the lock or refuses the bytes. */
static inline bool counters_charged(struct counters *counters, enum account account, uint64_t bytes, uint64_t limit)
{
    if (!counters_lock(counters))
        return false;
    bool done = !atomic_load_explicit(&ledger_owes, memory_order_relaxed) && counters_charge(counters, account, bytes, limit);
    key_drop(ledger_keys);
    return done;
}

static inline bool counters_uncharged(struct counters *counters, enum account account, uint64_t bytes)
{
    if (!counters_lock(counters))
        return false;
    counters_give_back(counters, account, bytes);
    key_drop(ledger_keys);
    return true;
}

#pragma GCC visibility pop

#endif
