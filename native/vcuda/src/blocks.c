/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hash maps from pointer or handle to what was charged for it: open addressing with linear probing and backward-shift
 * deletion, in 64 independently locked parts. Finding and removing a block takes the same time among ten and a million.
 */
#include "vgpu.h"

#include <stdlib.h>
#include <string.h>

#define PARTS 64u
#define FIRST_CAPACITY 32u

struct part {
    struct lock lock;
    uint32_t capacity, count; /* capacity: a power of two, or 0 */
    struct block *blocks;     /* kind 0: free */
};
struct block_map {
    struct part parts[PARTS];
};
struct block_map vgpu_memory, vgpu_arrays, vgpu_contexts, vgpu_modules, vgpu_handles, vgpu_mappings, vgpu_graphs, vgpu_parts;

static uint64_t mix(uint64_t key)
{
    key *= 0x9e3779b97f4a7c15ull;
    return key ^ key >> 29;
}

static uint32_t find(const struct part *part, uint64_t key)
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

static void erase(struct part *part, uint32_t hole)
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

bool block_put(struct block_map *map, const struct block *block)
{
    struct part *part = part_of(map, block->key);
    bool room = true;
    lock_take(&part->lock);
    if ((part->count + 1) * 4 > part->capacity * 3)
        room = grow(part);
    if (room) {
        uint32_t at = find(part, block->key);
        part->count += part->blocks[at].kind == 0;
        part->blocks[at] = *block;
    }
    lock_drop(&part->lock);
    return room;
}

static bool look(struct block_map *map, uint64_t key, struct block *block, bool take)
{
    struct part *part = part_of(map, key);
    bool found = false;
    lock_take(&part->lock);
    if (part->capacity) {
        uint32_t at = find(part, key);
        found = part->blocks[at].kind != 0;
        if (found) {
            *block = part->blocks[at];
            if (take)
                erase(part, at);
        }
    }
    lock_drop(&part->lock);
    return found;
}

bool block_take(struct block_map *map, uint64_t key, struct block *block)
{
    return look(map, key, block, true);
}

bool block_get(struct block_map *map, uint64_t key, struct block *block)
{
    return look(map, key, block, false);
}

void block_sweep(struct block_map *map, bool (*match)(const struct block *block, void *data), void *data)
{
    for (uint32_t i = 0; i < PARTS; i++) {
        struct part *part = &map->parts[i];
        lock_take(&part->lock);
        for (uint32_t at = 0; at < part->capacity;) {
            if (part->blocks[at].kind && match(&part->blocks[at], data))
                erase(part, at); /* another block may have moved here: look at this place again */
            else
                at++;
        }
        lock_drop(&part->lock);
    }
}

void blocks_reset(void)
{
    struct block_map *maps[] = {&vgpu_memory, &vgpu_arrays, &vgpu_contexts, &vgpu_modules, &vgpu_handles, &vgpu_mappings,
                                &vgpu_graphs, &vgpu_parts};
    /* The parent's blocks are not this child's. The tables are left: a thread that was changing one is gone. */
    for (size_t i = 0; i < sizeof maps / sizeof *maps; i++)
        memset(maps[i], 0, sizeof *maps[i]);
}
