/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the driver takes without being asked: sizes rounded up to its unit (a tenant that asks for many pieces just above
 * it would hold twice what it is charged), blocks of small pieces that are half empty, kernels that are loaded by their
 * first launch, local memory, and what reaches the card by other ways than CUDA.
 *
 * Nobody can say when it comes. So the bytes that NVML shows for this very process are compared with what it is charged,
 * now and then: whenever its allocations have grown or shrunk by a step since the last time. What is on the card beyond
 * the charge is charged with the contexts, as far as the limit has room: more would only be a figure, for it is there
 * already and nothing more is granted. Within a step nothing is asked, so an allocation that fits makes no system call but
 * once in a step.
 *
 * Where NVML does not show this process, the addresses tell of its plain memory: the driver backs it in units of its own, and
 * a unit is held as long as a block lies in it. That is what the card holds for them however full it is of neighbours. Of
 * the rest (padding of arrays, code that comes late, graphics) nothing is known there.
 */
#include "context.h"

#include <stdlib.h>
#include <string.h>

#define STEP_LEAST (32 * MIB)
#define UNIT (2 * MIB) /* in which the driver backs plain memory; smaller blocks share one */
#define STEP_PART 32 /* of what is in use: filling a slice costs some two hundred looks, however large it is */

static struct unaccounted {
    const struct device *_Atomic device; /* NULL: no context of this process there yet, or no limit */
    uint64_t charged;                    /* context lock held */
} unaccounted_of[VGPU_MAX_DEVICES];

static void set_marks(const struct unaccounted *unaccounted, int device, bool looked)
{
    uint64_t used = ledger_own(device, ACCOUNT_USED), step = used / STEP_PART > STEP_LEAST ? used / STEP_PART : STEP_LEAST;
    if (atomic_load_explicit(&vgpu_forms_linked, memory_order_relaxed))
        step = 0; /* nobody sees when such a form is called */
    uint64_t low = used > step ? used - step : 0;
    if (!low && unaccounted->charged && used)
        low = 1; /* with the last allocation it goes, most likely */
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

/* Context lock held. False: NVML's figure of this process tells nothing of its contexts. */
static bool settle(struct unaccounted *unaccounted, const struct device *device)
{
    int index = device->ledger;
    struct measure now;
    measure_begin(&now, device);
    /* Where contexts do not count, nobody can tell them from the rest of NVML's figure. */
    bool seen = limits_count_context() && now.nvml && now.own > 0, sure = seen && now.quiet;
    uint64_t beyond = 0;
    if (sure) {
        uint64_t known = now.charged + ledger_own(index, ACCOUNT_CONTEXT) - unaccounted->charged;
        beyond = now.own > known ? now.own - known : 0;
    } else if (!seen) {
        sure = beyond_by_address(index, &beyond);
    }
    if (sure) {
        if (beyond != unaccounted->charged)
            vgpu_log(LOG_DEBUG, "%llu bytes on %s were not asked for", (unsigned long long)beyond, device->uuid);
        if (beyond > unaccounted->charged) {
            unaccounted->charged += charge(device, beyond - unaccounted->charged);
        } else {
            ledger_uncharge(index, ACCOUNT_CONTEXT, unaccounted->charged - beyond);
            unaccounted->charged = beyond;
        }
    }
    set_marks(unaccounted, index, true);
    atomic_store_explicit(&vgpu_counters[index].due, 0, memory_order_relaxed); /* raised by the lines above */
    return seen;
}

void unaccounted_settle(int index)
{
    struct unaccounted *unaccounted = &unaccounted_of[index];
    atomic_store_explicit(&vgpu_counters[index].due, 0, memory_order_relaxed);
    const struct device *device = atomic_load_explicit(&unaccounted->device, memory_order_acquire);
    /* The holder of the context lock is measuring, or is this thread: another time. */
    if (!device || !context_try(index))
        return;
    settle(unaccounted, device);
    context_unlock(index);
}

bool unaccounted_begin_now(const struct device *device)
{
    struct unaccounted *unaccounted = &unaccounted_of[device->ledger];
    unaccounted_begin(device);
    return atomic_load_explicit(&unaccounted->device, memory_order_relaxed) && settle(unaccounted, device);
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
    struct unaccounted *unaccounted = &unaccounted_of[device];
    if (!leaving->ours || !leaving->gone || !unaccounted->charged)
        return;
    /* With the last context all of it is gone; before that, how much is looked up with the next allocation. */
    if (ledger_own(device, ACCOUNT_CONTEXT) <= unaccounted->charged) {
        ledger_uncharge(device, ACCOUNT_CONTEXT, unaccounted->charged);
        unaccounted->charged = 0;
    }
    atomic_store_explicit(&vgpu_counters[device].low, 0, memory_order_relaxed);
    atomic_store_explicit(&vgpu_counters[device].span, 0, memory_order_relaxed);
}

void unaccounted_reset(void)
{
    memset(unaccounted_of, 0, sizeof unaccounted_of);
}
