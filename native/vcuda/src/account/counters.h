/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What an allocation and a free touch of a device: the gate in front of it, this process's part of the container's account,
 * and the marks at which to look for what the driver took unasked. All of it is one cache line, and the path of those that
 * fit is inline, for it is laid into the hooks: every instruction of it is paid by every allocation of every tenant.
 *
 * ledger.c says what an account is and does all that is not the common case; gate.c is the gate; context/unaccounted.c sets the
 * marks.
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
    /* Between a charge and the driver's answer, or that and the uncharge, the account and the card differ. A thread that
     * does such a thing is in flight; both figures are read together while nobody is. A free counts FREEING: nobody waits for
     * one, for the driver may hold it up until the GPU has done its work. */
    _Atomic uint32_t closed, flying;
    _Atomic uint32_t due; /* flight_moved, when this flight has ended */
    int32_t device;       /* its index in the ledger */
    /* In the ledger: this process's figures, the second VGPU_MAX_DEVICES after the first, and the container's total. NULL
     * before this process has a slot, and for a card that is not of the first share alone; set last. */
    uint64_t *slot, *total;
    /* The truth about this process that no other process can write, by account; the slot is its copy. */
    uint64_t own[2];
    /* Nothing is looked up while what is in use is within [low, low + span]; the counters is marked due beyond. */
    _Atomic uint64_t low, span;
} __attribute__((aligned(64)));
extern struct counters vgpu_counters[VGPU_MAX_DEVICES];
_Static_assert(sizeof(struct counters) == 64, "a cache line");
/* The address is made once: a compiler that knows where it comes from adds up that of each field again. */
static inline struct counters *counters_of(int device)
{
    struct counters *counters = &vgpu_counters[device];
    __asm__("" : "+r"(counters));
    return counters;
}

/* --- flights ----------------------------------------------------------------------------------------- */

void flight_wait(struct counters *counters);
void flight_moved(int device); /* the charge has moved by a step, and the flight has ended */
/* True: no thread is in flight but such as free, and none begins until gate_open. False: one has been for milliseconds; the gate
 * is open. */
bool gate_shut(int device);
bool gate_frees(int device); /* a thread frees: the card may have less than the account by that much */
bool gate_forced(int device); /* a thread has waited too long for it, and went on: the figures do not belong together */
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

/* By the place of the share among those of the container; the first of them has the short way. */
extern struct ledger_key {
    uint64_t *lock; /* in the ledger */
    uint64_t word;  /* what this process writes there */
} ledger_keys[VGPU_MAX_SHARES];
extern _Atomic bool ledger_owes; /* uncharges that found the lock held too long are written down */

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
    /* Looked at first: if the tenant has overwritten the word, the next holder is not robbed. Nobody else writes it while
     * this process lives, so no locked instruction is needed. */
    if (__builtin_expect(__atomic_load_n(key->lock, __ATOMIC_RELAXED) == key->word, 1))
        __atomic_store_n(key->lock, 0, __ATOMIC_RELEASE);
}

/* --- charging ------------------------------------------------------------------------------------------- */

/* All of these: lock held. One 8-byte store changes the truth; the total follows and is recounted by an heir. */
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

/* The total is clamped: it lies where the tenant can write. */
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

/* Charged, if that fits and nothing is in the way; else nothing has happened, and ledger_charge says why. */
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
