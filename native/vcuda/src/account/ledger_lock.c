/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The lock of the ledger (the file in which the container's processes record their device memory) is one word in the
 * file. The word names its holder by slot (the process's entry in the file) and generation (a number that grows each
 * time a process claims the slot). If no other process wants the lock, taking it costs one atomic instruction, and
 * releasing it a load and a store.
 *
 * A waiting process detects a killed holder in two ways: the kernel has released the file lock on the byte of its slot,
 * or the slot was claimed again and has a new generation. The waiting process then replaces the word by
 * compare-and-swap, so only one of several waiting processes gets the lock. That process computes the totals again,
 * because a dead holder can have left only the totals half written.
 */
#include "ledger.h"

#include <sched.h>
#include <time.h>
#include <unistd.h>

#define SPINS 200
#define PROBE_NS 500000ull
#define GIVE_UP_NS 5000000000ull

uint64_t ledger_clock(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

static bool holder_dead(const struct membership *member, uint64_t word)
{
    uint64_t slot = (word & 0xffffffffu) - 1;
    if (slot >= VGPU_LEDGER_SLOTS)
        return true; /* No process writes such a word through this library, so no live process holds the lock. */
    if (__atomic_load_n(&ledger_slot(member->map, (uint32_t)slot)->generation, __ATOMIC_ACQUIRE) != word >> 32)
        return true;
    int descriptor = ledger_file_again(member, false);
    if (descriptor < 0)
        return false;
    int held = ledger_byte_held(descriptor, VGPU_LEDGER_ALIVE_BASE + slot);
    close(descriptor);
    return held == 0;
}

static bool swap(const struct ledger_key *key, uint64_t from)
{
    bool took = __atomic_compare_exchange_n(key->lock, &from, key->word, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
    if (took)
        watch_lock(key, true);
    return took;
}

bool ledger_lock_wait(struct membership *member)
{
    const struct ledger_key *key = ledger_key_of(member);
    static const struct timespec nap = {0, 20000};
    uint64_t began = 0, probed = 0;
    for (unsigned spins = 0;; spins++) {
        uint64_t word = __atomic_load_n(key->lock, __ATOMIC_RELAXED);
        if (word == 0) {
            if (swap(key, 0))
                return true;
            continue;
        }
        if (spins < SPINS)
            continue;
        if (spins < 2 * SPINS) {
            sched_yield();
            continue;
        }
        uint64_t now = ledger_clock();
        if (!began)
            began = probed = now;
        /* If the word is this process's own, another of its threads holds the lock, so the holder is alive. */
        if (word != key->word && now - probed >= PROBE_NS) {
            probed = now;
            if (holder_dead(member, word) && swap(key, word)) {
                ledger_recount(member);
                return true;
            }
        }
        if (now - began > GIVE_UP_NS)
            return false;
        nanosleep(&nap, NULL);
    }
}

void ledger_recount(struct membership *member)
{
    struct vgpu_ledger *ledger = member->map;
    uint64_t sum[VGPU_MAX_DEVICES] = {0};
    uint32_t high = ledger_high(ledger);
    for (uint32_t i = 0; i < high; i++) {
        const struct vgpu_ledger_slot *slot = ledger_slot(ledger, i);
        for (int device = 0; device < VGPU_MAX_DEVICES; device++)
            sum[device] += slot->used[device] + slot->context[device];
    }
    for (int device = 0; device < VGPU_MAX_DEVICES; device++)
        __atomic_store_n(&ledger->total[device], sum[device], __ATOMIC_RELAXED);
}

static bool slot_empty(const struct vgpu_ledger_slot *slot)
{
    uint64_t any = slot->pid;
    for (int device = 0; device < VGPU_MAX_DEVICES; device++)
        any |= slot->used[device] | slot->context[device];
    return any == 0;
}

bool ledger_slot_exported(int descriptor, const struct vgpu_ledger *ledger, const struct vgpu_ledger_slot *slot)
{
    uint64_t identity[2];
    uint32_t any = 0;
    for (int device = 0; device < VGPU_LEDGER_EXPORTED_DEVICES; device++)
        any |= slot->exported_mib[device];
    return any && (ledger_range_held(descriptor, VGPU_LEDGER_IMPORT_BASE, VGPU_LEDGER_IMPORT_SPAN) != 0 ||
                   !ledger_file_identity(descriptor, identity) || shareable_any(ledger, identity));
}

uint64_t ledger_slot_exported_bytes(const struct vgpu_ledger_slot *slot, int device)
{
    uint64_t exported = device < VGPU_LEDGER_EXPORTED_DEVICES ? (uint64_t)slot->exported_mib[device] * MIB : 0;
    return exported < slot->used[device] ? exported : slot->used[device];
}

/* Clears the slot of a dead process, but keeps the charge of exported memory that other processes have open. Returns
 * true if the slot changed. */
static bool strip(int descriptor, const struct vgpu_ledger *ledger, struct vgpu_ledger_slot *slot)
{
    bool exported = ledger_slot_exported(descriptor, ledger, slot), changed = !exported;
    for (int device = 0; device < VGPU_MAX_DEVICES; device++) {
        uint64_t open = exported ? ledger_slot_exported_bytes(slot, device) : 0;
        changed = changed || slot->context[device] || slot->used[device] != open;
        slot->used[device] = open;
        slot->context[device] = 0;
    }
    if (!exported)
        slot->pid = 0;
    return changed;
}

void ledger_reap(struct membership *member)
{
    struct vgpu_ledger *ledger = member->map;
    int descriptor = ledger_file_again(member, false);
    if (descriptor < 0)
        /* The slots' file locks cannot be read, so it is unknown which processes are alive. All count as alive. */
        return;
    uint32_t high = ledger_high(ledger);
    bool found = false;
    for (uint32_t i = 0; i < high; i++) {
        struct vgpu_ledger_slot *slot = ledger_slot(ledger, i);
        if (i == member->slot || slot_empty(slot) || ledger_byte_held(descriptor, VGPU_LEDGER_ALIVE_BASE + i) != 0)
            continue;
        found = strip(descriptor, ledger, slot) || found;
    }
    close(descriptor);
    if (found)
        ledger_recount(member);
    member->reaped_ns = ledger_clock();
}
