/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hash maps from pointer or handle to what was charged for it: open addressing with linear probing and backward-shift
 * deletion, in 64 independently locked parts. Finding and removing a block takes the same time among ten and a million.
 */
#include "vgpu.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define PARTS 64u
#define FIRST_CAPACITY 32u

/*
 * A lock of its own kind: a part is held for some thirty instructions, so whoever finds it held comes again soon, and
 * dropping it is a plain store that wakes nobody.
 */
struct part {
    _Atomic uint32_t held;
    uint32_t capacity, count; /* capacity: a power of two, or 0 */
    struct block *blocks;     /* kind 0: free */
};
struct block_map {
    struct part parts[PARTS];
};
struct block_map vgpu_memory, vgpu_arrays, vgpu_contexts, vgpu_modules, vgpu_handles, vgpu_mappings, vgpu_graphs, vgpu_parts, vgpu_lent,
    vgpu_borrowed;

static inline bool part_try(struct part *part)
{
    uint32_t nobody = 0;
    return atomic_compare_exchange_strong_explicit(&part->held, &nobody, 1, memory_order_acquire, memory_order_relaxed);
}

static __attribute__((noinline)) void part_take(struct part *part)
{
    for (unsigned tries = 0; !part_try(part); tries++)
        if (tries > 100) /* its holder does not run: yielding alone would keep it from running where priorities are strict */
            nanosleep(&(struct timespec){0, 20000}, NULL);
        else
            sched_yield();
}

static inline void part_drop(struct part *part)
{
    atomic_store_explicit(&part->held, 0, memory_order_release);
}

static inline uint64_t mix(uint64_t key)
{
    key *= 0x9e3779b97f4a7c15ull;
    return key ^ key >> 29;
}

static inline uint32_t find(const struct part *part, uint64_t key)
{
    uint32_t mask = part->capacity - 1, at = (uint32_t)(mix(key) >> 6) & mask;
    while (part->blocks[at].kind && part->blocks[at].key != key)
        at = (at + 1) & mask;
    return at;
}

static bool grow(struct part *part)
{
    uint32_t capacity = part->capacity ? part->capacity * 2 : FIRST_CAPACITY;
    struct block *old = part->blocks, *blocks = calloc(capacity, sizeof *blocks);
    if (!blocks)
        return false;
    struct part wider = {.capacity = capacity, .blocks = blocks};
    for (uint32_t i = 0; i < part->capacity; i++)
        if (old[i].kind)
            blocks[find(&wider, old[i].key)] = old[i];
    part->blocks = blocks;
    part->capacity = capacity;
    free(old);
    return true;
}

static inline void erase(struct part *part, uint32_t hole)
{
    uint32_t mask = part->capacity - 1;
    for (uint32_t at = (hole + 1) & mask; part->blocks[at].kind; at = (at + 1) & mask) {
        uint32_t home = (uint32_t)(mix(part->blocks[at].key) >> 6) & mask;
        if (((at - home) & mask) >= ((at - hole) & mask)) {
            part->blocks[hole] = part->blocks[at];
            hole = at;
        }
    }
    part->blocks[hole].kind = 0;
    part->count--;
}

static struct part *part_of(struct block_map *map, uint64_t key)
{
    return &map->parts[mix(key) & (PARTS - 1)];
}

/* Lock held, and room for one more. */
static inline void enter(struct part *part, const struct block *block)
{
    uint32_t at = find(part, block->key);
    part->count += part->blocks[at].kind == 0;
    part->blocks[at] = *block;
}

static inline bool crowded(const struct part *part)
{
    return (part->count + 1) * 4 > part->capacity * 3;
}

static __attribute__((noinline)) bool put_slowly(struct part *part, const struct block *block)
{
    part_take(part);
    bool room = !crowded(part) || grow(part);
    if (room)
        enter(part, block);
    part_drop(part);
    return room;
}

bool block_put(struct block_map *map, const struct block *block)
{
    struct part *part = part_of(map, block->key);
    if (__builtin_expect(part_try(part), 1)) {
        if (__builtin_expect(!crowded(part), 1)) {
            enter(part, block);
            part_drop(part);
            return true;
        }
        part_drop(part);
    }
    return put_slowly(part, block);
}

/* Lock held. */
static inline bool look(struct part *part, uint64_t key, struct block *block, bool take)
{
    if (__builtin_expect(!part->capacity, 0))
        return false;
    uint32_t at = find(part, key);
    if (__builtin_expect(!part->blocks[at].kind, 0))
        return false;
    *block = part->blocks[at];
    if (take)
        erase(part, at);
    return true;
}

static __attribute__((noinline)) bool look_slowly(struct part *part, uint64_t key, struct block *block, bool take)
{
    part_take(part);
    bool found = look(part, key, block, take);
    part_drop(part);
    return found;
}

bool block_take(struct block_map *map, uint64_t key, struct block *block)
{
    struct part *part = part_of(map, key);
    if (__builtin_expect(!part_try(part), 0))
        return look_slowly(part, key, block, true);
    bool found = look(part, key, block, true);
    part_drop(part);
    return found;
}

bool block_get(struct block_map *map, uint64_t key, struct block *block)
{
    return look_slowly(part_of(map, key), key, block, false);
}

void block_sweep(struct block_map *map, bool (*match)(const struct block *block, void *data), void *data)
{
    for (uint32_t i = 0; i < PARTS; i++) {
        struct part *part = &map->parts[i];
        part_take(part);
        for (uint32_t at = 0; at < part->capacity;) {
            if (part->blocks[at].kind && match(&part->blocks[at], data))
                erase(part, at); /* another block may have moved here: look at this place again */
            else
                at++;
        }
        part_drop(part);
    }
}

void blocks_reset(void)
{
    struct block_map *maps[] = {&vgpu_memory, &vgpu_arrays, &vgpu_contexts, &vgpu_modules, &vgpu_handles, &vgpu_mappings,
                                &vgpu_graphs, &vgpu_parts, &vgpu_lent, &vgpu_borrowed};
    /* The parent's blocks are not this child's. The tables are left: a thread that was changing one is gone. */
    for (size_t i = 0; i < sizeof maps / sizeof *maps; i++)
        memset(maps[i], 0, sizeof *maps[i]);
}
