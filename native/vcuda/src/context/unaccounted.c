/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the driver takes without being asked: code, stacks and heaps; contexts that no hook saw made; sizes rounded up to its unit
 * (a tenant that asks for many pieces just above it would hold twice what it is charged), blocks of small pieces that are half
 * empty, and what reaches the card by other ways than CUDA.
 *
 * Nobody can say when it comes. So the bytes that NVML shows for this very process are compared with what it is charged: after
 * each load, and whenever its allocations have grown or shrunk by a step since the last time. What is on the card beyond the
 * charge is charged with the contexts, as far as the limit has room. More would only be a figure, for it is there already; but as
 * long as there is more nothing is granted. Within a step nothing is asked, so an allocation that fits makes no system call but
 * once in a step.
 *
 * Where a thread stays inside an allocation the figures cannot be read together: nobody waits for that, and a later step looks.
 * Until then a charge that is too high stays, for a free that was under way may have been in the figure: of such a look it is
 * only raised.
 *
 * Where NVML does not show this process, the addresses tell of its plain memory: the driver backs it in units of its own, and
 * a unit is held as long as a block lies in it. That is what the card holds for them however full it is of neighbours. A
 * context that no hook saw counts as much as one costs there. Of the rest (code, padding of arrays, graphics) nothing is known.
 */
#include "context.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#define AGAIN_NS 50000000ull /* after a look that saw nothing, for a thread stayed inside an allocation */
#define LATE_NS 2000000000ull /* between two looks for code that a launch brought */
#define STEP_LEAST (32 * MIB)
#define UNIT (2 * MIB) /* in which the driver backs plain memory; smaller blocks share one */
#define STEP_PART 32 /* of what is in use: filling a slice costs some two hundred looks, however large it is */

static struct unaccounted {
    const struct device *_Atomic device; /* NULL: no context of this process there yet, or no limit */
    uint64_t charged;                    /* context lock held */
    _Atomic uint64_t over;               /* what else is there, and had no room */
    _Atomic uint64_t unseen;             /* of contexts that no hook saw, where NVML hides this process */
    _Atomic uint64_t again;              /* no look before that time */
} unaccounted_of[VGPU_MAX_DEVICES];

static _Atomic uint64_t late; /* the time to look for what launches brought; 0: no code was loaded */

static void set_marks(const struct unaccounted *unaccounted, int device, bool looked)
{
    uint64_t used = ledger_own(device, ACCOUNT_USED), step = used / STEP_PART > STEP_LEAST ? used / STEP_PART : STEP_LEAST;
    if (atomic_load_explicit(&vgpu_forms_linked, memory_order_relaxed))
        step = 0; /* nobody sees when such a form is called */
    uint64_t low = used > step ? used - step : 0;
    if (!low && unaccounted->charged && used)
        low = 1; /* with the last allocation it goes, most likely */
    if (atomic_load_explicit(&unaccounted->over, memory_order_relaxed)) {
        low = used; /* with the first byte that is given back there is room for some of it */
        step = 0;
    }
    atomic_store_explicit(&vgpu_counters[device].low, looked ? low : 0, memory_order_relaxed);
    atomic_store_explicit(&vgpu_counters[device].span, looked ? used - low + step : UINT64_MAX, memory_order_relaxed);
}

/* What of `bytes` the limit has room for, charged. */
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

/* --- where NVML does not show this process ------------------------------------------------------------ */

/* The units at the two ends of every block, each once: what lies between is the block's alone. */
struct units {
    int device;
    size_t blocks, capacity; /* capacity: a power of two above two units for each block */
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

/* Blocks that came since they were counted may find no place: each of their ends then counts for itself. */
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

/* What the units of this process's plain memory hold beyond the bytes that it was charged; false: no host memory to tell. */
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
    /* The parts are looked at one after the other: what was freed and taken again meanwhile may have counted twice. */
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
        device_forget_contexts(); /* the next allocation of each thread asks context_met */
}

enum looked unaccounted_look_locked(const struct device *device)
{
    int index = device->ledger;
    struct unaccounted *unaccounted = &unaccounted_of[index];
    struct measure now = {.nvml = false};
    uint64_t beyond = 0;
    if (!atomic_load_explicit(&unaccounted->device, memory_order_relaxed))
        return LOOKED_HIDDEN; /* without a limit */
    /* Where contexts do not count, nobody can tell them from the rest of NVML's figure, and NVML is not opened for it. */
    if (limits_count_context())
        measure_now(&now, device);
    if (now.nvml && !now.quiet) {
        atomic_store_explicit(&unaccounted->again, now_ns() + AGAIN_NS, memory_order_relaxed);
        unaccounted_due(index);
        return LOOKED_NOT;
    }
    bool seen = now.nvml && now.own > 0;
    if (seen) {
        uint64_t known = now.charged + ledger_own(index, ACCOUNT_CONTEXT) - unaccounted->charged;
        beyond = now.own > known ? now.own - known : 0;
        raise_to(unaccounted, device, beyond, !now.frees);
    } else if (beyond_by_address(index, &beyond)) {
        raise_to(unaccounted, device, beyond + atomic_load_explicit(&unaccounted->unseen, memory_order_relaxed), true);
    }
    set_marks(unaccounted, index, true);
    /* Raised by the lines above, where it is not to be looked at again for a free that is under way. */
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

/* A library's kernel comes with its first launch, and the data of the library with it. */
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
    unaccounted_due(device); /* who ended it looks how much of it is gone, with the lock */
}

void unaccounted_reset(void)
{
    memset(unaccounted_of, 0, sizeof unaccounted_of);
    atomic_store_explicit(&late, 0, memory_order_relaxed);
}
