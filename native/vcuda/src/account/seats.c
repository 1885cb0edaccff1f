/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Charges memory in containers with several shares (allocations of GPUs). Each share has its own ledger, the file in
 * which charges are recorded. Other containers may use the same share (one Kubernetes claim in two containers or pods),
 * and then their common usage counts. So a process has a slot (an entry of its own) in the ledger of each share.
 *
 * A seat is a card's entry in the ledger of a share that names the card; most cards have one seat. If several shares
 * name a card, a charge fills the first share, then the next. A free uncharges the last share first, because no record
 * says in which share a block was charged. During a charge or a free the process holds the locks of all these ledgers.
 * The process takes these locks in the order of the files' device and inode numbers. This order is the same in every
 * container, so no deadlock can occur.
 *
 * A card that only the first share names is charged as in a container with one share. Other cards do not use the fast
 * path (counters.h).
 */
#include "ledger.h"

#include <string.h>

struct card {
    char uuid[VGPU_UUID_SIZE];
    unsigned count;
    struct seat seat[VGPU_MAX_SHARES];
};
static struct card cards[VGPU_MAX_DEVICES];
static _Atomic int known;
bool ledger_several;
static _Atomic uint64_t owed[2][VGPU_MAX_DEVICES];

/* Returns the device's index in one ledger; adds a device that is new. -1: the ledger is full or its lock was not
 * obtained. */
static int enter(struct membership *member, const char *uuid)
{
    struct vgpu_ledger *ledger = member->map;
    int index = ledger_device_index(ledger, uuid);
    if (index >= 0 || !ledger_lock_take(member))
        return index;
    index = ledger_device_index(ledger, uuid);
    if (index < 0 && ledger->device_count < VGPU_MAX_DEVICES) {
        index = (int)ledger->device_count;
        memset(ledger->devices[index], 0, VGPU_UUID_SIZE);
        memcpy(ledger->devices[index], uuid, strnlen(uuid, VGPU_UUID_SIZE - 1));
        __atomic_store_n(&ledger->device_count, (uint32_t)index + 1, __ATOMIC_RELEASE);
    }
    ledger_lock_drop(member);
    return index;
}

int seats_search(const char *uuid)
{
    int count = atomic_load_explicit(&known, memory_order_acquire);
    for (int i = 0; i < count; i++)
        if (uuid_same(cards[i].uuid, uuid))
            return i;
    return -1;
}

void seats_begin(unsigned shares)
{
    ledger_several = shares > 1;
    for (int device = 0; device < VGPU_MAX_DEVICES; device++)
        cards[device] = (struct card){.count = 1, .seat = {{ledger_members, device}}};
}

int seats_add(const char *uuid)
{
    if (!ledger_several)
        return enter(ledger_members, uuid);
    int device = seats_search(uuid);
    if (device >= 0)
        return device;
    device = atomic_load_explicit(&known, memory_order_relaxed);
    if (device == VGPU_MAX_DEVICES)
        return -1;
    struct card *card = &cards[device];
    *card = (struct card){0};
    memcpy(card->uuid, uuid, strnlen(uuid, VGPU_UUID_SIZE - 1));
    for (unsigned share = 0; share < limits_shares(); share++) {
        bool named;
        limits_share_memory(share, uuid, &named);
        if (named)
            card->seat[card->count++] = (struct seat){&ledger_members[share], enter(&ledger_members[share], uuid)};
    }
    /* No share names the GPU, so every use of it is refused. But the code that refuses needs an index of the device. */
    if (card->count == 0)
        card->seat[card->count++] = (struct seat){ledger_members, enter(ledger_members, uuid)};
    for (unsigned i = 0; i < card->count; i++)
        if (card->seat[i].at < 0)
            return -1;
    if (card->count == 1 && card->seat[0].member == ledger_members)
        ledger_open_short_way(device, card->seat[0].at);
    atomic_store_explicit(&known, device + 1, memory_order_release);
    return device;
}

const struct seat *seats_of(int device, unsigned *count)
{
    *count = cards[device].count;
    return cards[device].seat;
}

uint64_t seats_total(int device)
{
    uint64_t total = 0;
    for (unsigned i = 0; i < cards[device].count; i++)
        total += __atomic_load_n(&cards[device].seat[i].member->map->total[cards[device].seat[i].at], __ATOMIC_RELAXED);
    return total;
}

/* --- charging ------------------------------------------------------------------------------------------------ */

bool seats_several(int device)
{
    return cards[device].count > 1 || cards[device].seat[0].member != ledger_members;
}

static bool before(const struct membership *one, const struct membership *other)
{
    return one->file[0] != other->file[0] ? one->file[0] < other->file[0] : one->file[1] < other->file[1];
}

static void unlock(const struct seat *seats, unsigned count)
{
    for (unsigned i = 0; i < count; i++)
        ledger_lock_drop(seats[i].member);
}

/* Takes the locks of the ledgers of all seats, or none. Returns false if a stopped or frozen process holds one of
 * them. */
static bool lock(const struct card *card, struct seat locked[VGPU_MAX_SHARES])
{
    for (unsigned i = 0, at; i < card->count; i++) {
        for (at = i; at > 0 && before(card->seat[i].member, locked[at - 1].member); at--)
            locked[at] = locked[at - 1];
        locked[at] = card->seat[i];
    }
    for (unsigned i = 0; i < card->count; i++)
        if (!ledger_lock_take(locked[i].member)) {
            vgpu_log_line(LOG_ERROR, "ledger %s: its lock is held by a process that does not run", locked[i].member->path);
            unlock(locked, i);
            return false;
        }
    return true;
}

/* Changes what this process is charged at a seat, and the total of all processes. As in counters_post, a single store
 * changes the process's figure, which is authoritative. */
static void post(const struct seat *seat, enum account account, uint64_t bytes, bool more)
{
    uint64_t *own = &seat->member->own[account][seat->at], *total = &seat->member->map->total[seat->at];
    uint64_t *slot = account == ACCOUNT_USED ? seat->member->mine->used : seat->member->mine->context;
    uint64_t all = __atomic_load_n(total, __ATOMIC_RELAXED);
    *own = more ? *own + bytes : *own - bytes;
    __atomic_store_n(&slot[seat->at], *own, __ATOMIC_RELAXED);
    __atomic_store_n(total, more ? all + bytes : all - (all < bytes ? all : bytes), __ATOMIC_RELAXED);
}

/* Stores the process's sum over all seats. While this sum is within a range, it need not be compared with the driver's
 * figures. If it has left the range, sets `due`, as in counters_post. */
static void moved(int device, enum account account, uint64_t own)
{
    struct counters *counters = counters_of(device);
    __atomic_store_n(&counters->own[account], own, __ATOMIC_RELAXED);
    if (account == ACCOUNT_USED && own - atomic_load_explicit(&counters->low, memory_order_relaxed) >
                                       atomic_load_explicit(&counters->span, memory_order_relaxed))
        atomic_store_explicit(&counters->due, 1, memory_order_relaxed);
}

/* Subtracts the bytes of uncharges that were recorded but not yet applied. The caller holds the locks of all seats. */
static void pay(int device)
{
    const struct card *card = &cards[device];
    for (int account = ACCOUNT_USED; account <= ACCOUNT_CONTEXT; account++) {
        uint64_t rest = atomic_exchange(&owed[account][device], 0), given = 0;
        for (unsigned i = card->count; rest && i-- > 0;) {
            uint64_t own = card->seat[i].member->own[account][card->seat[i].at], part = rest < own ? rest : own;
            post(&card->seat[i], (enum account)account, part, false);
            rest -= part;
            given += part;
        }
        if (given)
            moved(device, (enum account)account, ledger_own(device, (enum account)account) - given);
    }
}

static uint64_t room_of(const struct card *card, unsigned seat)
{
    bool named;
    const struct membership *member = card->seat[seat].member;
    uint64_t limit = limits_share_memory(member->share, card->uuid, &named);
    uint64_t total = __atomic_load_n(&member->map->total[card->seat[seat].at], __ATOMIC_RELAXED);
    return total < limit ? limit - total : 0;
}

static bool charge(int device, enum account account, uint64_t bytes, uint64_t limit)
{
    const struct card *card = &cards[device];
    uint64_t room = 0, total = seats_total(device), part;
    for (unsigned i = 0; i < card->count; i++) {
        part = room_of(card, i);
        room = room + part < part ? UINT64_MAX : room + part;
    }
    /* A limit from the environment may be lower than the sum of the shares. */
    if (bytes > room || total > limit || bytes > limit - total)
        return false;
    uint64_t rest = bytes;
    for (unsigned i = 0; i < card->count; i++, rest -= part) {
        part = room_of(card, i);
        part = rest < part ? rest : part;
        post(&card->seat[i], account, part, true);
    }
    moved(device, account, ledger_own(device, account) + bytes);
    return true;
}

enum charge seats_charge(int device, enum account account, uint64_t bytes, uint64_t limit)
{
    struct seat locked[VGPU_MAX_SHARES];
    if (!lock(&cards[device], locked))
        return CHARGE_BROKEN;
    pay(device);
    bool done = charge(device, account, bytes, limit);
    if (!done) {
        for (unsigned i = 0; i < cards[device].count; i++)
            ledger_reap(locked[i].member);
        done = charge(device, account, bytes, limit);
    }
    unlock(locked, cards[device].count);
    return done ? CHARGE_OK : CHARGE_FULL;
}

void seats_uncharge(int device, enum account account, uint64_t bytes)
{
    struct seat locked[VGPU_MAX_SHARES];
    atomic_fetch_add(&owed[account][device], bytes);
    if (!lock(&cards[device], locked))
        return; /* The locks were not obtained. The next charge or uncharge also subtracts the recorded bytes. */
    pay(device);
    unlock(locked, cards[device].count);
}

void seats_reset(void)
{
    memset(cards, 0, sizeof cards);
    memset(owed, 0, sizeof owed);
    atomic_store(&known, 0);
}
