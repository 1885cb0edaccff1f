/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The tables of blocks. A block records what was charged for one pointer or handle. The tables are hash maps with open
 * addressing, linear probing and backward-shift deletion, in 64 independently locked parts. Finding or removing a block
 * takes as long among a million blocks as among ten.
 */
#include "blocks.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define FIRST_CAPACITY 32u

struct block_map vgpu_memory, vgpu_arrays, vgpu_contexts, vgpu_handles, vgpu_mappings, vgpu_graphs, vgpu_exported,
    vgpu_imported, vgpu_greens;

static __attribute__((noinline)) void part_take(struct part *part)
{
    for (unsigned tries = 0; !part_try(part); tries++)
        /* After 100 tries the thread that has the lock is probably not running. This thread then sleeps, because
         * sched_yield never lets a thread of lower real-time priority run. */
        if (tries > 100)
            nanosleep(&(struct timespec){0, 20000}, NULL);
        else
            sched_yield();
}

/* Returns the position of the key, or the free position where the key would be stored. */
static inline size_t find(const struct part *part, uint64_t key, uint64_t mixed)
{
    size_t place = home_of(part, mixed);
    while (block_at(part, place)->kind && block_at(part, place)->key != key)
        place = after(part, place);
    return place;
}

static bool grow(struct part *part)
{
    size_t count = part->blocks ? part->mask / sizeof(struct block) + 1 : 0, capacity = count ? count * 2 : FIRST_CAPACITY;
    struct part wider = {.mask = (capacity - 1) * sizeof(struct block), .blocks = calloc(capacity, sizeof(struct block))};
    if (!wider.blocks)
        return false;
    for (size_t i = 0; i < count; i++) {
        const struct block *block = &part->blocks[i];
        if (block->kind)
            *block_at(&wider, find(&wider, block->key, mix(block->key))) = *block;
    }
    free(part->blocks);
    part->room += (uint32_t)((capacity - count) * 3 / 4);
    part->mask = wider.mask;
    part->blocks = wider.blocks;
    return true;
}

void part_close_gap(struct part *part, size_t hole)
{
    for (size_t place = after(part, hole); block_at(part, place)->kind; place = after(part, place)) {
        size_t home = home_of(part, mix(block_at(part, place)->key));
        if (((place - home) & part->mask) >= ((place - hole) & part->mask)) {
            *block_at(part, hole) = *block_at(part, place);
            hole = place;
        }
    }
    block_at(part, hole)->kind = 0;
}

bool block_put(struct block_map *map, const struct block *block)
{
    struct block former;
    return block_swap(map, block, &former);
}

bool block_swap(struct block_map *map, const struct block *block, struct block *former)
{
    uint64_t mixed = mix(block->key);
    struct part *part = part_of(map, mixed);
    part_take(part);
    bool room = part->room || grow(part);
    if (room) {
        struct block *place = block_at(part, find(part, block->key, mixed));
        part->room -= place->kind == 0;
        *former = *place;
        *place = *block;
    }
    part_drop(part);
    return room;
}

static bool get(struct block_map *map, uint64_t key, struct block *block, bool take)
{
    uint64_t mixed = mix(key);
    struct part *part = part_of(map, mixed);
    part_take(part);
    bool found = look(part, key, mixed, block, take);
    part_drop(part);
    return found;
}

bool block_take(struct block_map *map, uint64_t key, struct block *block)
{
    return get(map, key, block, true);
}

bool block_get(struct block_map *map, uint64_t key, struct block *block)
{
    return get(map, key, block, false);
}

void block_sweep(struct block_map *map, bool (*match)(const struct block *block, void *data), void *data)
{
    for (uint32_t i = 0; i < PARTS; i++) {
        struct part *part = &map->parts[i];
        part_take(part);
        for (size_t place = 0; part->blocks && place <= part->mask;) {
            if (block_at(part, place)->kind && match(block_at(part, place), data))
                /* The removal may have moved another block to this position, so the loop checks the position again. */
                erase(part, place);
            else
                place += sizeof(struct block);
        }
        part_drop(part);
    }
}

void blocks_reset(void)
{
    struct block_map *maps[] = {&vgpu_memory, &vgpu_arrays, &vgpu_contexts, &vgpu_handles, &vgpu_mappings,
                                &vgpu_graphs, &vgpu_exported, &vgpu_imported, &vgpu_greens};
    /* The parent's blocks do not belong to this child. The tables are not freed, because a thread of the parent may
     * have been changing a table at the fork. */
    for (size_t i = 0; i < sizeof maps / sizeof *maps; i++)
        memset(maps[i], 0, sizeof *maps[i]);
}
