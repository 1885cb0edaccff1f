/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ledger is the container's account of device memory, a file that all its processes map. Each process owns a slot
 * with its own charges for as long as it has the ledger mapped. A container may have several shares (allocations of
 * GPUs), each with its own ledger. Then a process owns a slot in each of these ledgers (seats.c).
 *
 * A process is alive while its lock on one byte of the file is held. The library closes the descriptor at once, but the
 * lock belongs to the open file description behind the mapping, and fork does not inherit the mapping. So the slot
 * becomes free when this process's memory is freed: a program that closes all its descriptors stays charged, a child
 * does not keep its parent's slot, and a new program after exec starts without a slot.
 */
#include "ledger.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define REAP_EVERY_NS 100000000ull
#define MEASURE_PATIENCE_MS 60000

struct membership ledger_members[VGPU_MAX_SHARES];
struct counters vgpu_counters[VGPU_MAX_DEVICES];
struct ledger_key ledger_keys[VGPU_MAX_SHARES];
_Atomic bool ledger_owes;
static struct lock join_lock, export_lock;
/* For each device: 0 if this process does not have the lock for measuring a context, else 1 + the descriptor that has
 * the lock. */
static _Atomic int measuring[VGPU_MAX_DEVICES];

static bool is_member(void)
{
    return atomic_load_explicit(&ledger_members[0].joined, memory_order_acquire);
}

static bool claim(struct membership *member, int descriptor, struct vgpu_ledger *map)
{
    struct ledger_key *key = ledger_key_of(member);
    member->map = map;
    for (uint32_t i = 0; i < VGPU_LEDGER_SLOTS; i++) {
        if (!ledger_byte_take(descriptor, VGPU_LEDGER_ALIVE_BASE + i))
            continue;
        struct vgpu_ledger_slot *slot = ledger_slot(map, i);
        if (ledger_slot_exported(descriptor, map, slot)) {
            ledger_byte_drop(descriptor, VGPU_LEDGER_ALIVE_BASE + i);
            continue;
        }
        uint32_t generation = slot->generation + 1;
        /* A dead process may have left its lock word in the ledger. The new generation shows other processes that this
         * word belongs to a former owner of the slot. */
        __atomic_store_n(&slot->generation, generation, __ATOMIC_RELEASE);
        member->mine = slot;
        member->slot = i;
        key->word = (uint64_t)generation << 32 | (i + 1);
        key->lock = &map->lock;
        if (!ledger_lock_take(member)) {
            vgpu_log_line(LOG_ERROR, "ledger %s: its lock is held by a process that does not run; no context is created",
                          member->path);
            return false;
        }
        for (int device = 0; device < VGPU_MAX_DEVICES; device++)
            slot->used[device] = slot->context[device] = 0;
        for (int device = 0; device < VGPU_LEDGER_EXPORTED_DEVICES; device++)
            slot->exported_mib[device] = 0;
        slot->pid = (uint32_t)getpid();
        slot->pid_namespace = ledger_pid_namespace();
        if (map->slot_high <= i)
            map->slot_high = i + 1;
        ledger_recount(member);
        ledger_lock_drop(member);
        return true;
    }
    vgpu_log_line(LOG_ERROR, "ledger %s: all %u slots are taken by processes; no context is created", member->path,
                  VGPU_LEDGER_SLOTS);
    return false;
}

void ledger_open_short_way(int device, int at)
{
    struct membership *first = &ledger_members[0];
    vgpu_counters[device].total = &first->map->total[at];
    __atomic_store_n(&vgpu_counters[device].slot, &first->mine->used[at], __ATOMIC_RELEASE);
}

static bool join_one(struct membership *member)
{
    const char *path = limits_ledger_path(member->share);
    if (strlen(path) >= sizeof member->path) {
        vgpu_log_line(LOG_ERROR, "ledger %.64s…: its path is longer than %zu bytes; no context is created", path,
                      sizeof member->path - 1);
        return false;
    }
    memcpy(member->path, path, strlen(path) + 1);
    int descriptor = ledger_file_open(path, member->share, true);
    if (descriptor < 0)
        return false;
    bool twice = !ledger_file_identity(descriptor, member->file);
    for (unsigned share = 0; share < member->share; share++)
        twice = twice || memcmp(member->file, ledger_members[share].file, sizeof member->file) == 0;
    if (twice) {
        vgpu_log_line(LOG_ERROR, "ledger %s: it is also the ledger of another share; no context is created", path);
        close(descriptor);
        return false;
    }
    void *map = mmap(NULL, VGPU_LEDGER_FILE_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    bool joined = map != MAP_FAILED && madvise(map, VGPU_LEDGER_FILE_SIZE, MADV_DONTFORK) == 0 && claim(member, descriptor, map);
    close(descriptor);
    if (map == MAP_FAILED)
        vgpu_log_line(LOG_ERROR, "ledger %s cannot be mapped; no context is created", path);
    else if (!joined)
        munmap(map, VGPU_LEDGER_FILE_SIZE);
    return joined;
}

/* Joins the ledgers of all shares, or none. Returns false if any of them cannot be joined. */
static bool join(void)
{
    unsigned shares = limits_shares(), joined = 0;
    memset(ledger_members, 0, sizeof ledger_members);
    for (; joined < shares; joined++) {
        ledger_members[joined].share = joined;
        if (!join_one(&ledger_members[joined]))
            break;
    }
    if (joined < shares) {
        while (joined-- > 0)
            munmap(ledger_members[joined].map, VGPU_LEDGER_FILE_SIZE); /* Unmapping the ledger frees the slot. */
        return false;
    }
    seats_begin(shares);
    for (int device = 0; device < VGPU_MAX_DEVICES; device++) {
        vgpu_counters[device].device = device;
        if (shares == 1)
            ledger_open_short_way(device, device);
    }
    char uuids[VGPU_MAX_DEVICES][VGPU_UUID_SIZE];
    for (int i = 0, devices = shares == 1 ? 0 : limits_devices(uuids); i < devices; i++)
        seats_add(uuids[i]);
    atomic_store_explicit(&ledger_members[0].joined, true, memory_order_release);
    return true;
}

bool ledger_join(void)
{
    if (is_member())
        return true;
    char uuids[VGPU_MAX_DEVICES][VGPU_UUID_SIZE];
    lock_take(&join_lock);
    bool joined = is_member() || join();
    lock_drop(&join_lock);
    if (!joined)
        return false;
    int devices = limits_devices(uuids);
    for (int i = 0; i < devices; i++)
        ledger_device(uuids[i]);
    return true;
}

int ledger_device_index(const struct vgpu_ledger *ledger, const char *uuid)
{
    uint32_t count = __atomic_load_n(&ledger->device_count, __ATOMIC_ACQUIRE);
    for (uint32_t i = 0; i < count && i < VGPU_MAX_DEVICES; i++)
        if (uuid_same(ledger->devices[i], uuid))
            return (int)i;
    return -1;
}

int ledger_device(const char *uuid)
{
    int index = is_member() ? seats_find(uuid) : -1;
    if (index >= 0 || !is_member())
        return index;
    lock_take(&join_lock);
    index = seats_add(uuid);
    lock_drop(&join_lock);
    return index;
}

_Static_assert(offsetof(struct vgpu_ledger_slot, context) == VGPU_MAX_DEVICES * sizeof(uint64_t), "one array after the other");

/* Subtracts the bytes of pending uncharges; the caller holds the lock. The flag ledger_owes is cleared before the
 * amounts are read, because an uncharge that arrives meanwhile sets it again. */
static __attribute__((noinline)) void pay_owed(void)
{
    atomic_store(&ledger_owes, false);
    for (int account = ACCOUNT_USED; account <= ACCOUNT_CONTEXT; account++)
        for (int device = 0; device < VGPU_MAX_DEVICES; device++) {
            uint64_t owed = atomic_exchange(&ledger_members[0].owed[account][device], 0);
            if (owed)
                counters_give_back(counters_of(device), (enum account)account, owed);
        }
}

static inline bool owes(void)
{
    return atomic_load_explicit(&ledger_owes, memory_order_relaxed);
}

static __attribute__((noinline)) enum charge charge_slowly(int device, enum account account, uint64_t bytes, uint64_t limit)
{
    if (!is_member() || device < 0)
        return CHARGE_BROKEN;
    if (seats_several(device))
        return seats_charge(device, account, bytes, limit);
    struct membership *first = &ledger_members[0];
    if (!ledger_lock_take(first)) {
        vgpu_log_line(LOG_ERROR, "ledger %s: its lock is held by a process that does not run", first->path);
        return CHARGE_BROKEN;
    }
    if (owes())
        pay_owed();
    bool done = counters_charge(counters_of(device), account, bytes, limit);
    if (!done) {
        ledger_reap(first);
        done = counters_charge(counters_of(device), account, bytes, limit);
    }
    ledger_lock_drop(first);
    return done ? CHARGE_OK : CHARGE_FULL;
}

enum charge ledger_charge(int device, enum account account, uint64_t bytes, uint64_t limit)
{
    if (__builtin_expect(device >= 0 && counters_charged(counters_of(device), account, bytes, limit), 1))
        return CHARGE_OK;
    return charge_slowly(device, account, bytes, limit);
}

/* Uncharges bytes if the fast path could not do so. The amount is recorded first, so that the next lock holder can
 * subtract it if this thread does not get the lock. */
static __attribute__((noinline)) void uncharge_slowly(int device, enum account account, uint64_t bytes)
{
    if (!is_member() || device < 0 || bytes == 0)
        return;
    if (seats_several(device)) {
        seats_uncharge(device, account, bytes);
        return;
    }
    atomic_fetch_add(&ledger_members[0].owed[account][device], bytes);
    atomic_store(&ledger_owes, true);
    if (!ledger_lock_take(&ledger_members[0]))
        return; /* The lock was not obtained. The next charge or uncharge also subtracts the recorded bytes. */
    pay_owed();
    ledger_lock_drop(&ledger_members[0]);
}

void ledger_uncharge(int device, enum account account, uint64_t bytes)
{
    if (!__builtin_expect(device >= 0 && counters_uncharged(counters_of(device), account, bytes), 1))
        uncharge_slowly(device, account, bytes);
}

uint64_t ledger_own(int device, enum account account)
{
    return device < 0 ? 0 : __atomic_load_n(&vgpu_counters[device].own[account], __ATOMIC_RELAXED);
}

/* Called if other processes of the container are charged for the device. Clears the slots of dead processes, at most
 * once per REAP_EVERY_NS. */
static __attribute__((noinline)) void look_who_lives(int device)
{
    unsigned count;
    const struct seat *seats = seats_of(device, &count);
    for (unsigned i = 0; i < count; i++) {
        struct membership *member = seats[i].member;
        if (ledger_clock() - __atomic_load_n(&member->reaped_ns, __ATOMIC_RELAXED) <= REAP_EVERY_NS || !ledger_lock_take(member))
            continue;
        if (owes() && member->share == 0)
            pay_owed();
        ledger_reap(member);
        ledger_lock_drop(member);
    }
}

bool ledger_total(const char *uuid, uint64_t *bytes)
{
    if (!is_member())
        return ledger_view_total(uuid, bytes);
    int device = seats_find(uuid);
    *bytes = 0;
    if (device < 0)
        return true;
    uint64_t own = ledger_own(device, ACCOUNT_USED) + ledger_own(device, ACCOUNT_CONTEXT);
    const uint64_t *total = &ledger_members[0].map->total[device];
    *bytes = ledger_several ? seats_total(device) : __atomic_load_n(total, __ATOMIC_RELAXED);
    if (*bytes != own) {
        look_who_lives(device);
        *bytes = ledger_several ? seats_total(device) : __atomic_load_n(total, __ATOMIC_RELAXED);
    }
    return true;
}

uint64_t ledger_beyond(const char *uuid)
{
    if (!is_member())
        return ledger_view_beyond(uuid);
    int device = seats_find(uuid);
    if (device < 0)
        return 0;
    struct seat home = seats_home(device);
    return __atomic_load_n(&home.member->map->beyond_bytes[home.at], __ATOMIC_RELAXED);
}

void ledger_beyond_is(int device, uint64_t bytes)
{
    if (!is_member() || device < 0)
        return;
    struct seat home = seats_home(device);
    __atomic_store_n(&home.member->map->beyond_bytes[home.at], bytes, __ATOMIC_RELAXED);
}

static uint64_t *context_bytes(int device)
{
    struct seat home = seats_home(device);
    return &home.member->map->context_bytes[home.at];
}

uint64_t ledger_context_bytes(int device)
{
    return is_member() && device >= 0 ? __atomic_load_n(context_bytes(device), __ATOMIC_RELAXED) : 0;
}

void ledger_learn_context(int device, uint64_t bytes)
{
    if (is_member() && device >= 0)
        __atomic_store_n(context_bytes(device), bytes, __ATOMIC_RELAXED);
}

/* --- memory that other processes have open --------------------------------------------------------------- */

void ledger_export(int device, uint64_t bytes, bool more)
{
    unsigned count;
    if (!is_member() || device < 0)
        return;
    const struct seat *seats = seats_of(device, &count);
    lock_take(&export_lock);
    /* Record the export in each ledger, because no record says where a block was charged. After this process's death
     * each ledger keeps the open bytes charged, but at most what this process was charged there. */
    for (unsigned i = 0; i < count; i++) {
        if (seats[i].at >= VGPU_LEDGER_EXPORTED_DEVICES)
            continue;
        uint64_t *exported = &seats[i].member->exported[seats[i].at];
        *exported = more ? *exported + bytes : *exported - (bytes < *exported ? bytes : *exported);
        uint64_t mib = (*exported + MIB - 1) / MIB;
        __atomic_store_n(&seats[i].member->mine->exported_mib[seats[i].at], mib < UINT32_MAX ? (uint32_t)mib : UINT32_MAX,
                         __ATOMIC_RELAXED);
    }
    lock_drop(&export_lock);
}

/* Returns 1 if a process has a lock on the byte (0: on the byte of any handle) in the ledger of any share, 0 if none
 * does, -1 if that is unknown. */
static int held_anywhere(uint64_t byte)
{
    int held = 0;
    for (unsigned share = 0; share < limits_shares() && held == 0; share++) {
        int descriptor = ledger_file_again(&ledger_members[share], false);
        if (descriptor < 0)
            return -1;
        held = byte ? ledger_byte_held(descriptor, byte)
                    : ledger_range_held(descriptor, VGPU_LEDGER_IMPORT_BASE, VGPU_LEDGER_IMPORT_SPAN);
        close(descriptor);
    }
    return held;
}

bool ledger_import_open(uint64_t byte)
{
    return held_anywhere(byte) != 0;
}

bool ledger_made_here(uint64_t byte)
{
    return held_anywhere(byte) == 1;
}

static void *import_from(const struct membership *member, uint64_t byte)
{
    void *import = MAP_FAILED;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    int descriptor = ledger_file_again(member, false);
    if (descriptor >= 0 && ledger_byte_share(descriptor, byte))
        import = mmap(NULL, page, PROT_READ, MAP_SHARED, descriptor, 0);
    if (import != MAP_FAILED && madvise(import, page, MADV_DONTFORK) != 0) {
        munmap(import, page);
        import = MAP_FAILED;
    }
    if (descriptor >= 0)
        close(descriptor);
    return import == MAP_FAILED ? NULL : import;
}

/* The locks of one import. An import locks its byte in the ledger of each share, because the process that exported the
 * memory may be charged in any of these ledgers. */
struct import {
    unsigned count;
    void *map[VGPU_MAX_SHARES];
};

void *ledger_import(uint64_t byte)
{
    struct import *import = calloc(1, sizeof *import);
    /* The join lock (which protects joining a ledger) is also taken around fork(), so no child is forked meanwhile. A
     * child that inherited the descriptor would keep the lock on the byte after this process has ended. */
    lock_take(&join_lock);
    for (unsigned share = 0; import && is_member() && share < limits_shares(); share++)
        if ((import->map[import->count] = import_from(&ledger_members[share], byte)) != NULL)
            import->count++;
    bool whole = import && is_member() && import->count == limits_shares();
    lock_drop(&join_lock);
    if (whole)
        return import;
    ledger_import_end(import);
    return NULL;
}

void ledger_import_end(void *held)
{
    struct import *import = held;
    for (unsigned i = 0; import && i < import->count; i++)
        munmap(import->map[i], (size_t)sysconf(_SC_PAGESIZE));
    free(import);
}

static void measure_close(int descriptor, int device)
{
    atomic_store_explicit(&measuring[device], 0, memory_order_relaxed);
    close(descriptor);
}

int ledger_measure_begin(int device)
{
    struct seat home = seats_home(device);
    /* No child can be forked between opening the descriptor and recording it, because the join lock is also taken
     * around fork(). */
    lock_take(&join_lock);
    int descriptor = ledger_file_again(home.member, true);
    atomic_store_explicit(&measuring[device], descriptor + 1, memory_order_relaxed);
    lock_drop(&join_lock);
    if (descriptor < 0)
        return -1;
    for (int waited = 0; waited < MEASURE_PATIENCE_MS; waited += 2) {
        if (ledger_byte_take(descriptor, VGPU_LEDGER_CONTEXT_BASE + (uint64_t)home.at))
            return descriptor;
        nanosleep(&(struct timespec){0, 2000000}, NULL);
    }
    measure_close(descriptor, device);
    vgpu_log_line(LOG_ERROR, "ledger %s: another process has been creating a context for a minute", home.member->path);
    return -1;
}

void ledger_measure_end(int handle, int device)
{
    if (handle < 0)
        return;
    /* Unlock explicitly: a child forked meanwhile has the descriptor too, so closing it here would not release the
     * lock. */
    ledger_byte_drop(handle, VGPU_LEDGER_CONTEXT_BASE + (uint64_t)seats_home(device).at);
    measure_close(handle, device);
}

void ledger_hold(void)
{
    lock_take(&join_lock);
}

void ledger_release(void)
{
    lock_drop(&join_lock);
}

void ledger_reset(void)
{
    /* Close the descriptor of a parent that was measuring. Otherwise this child would keep the lock after the parent's
     * death. */
    for (int device = 0; device < VGPU_MAX_DEVICES; device++) {
        uint64_t file[2];
        int descriptor = atomic_exchange_explicit(&measuring[device], 0, memory_order_relaxed) - 1;
        if (descriptor >= 0 && ledger_file_identity(descriptor, file) &&
            memcmp(file, seats_home(device).member->file, sizeof file) == 0)
            close(descriptor);
    }
    /* This child inherited neither the mapping nor the parent's slot. */
    memset(ledger_members, 0, sizeof ledger_members);
    seats_reset();
    memset(vgpu_counters, 0, sizeof vgpu_counters);
    atomic_store(&ledger_owes, false);
    atomic_store_explicit(&join_lock.word, 0, memory_order_relaxed);
    atomic_store_explicit(&export_lock.word, 0, memory_order_relaxed);
}
