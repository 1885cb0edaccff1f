/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The container's account of device memory. A process owns a slot for as long as it has the ledger mapped.
 *
 * Being alive is a lock on one byte of the file, held by the open file description that the mapping was made from. The
 * descriptor itself is closed at once and the mapping is not passed on at fork. So the slot ends when this process's
 * memory ends: a program that closes all its descriptors stays charged, a child does not keep its parent's slot, and a
 * new image after exec starts without one.
 */
#include "ledger.h"

#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define REAP_EVERY_NS 100000000ull
#define MEASURE_PATIENCE_MS 60000

struct membership ledger_self;
struct counters vgpu_counters[VGPU_MAX_DEVICES];
struct ledger_key ledger_key;
_Atomic bool ledger_owes;
static struct lock join_lock, export_lock;
static _Atomic int measuring[VGPU_MAX_DEVICES]; /* descriptor + 1 through which this process holds that lock */

static bool is_member(void)
{
    return atomic_load_explicit(&ledger_self.joined, memory_order_acquire);
}

static bool claim(int descriptor, struct vgpu_ledger *map)
{
    ledger_self.map = map;
    for (uint32_t i = 0; i < VGPU_LEDGER_SLOTS; i++) {
        if (!ledger_byte_take(descriptor, VGPU_LEDGER_ALIVE_BASE + i))
            continue;
        struct vgpu_ledger_slot *slot = ledger_slot(map, i);
        if (ledger_slot_exported(descriptor, map, slot)) {
            ledger_byte_drop(descriptor, VGPU_LEDGER_ALIVE_BASE + i);
            continue;
        }
        uint32_t generation = slot->generation + 1;
        /* From here on a lock word of the slot's last owner is known to be dead. */
        __atomic_store_n(&slot->generation, generation, __ATOMIC_RELEASE);
        ledger_self.mine = slot;
        ledger_self.slot = i;
        ledger_key.word = (uint64_t)generation << 32 | (i + 1);
        ledger_key.lock = &map->lock;
        if (!ledger_lock_take()) {
            vgpu_log_line(LOG_ERROR, "ledger %s: its lock is held by a process that does not run; no context is created",
                          ledger_self.path);
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
        ledger_recount();
        ledger_lock_drop();
        for (int device = 0; device < VGPU_MAX_DEVICES; device++) {
            vgpu_counters[device].device = device;
            vgpu_counters[device].total = &map->total[device];
            __atomic_store_n(&vgpu_counters[device].slot, &slot->used[device], __ATOMIC_RELEASE);
        }
        atomic_store_explicit(&ledger_self.joined, true, memory_order_release);
        return true;
    }
    vgpu_log_line(LOG_ERROR, "ledger %s: all %u slots are taken by processes; no context is created", ledger_self.path,
                  VGPU_LEDGER_SLOTS);
    return false;
}

static bool join(void)
{
    const char *path = limits_ledger_path();
    if (strlen(path) >= sizeof ledger_self.path) {
        vgpu_log_line(LOG_ERROR, "ledger %.64s…: its path is longer than %zu bytes; no context is created", path,
                      sizeof ledger_self.path - 1);
        return false;
    }
    memset(&ledger_self, 0, sizeof ledger_self);
    memcpy(ledger_self.path, path, strlen(path) + 1);
    int descriptor = ledger_file_open(path, true);
    if (descriptor < 0)
        return false;
    void *map = mmap(NULL, VGPU_LEDGER_FILE_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    bool joined = map != MAP_FAILED && ledger_file_identity(descriptor, ledger_self.file) && madvise(map, VGPU_LEDGER_FILE_SIZE, MADV_DONTFORK) == 0 && claim(descriptor, map);
    close(descriptor);
    if (map == MAP_FAILED)
        vgpu_log_line(LOG_ERROR, "ledger %s cannot be mapped; no context is created", path);
    else if (!joined)
        munmap(map, VGPU_LEDGER_FILE_SIZE);
    return joined;
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
    struct vgpu_ledger *ledger = ledger_self.map;
    if (!is_member())
        return -1;
    int index = ledger_device_index(ledger, uuid);
    if (index >= 0 || !ledger_lock_take())
        return index;
    index = ledger_device_index(ledger, uuid);
    if (index < 0 && ledger->device_count < VGPU_MAX_DEVICES) {
        index = (int)ledger->device_count;
        memset(ledger->devices[index], 0, VGPU_UUID_SIZE);
        memcpy(ledger->devices[index], uuid, strnlen(uuid, VGPU_UUID_SIZE - 1));
        __atomic_store_n(&ledger->device_count, (uint32_t)index + 1, __ATOMIC_RELEASE);
    }
    ledger_lock_drop();
    return index;
}

_Static_assert(offsetof(struct vgpu_ledger_slot, context) == VGPU_MAX_DEVICES * sizeof(uint64_t), "one array after the other");

/* Lock held. The mark falls before the debts are read: one that is written down meanwhile raises it again. */
static __attribute__((noinline)) void pay_owed(void)
{
    atomic_store(&ledger_owes, false);
    for (int account = ACCOUNT_USED; account <= ACCOUNT_CONTEXT; account++)
        for (int device = 0; device < VGPU_MAX_DEVICES; device++) {
            uint64_t owed = atomic_exchange(&ledger_self.owed[account][device], 0);
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
    if (!ledger_lock_take()) {
        vgpu_log_line(LOG_ERROR, "ledger %s: its lock is held by a process that does not run", ledger_self.path);
        return CHARGE_BROKEN;
    }
    if (owes())
        pay_owed();
    bool done = counters_charge(counters_of(device), account, bytes, limit);
    if (!done) {
        ledger_reap();
        done = counters_charge(counters_of(device), account, bytes, limit);
    }
    ledger_lock_drop();
    return done ? CHARGE_OK : CHARGE_FULL;
}

enum charge ledger_charge(int device, enum account account, uint64_t bytes, uint64_t limit)
{
    if (__builtin_expect(device >= 0 && counters_charged(counters_of(device), account, bytes, limit), 1))
        return CHARGE_OK;
    return charge_slowly(device, account, bytes, limit);
}

/* The lock is held by another: the debt is written down first, so that the next holder of the lock may pay it. */
static __attribute__((noinline)) void uncharge_slowly(int device, enum account account, uint64_t bytes)
{
    if (!is_member() || device < 0 || bytes == 0)
        return;
    atomic_fetch_add(&ledger_self.owed[account][device], bytes);
    atomic_store(&ledger_owes, true);
    if (!ledger_lock_take())
        return; /* paid by the next charge */
    pay_owed();
    ledger_lock_drop();
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

bool ledger_total(const char *uuid, uint64_t *bytes)
{
    if (!is_member())
        return ledger_view_total(uuid, bytes);
    struct vgpu_ledger *ledger = ledger_self.map;
    int device = ledger_device_index(ledger, uuid);
    *bytes = 0;
    if (device < 0)
        return true;
    uint64_t own = ledger_own(device, ACCOUNT_USED) + ledger_own(device, ACCOUNT_CONTEXT);
    *bytes = __atomic_load_n(&ledger->total[device], __ATOMIC_RELAXED);
    /* Others hold something: look now and then whether they still live. */
    if (*bytes != own && ledger_clock() - __atomic_load_n(&ledger_self.reaped_ns, __ATOMIC_RELAXED) > REAP_EVERY_NS &&
        ledger_lock_take()) {
        if (owes())
            pay_owed();
        ledger_reap();
        *bytes = ledger->total[device];
        ledger_lock_drop();
    }
    return true;
}

uint64_t ledger_beyond(const char *uuid)
{
    if (!is_member())
        return ledger_view_beyond(uuid);
    int device = ledger_device_index(ledger_self.map, uuid);
    return device < 0 ? 0 : __atomic_load_n(&ledger_self.map->beyond_bytes[device], __ATOMIC_RELAXED);
}

void ledger_beyond_is(int device, uint64_t bytes)
{
    if (is_member() && device >= 0)
        __atomic_store_n(&ledger_self.map->beyond_bytes[device], bytes, __ATOMIC_RELAXED);
}

uint64_t ledger_context_bytes(int device)
{
    return is_member() && device >= 0 ? __atomic_load_n(&ledger_self.map->context_bytes[device], __ATOMIC_RELAXED) : 0;
}

void ledger_learn_context(int device, uint64_t bytes)
{
    if (is_member() && device >= 0)
        __atomic_store_n(&ledger_self.map->context_bytes[device], bytes, __ATOMIC_RELAXED);
}

/* --- memory that others have open ---------------------------------------------------------------------- */

void ledger_export(int device, uint64_t bytes, bool more)
{
    if (!is_member() || device < 0 || device >= VGPU_LEDGER_EXPORTED_DEVICES)
        return;
    lock_take(&export_lock);
    uint64_t *exported = &ledger_self.exported[device];
    *exported = more ? *exported + bytes : *exported - (bytes < *exported ? bytes : *exported);
    uint64_t mib = (*exported + MIB - 1) / MIB;
    __atomic_store_n(&ledger_self.mine->exported_mib[device], mib < UINT32_MAX ? (uint32_t)mib : UINT32_MAX, __ATOMIC_RELAXED);
    lock_drop(&export_lock);
}

bool ledger_import_open(uint64_t byte)
{
    int descriptor = ledger_file_again(false);
    if (descriptor < 0)
        return true;
    int held = byte ? ledger_byte_held(descriptor, byte)
                    : ledger_range_held(descriptor, VGPU_LEDGER_IMPORT_BASE, VGPU_LEDGER_IMPORT_SPAN);
    close(descriptor);
    return held != 0;
}

bool ledger_made_here(uint64_t byte)
{
    int descriptor = ledger_file_again(false);
    bool made = descriptor >= 0 && ledger_byte_held(descriptor, byte) == 1;
    if (descriptor >= 0)
        close(descriptor);
    return made;
}

void *ledger_import(uint64_t byte)
{
    void *import = MAP_FAILED;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    lock_take(&join_lock); /* no child may get the descriptor: it would hold the lock after us */
    int descriptor = is_member() ? ledger_file_again(false) : -1;
    if (descriptor >= 0 && ledger_byte_share(descriptor, byte))
        import = mmap(NULL, page, PROT_READ, MAP_SHARED, descriptor, 0);
    if (import != MAP_FAILED && madvise(import, page, MADV_DONTFORK) != 0) {
        munmap(import, page);
        import = MAP_FAILED;
    }
    if (descriptor >= 0)
        close(descriptor);
    lock_drop(&join_lock);
    return import == MAP_FAILED ? NULL : import;
}

void ledger_import_end(void *import)
{
    if (import)
        munmap(import, (size_t)sysconf(_SC_PAGESIZE));
}

static void measure_close(int descriptor, int device)
{
    atomic_store_explicit(&measuring[device], 0, memory_order_relaxed);
    close(descriptor);
}

int ledger_measure_begin(int device)
{
    lock_take(&join_lock); /* no fork between the two lines */
    int descriptor = ledger_file_again(true);
    atomic_store_explicit(&measuring[device], descriptor + 1, memory_order_relaxed);
    lock_drop(&join_lock);
    if (descriptor < 0)
        return -1;
    for (int waited = 0; waited < MEASURE_PATIENCE_MS; waited += 2) {
        if (ledger_byte_take(descriptor, VGPU_LEDGER_CONTEXT_BASE + (uint64_t)device))
            return descriptor;
        nanosleep(&(struct timespec){0, 2000000}, NULL);
    }
    measure_close(descriptor, device);
    vgpu_log_line(LOG_ERROR, "ledger %s: another process has been creating a context for a minute", ledger_self.path);
    return -1;
}

void ledger_measure_end(int handle, int device)
{
    if (handle < 0)
        return;
    /* Dropped by name: a child that was forked meanwhile has the descriptor too. */
    ledger_byte_drop(handle, VGPU_LEDGER_CONTEXT_BASE + (uint64_t)device);
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
    /* A child that kept the descriptor of a measuring parent would hold the lock after the parent's death. */
    for (int device = 0; device < VGPU_MAX_DEVICES; device++) {
        uint64_t file[2];
        int descriptor = atomic_exchange_explicit(&measuring[device], 0, memory_order_relaxed) - 1;
        if (descriptor >= 0 && ledger_file_identity(descriptor, file) && memcmp(file, ledger_self.file, sizeof file) == 0)
            close(descriptor);
    }
    /* The mapping was not passed on to this child, nor was the parent's slot. */
    memset(&ledger_self, 0, sizeof ledger_self);
    memset(vgpu_counters, 0, sizeof vgpu_counters);
    atomic_store(&ledger_owes, false);
    atomic_store_explicit(&join_lock.word, 0, memory_order_relaxed);
    atomic_store_explicit(&export_lock.word, 0, memory_order_relaxed);
}
