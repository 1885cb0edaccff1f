/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The data that an allocation and a free use of a device: the gate, this process's part of the container's account, and
 * the range beyond which unrequested driver memory is looked up. All of it is one cache line. The common path is inline
 * in the hooks, because every allocation of every tenant pays for each instruction.
 *
 * ledger.c documents the account and handles all uncommon cases, gate.c is the gate, and context/unaccounted.c sets the
 * range.
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
    /* The account and the card differ between a charge and the driver's return, and between a free and its uncharge.
     * A thread in such a section is in flight. Both figures are read together only while no thread is. A free counts
     * FREEING: readers do not wait for it, because the driver may delay it until the GPU has finished its work. */
    _Atomic uint32_t closed, flying;
    _Atomic uint32_t due; /* Call flight_moved at the end of this flight. */
    int32_t device;       /* The device's index in the ledger. */
    /* Pointers into the ledger: this process's figures (contexts VGPU_MAX_DEVICES after allocations) and the
     * container's total. NULL before this process has a slot, and for a card that not only the first share names.
     * `slot` is set last. */
    uint64_t *slot, *total;
    /* This process's charges by account, in memory that no other process can write. The slot holds a copy. */
    uint64_t own[2];
    /* While usage is within [low, low + span] nothing is looked up. Outside that range `due` is set. */
    _Atomic uint64_t low, span;
} __attribute__((aligned(64)));
extern struct counters vgpu_counters[VGPU_MAX_DEVICES];
_Static_assert(sizeof(struct counters) == 64, "a cache line");
/* The empty asm makes the compiler compute the address once; otherwise it recomputes the address of each field. */
static inline struct counters *counters_of(int device)
{
    struct counters *counters = &vgpu_counters[device];
    __asm__("" : "+r"(counters));
    return counters;
}

/* --- flights ----------------------------------------------------------------------------------------- */

void flight_wait(struct counters *counters);
void flight_moved(int device); /* The charge has left its range, and the flight has ended. */
/* Returns true if no thread is in flight (except frees); then none begins until gate_open. Returns false, with the
 * gate open, if a thread stayed in flight for 10 ms. */
bool gate_shut(int device);
bool gate_frees(int device); /* A thread is freeing: the card may use less than the account by that amount. */
bool gate_forced(int device); /* A thread waited too long and passed the shut gate: the two figures do not match. */
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

/* Index: the position of the share among the container's shares. Only the first share has the fast path. */
extern struct ledger_key {
    uint64_t *lock; /* In the ledger. */
    uint64_t word;  /* The word by which this process locks. */
} ledger_keys[VGPU_MAX_SHARES];
extern _Atomic bool ledger_owes; /* some uncharges found the lock held too long and are recorded as pending */

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
    /* Checked first: if the tenant has overwritten the word, the lock may belong to another holder. No other process
     * writes the word while this process lives, so no locked instruction is needed. */
    if (__builtin_expect(__atomic_load_n(key->lock, __ATOMIC_RELAXED) == key->word, 1))
        __atomic_store_n(key->lock, 0, __ATOMIC_RELEASE);
}

/* --- charging ------------------------------------------------------------------------------------------- */

/* These functions need the lock. One 8-byte store changes the truth. The total follows, and a process that takes
 * over the lock from a dead holder recounts it. */
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

/* The total is clamped because the tenant can write it. */
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

/* Charges if the bytes fit and the lock is free. Otherwise returns false without effect, and ledger_charge finds the
 * reason. */
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
