/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Charges GPU memory that the driver uses beyond this process's allocations, here called unaccounted memory: code,
 * stacks and heaps; contexts that were created without a hook of this library (replacement of a driver function);
 * padding to the driver's unit (an allocation just above a unit uses almost two units); half-empty blocks of small
 * allocations; and memory of other APIs than CUDA.
 *
 * Such memory can appear at any time. So the library compares the bytes that NVML shows for this process with the
 * process's charge. It does so after each load of code, and whenever the process's allocations have grown or shrunk by
 * a step (1/32 of the usage, at least 32 MiB) since the last comparison. The difference is charged to the context
 * account, up to the limit. While there is a difference beyond the limit, every allocation fails. Most allocations do
 * not complete a step, so they need no comparison and no system call.
 *
 * While a thread is inside an allocation or a free, the charge is only raised, because NVML's figure may not yet contain
 * the allocated memory, or may already lack the freed memory. After an allocation the comparison is repeated.
 *
 * If NVML does not show this process, the difference is computed from the addresses of its plain memory (ordinary
 * allocations). The driver backs plain memory in units and keeps a unit while any block lies in it. Other containers do
 * not affect this figure. A context that no hook saw counts as one context. Other memory (code, padding of arrays,
 * graphics) remains unknown.
 */
#include "context.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Pause after a comparison during which a thread stayed inside an allocation. */
#define AGAIN_NS 50000000ull
/* Interval between comparisons that look for code that launches have loaded. */
#define LATE_NS 2000000000ull
#define STEP_LEAST (32 * MIB)
/* The driver backs plain memory (ordinary allocations) in units of this size. Several smaller blocks share a unit. */
#define UNIT (2 * MIB)
/* The figures are compared again when the allocations have changed by a step, which is this fraction of the usage. So a
 * program that fills its limit causes about two hundred comparisons, whatever the limit is. */
#define STEP_PART 32

static struct unaccounted {
    /* NULL if this process has no context on the device yet or no limit applies. */
    const struct device *_Atomic device;
    /* Bytes charged by this file. Reading and writing it needs the context lock. */
    uint64_t charged;
    /* Bytes that could not be charged because they exceed the limit. */
    _Atomic uint64_t over;
    /* Bytes of contexts that no hook saw, used if NVML does not show this process. */
    _Atomic uint64_t unseen;
    /* Earliest time of the next comparison. */
    _Atomic uint64_t again;
} unaccounted_of[VGPU_MAX_DEVICES];

/* Earliest time of the next search for code that launches have loaded; 0: no code was loaded yet. */
static _Atomic uint64_t late;

/* Sets the range of the charge within which no comparison is needed. If `looked` is false, sets the widest range, so
 * that no comparison is ever needed. */
static void set_marks(const struct unaccounted *unaccounted, int device, bool looked)
{
    uint64_t used = ledger_own(device, ACCOUNT_USED), step = used / STEP_PART > STEP_LEAST ? used / STEP_PART : STEP_LEAST;
    if (atomic_load_explicit(&vgpu_forms_linked, memory_order_relaxed))
        /* The program calls driver functions of an unknown version, which have no hook, so compare at every change. */
        step = 0;
    uint64_t low = used > step ? used - step : 0;
    if (!low && unaccounted->charged && used)
        low = 1; /* The context probably ends after its last free, so compare when everything is freed. */
    if (atomic_load_explicit(&unaccounted->over, memory_order_relaxed)) {
        /* While the limit is exceeded, compare at the first freed byte, because part of the excess can then be
         * charged. */
        low = used;
        step = 0;
    }
    atomic_store_explicit(&vgpu_counters[device].low, looked ? low : 0, memory_order_relaxed);
    atomic_store_explicit(&vgpu_counters[device].span, looked ? used - low + step : UINT64_MAX, memory_order_relaxed);
}

/* Charges as many of `bytes` as fit the limit. Returns how many were charged. */
static uint64_t charge(const struct device *device, uint64_t bytes)
{
    bool known;
    uint64_t limit = device_limit(device, &known), total = 0;
    if (ledger_charge(device->ledger, ACCOUNT_CONTEXT, bytes, limit) == CHARGE_OK)
        return bytes;
    if (!ledger_total(device->uuid, &total) || total >= limit)
        return 0;
    bytes = bytes < limit - total ? bytes : limit - total;
    return ledger_charge(device->ledger, ACCOUNT_CONTEXT, bytes, limit) == CHARGE_OK ? bytes : 0;
}

/* --- if NVML does not show this process ---------------------------------------------------------------- */

/* Counts the units of memory in which blocks lie. `ends` is a hash set of the first and last unit of every block,
 * because other blocks may share these units. The units between them contain no other block, so they are only
 * counted. */
struct units {
    int device;
    size_t blocks, capacity; /* capacity: a power of two, more than two units for each block. */
    uint64_t *ends;
    uint64_t count, bytes;
};

static bool of_device(const struct block *block, const struct units *units)
{
    return block->device == units->device && block->bytes && (block->kind == BLOCK_PLAIN || block->kind == BLOCK_EXPORTED);
}

static bool count_block(const struct block *block, void *data)
{
    struct units *units = data;
    units->blocks += of_device(block, units);
    return false;
}

/* Adds a unit to the set. The set may be full if blocks were added after its size was computed. Then each further unit
 * is counted without a check whether it was counted before. */
static void add_end(struct units *units, uint64_t unit)
{
    size_t at = (unit * 0x9e3779b97f4a7c15ull) & (units->capacity - 1);
    for (size_t tries = 0; tries < units->capacity; tries++, at = (at + 1) & (units->capacity - 1)) {
        if (units->ends[at] == unit + 1)
            return;
        if (!units->ends[at]) {
            units->ends[at] = unit + 1;
            break;
        }
    }
    units->count++;
}

static bool add_block(const struct block *block, void *data)
{
    struct units *units = data;
    if (!of_device(block, units))
        return false;
    uint64_t first = block->key / UNIT, last = (block->key + block->bytes - 1) / UNIT;
    units->bytes += block->bytes;
    units->count += last - first > 1 ? last - first - 1 : 0;
    add_end(units, first);
    if (last != first)
        add_end(units, last);
    return false;
}

/* Computes by how many bytes the units of this process's plain memory exceed its allocations. Returns false if there
 * is no memory for the table. */
static bool beyond_by_address(int device, uint64_t *beyond)
{
    struct units units = {.device = device, .capacity = 64};
    block_sweep(&vgpu_memory, count_block, &units);
    while (units.capacity / 4 < units.blocks)
        units.capacity *= 2;
    units.ends = calloc(units.capacity, sizeof *units.ends);
    if (!units.ends)
        return false;
    block_sweep(&vgpu_memory, add_block, &units);
    free(units.ends);
    /* The parts of the map are read one after the other, so a block that was freed and allocated again may be counted
     * twice. */
    uint64_t held = units.count * UNIT;
    *beyond = held > units.bytes ? held - units.bytes : 0;
    return true;
}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

static void raise_to(struct unaccounted *unaccounted, const struct device *device, uint64_t beyond, bool sure)
{
    uint64_t charged = unaccounted->charged;
    if (beyond != charged)
        vgpu_log(LOG_DEBUG, "%llu bytes on %s were not asked for", (unsigned long long)beyond, device->uuid);
    if (beyond > charged) {
        unaccounted->charged += charge(device, beyond - charged);
    } else if (sure) {
        ledger_uncharge(device->ledger, ACCOUNT_CONTEXT, charged - beyond);
        unaccounted->charged = beyond;
    }
    uint64_t over = beyond > unaccounted->charged ? beyond - unaccounted->charged : 0;
    if (atomic_exchange_explicit(&unaccounted->over, over, memory_order_relaxed) == 0 && over)
        /* Makes the next allocation of each thread check its context again, so that it is refused. */
        device_forget_contexts();
}

enum looked unaccounted_look_locked(const struct device *device)
{
    int index = device->ledger;
    struct unaccounted *unaccounted = &unaccounted_of[index];
    struct measure now = {.nvml = false};
    uint64_t beyond = 0;
    if (!atomic_load_explicit(&unaccounted->device, memory_order_relaxed))
        return LOOKED_HIDDEN; /* No limit applies, so nothing is compared. */
    /* If contexts do not count against the limit, their memory cannot be separated from NVML's figure, so NVML is not
     * asked. */
    if (limits_count_context())
        measure_now(&now, device);
    bool seen = now.nvml && now.own > 0;
    if (seen && !now.forced) {
        uint64_t known = now.charged + ledger_own(index, ACCOUNT_CONTEXT) - unaccounted->charged;
        beyond = now.own > known ? now.own - known : 0;
        raise_to(unaccounted, device, beyond, now.quiet && !now.frees);
    }
    if (now.nvml && !now.quiet) {
        atomic_store_explicit(&unaccounted->again, now_ns() + AGAIN_NS, memory_order_relaxed);
        unaccounted_due(index);
        return LOOKED_NOT;
    }
    if (!seen && beyond_by_address(index, &beyond))
        raise_to(unaccounted, device, beyond + atomic_load_explicit(&unaccounted->unseen, memory_order_relaxed), true);
    set_marks(unaccounted, index, true);
    /* The lines above may have set `due`. It is cleared, so that a free that is still in progress does not cause
     * another comparison. */
    atomic_store_explicit(&vgpu_counters[index].due, 0, memory_order_relaxed);
    return seen ? LOOKED_AT : LOOKED_HIDDEN;
}

uint64_t unaccounted_look(const struct device *device)
{
    unaccounted_begin(device);
    if (context_try(device->ledger)) {
        unaccounted_look_locked(device);
        context_unlock(device->ledger, true);
    } else {
        unaccounted_due(device->ledger);
    }
    return unaccounted_over(device->ledger);
}

void unaccounted_settle(int index)
{
    struct unaccounted *unaccounted = &unaccounted_of[index];
    const struct device *device = device_in_ledger(index);
    atomic_store_explicit(&vgpu_counters[index].due, 0, memory_order_relaxed);
    if (!device)
        return;
    uint64_t again = atomic_load_explicit(&unaccounted->again, memory_order_relaxed);
    if (again && now_ns() < again)
        unaccounted_due(index);
    else
        unaccounted_look(device);
}

void unaccounted_due(int index)
{
    if (unaccounted_any(index))
        atomic_store_explicit(&vgpu_counters[index].due, 1, memory_order_relaxed);
}

/* Called when code was loaded, because a library's kernel and its data are loaded to the GPU only at the kernel's first
 * launch. */
void unaccounted_late(void)
{
    atomic_store_explicit(&late, now_ns() + LATE_NS, memory_order_relaxed);
}

void unaccounted_waited(bool done)
{
    uint64_t time = atomic_load_explicit(&late, memory_order_relaxed);
    if (!done || !time || now_ns() < time)
        return;
    unaccounted_late();
    for (int index = 0; index < VGPU_MAX_DEVICES; index++)
        if (unaccounted_any(index))
            unaccounted_settle(index);
}

bool unaccounted_any(int index)
{
    return atomic_load_explicit(&unaccounted_of[index].device, memory_order_relaxed) != NULL;
}

uint64_t unaccounted_over(int index)
{
    return atomic_load_explicit(&unaccounted_of[index].over, memory_order_relaxed);
}

void unaccounted_unseen(int index, uint64_t bytes, bool more)
{
    atomic_fetch_add_explicit(&unaccounted_of[index].unseen, more ? bytes : -bytes, memory_order_relaxed);
}

void unaccounted_begin(const struct device *device)
{
    struct unaccounted *unaccounted = &unaccounted_of[device->ledger];
    bool known;
    if (atomic_load_explicit(&unaccounted->device, memory_order_relaxed))
        return;
    if (device_limit(device, &known) == UINT64_MAX) {
        set_marks(unaccounted, device->ledger, false);
        return;
    }
    set_marks(unaccounted, device->ledger, true);
    atomic_store_explicit(&unaccounted->device, device, memory_order_release);
}

void unaccounted_context_left(struct leaving *leaving)
{
    int device = leaving->block.device;
    if (!leaving->ours || !leaving->gone)
        return;
    unaccounted_unseen(device, leaving->block.owner, false);
    unaccounted_due(device); /* The call that ended the context compares the figures after it has released the lock. */
}

void unaccounted_reset(void)
{
    memset(unaccounted_of, 0, sizeof unaccounted_of);
    atomic_store_explicit(&late, 0, memory_order_relaxed);
}
