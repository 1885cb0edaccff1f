/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The lock that guards the shared state of the simulated host.
 *
 * Without contention it costs one compare-and-swap and one exchange, and no system call. The lock's word identifies its
 * holder by the process's slot (its place in the state's table of processes) and the number of uses of this slot (the
 * generation). A pid or tid cannot identify the holder, because processes of several PID namespaces share the state,
 * and the same number may occur in two of them. So a robust pthread mutex, whose word is a tid, would not do. After a
 * while a waiter checks whether the holder lives: the kernel's lock on the holder's slot shows that (process.c). If the
 * holder is dead, the waiter takes the lock and repairs the state.
 */
#include "internal.h"

#include <errno.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define WAITERS 0x80000000u
#define HELD 0x40000000u
#define SLOT_BITS 10
#define GENERATION_MASK 0xfffffu
#define OWNER_CHECK_NS 5000000ull

_Static_assert(SIM_MAX_PROCS <= 1u << SLOT_BITS, "a slot number must fit into the lock's word");

uint32_t sim_lock_word(int slot, uint32_t generation)
{
    return HELD | (generation & GENERATION_MASK) << SLOT_BITS | (uint32_t)slot;
}

int sim_futex_wait(const _Atomic uint32_t *word, uint32_t expected, uint64_t timeout_ns)
{
    struct timespec limit = {.tv_sec = (time_t)(timeout_ns / 1000000000u), .tv_nsec = (long)(timeout_ns % 1000000000u)};
    return syscall(SYS_futex, word, FUTEX_WAIT, expected, &limit, NULL, 0) == 0 ? 0 : errno;
}

void sim_futex_wake(const _Atomic uint32_t *word, int count)
{
    syscall(SYS_futex, word, FUTEX_WAKE, count, NULL, NULL, 0);
}

static bool owner_dead(uint32_t word)
{
    int slot = (int)(word & (SIM_MAX_PROCS - 1));
    uint32_t generation = (word >> SLOT_BITS) & GENERATION_MASK;
    /* A newer generation in the slot means that the lock's holder died and another process took the slot. */
    if ((sim_self.state->procs[slot].generation & GENERATION_MASK) != generation)
        return true;
    return slot != atomic_load_explicit(&sim_self.slot, memory_order_relaxed) && !sim_slot_alive(slot);
}

static void lock_slow(_Atomic uint32_t *lock)
{
    for (int spin = 0; spin < 64; spin++) {
        uint32_t free_word = 0;
        if (atomic_load_explicit(lock, memory_order_relaxed) == 0 &&
            atomic_compare_exchange_weak_explicit(lock, &free_word, sim_self.word, memory_order_acquire,
                                                  memory_order_relaxed))
            return;
    }
    for (;;) {
        uint32_t word = atomic_load_explicit(lock, memory_order_relaxed);
        if (word == 0) {
            if (atomic_compare_exchange_strong_explicit(lock, &word, sim_self.word | WAITERS, memory_order_acquire,
                                                        memory_order_relaxed))
                return;
            continue;
        }
        if (!(word & WAITERS) && !atomic_compare_exchange_strong(lock, &word, word | WAITERS))
            continue;
        word |= WAITERS;
        if (sim_futex_wait(lock, word, OWNER_CHECK_NS) != ETIMEDOUT)
            continue;
        word = atomic_load(lock);
        if (word != 0 && owner_dead(word) &&
            atomic_compare_exchange_strong(lock, &word, sim_self.word | WAITERS)) {
            sim_repair();
            return;
        }
    }
}

void sim_lock(void)
{
    uint32_t free_word = 0;
    _Atomic uint32_t *lock = &sim_self.state->lock;
    if (!atomic_compare_exchange_strong_explicit(lock, &free_word, sim_self.word, memory_order_acquire,
                                                 memory_order_relaxed))
        lock_slow(lock);
}

void sim_unlock(void)
{
    _Atomic uint32_t *lock = &sim_self.state->lock;
    if (atomic_exchange_explicit(lock, 0, memory_order_release) & WAITERS)
        sim_futex_wake(lock, 1);
}
