/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The inner structure of a block map, a hash table in which a block stores what one pointer or handle was charged. A
 * map consists of 64 parts, each with its own lock. Inline functions store and remove a block in the common case. Only
 * blocks.c and the hooks of cuMemAlloc and cuMemFree include this header (a hook replaces a driver function).
 */
#ifndef VGPU_BLOCKS_H
#define VGPU_BLOCKS_H

#include "account.h"

#pragma GCC visibility push(hidden)

#define PARTS 64u
#define PART_BITS 6

/*
 * A part has its own kind of lock instead of struct lock. The lock is held for about twenty instructions, so a waiting
 * thread just retries, and unlocking is a plain store that wakes no thread.
 *
 * Positions in the table are byte offsets from the first block. This saves shifts on the path of every free.
 */
struct part {
    /* 1 while a thread has the part's lock, else 0. */
    _Atomic uint32_t held;
    /* Number of blocks that can be added before the table grows. */
    uint32_t room;
    /* Byte offset of the last position. The number of positions is a power of two. */
    size_t mask;
    /* The positions of the table; NULL before the first block is stored. A position with kind 0 is free. At least a
     * quarter of the positions are free. */
    struct block *blocks;
    size_t unused;
};
struct block_map {
    struct part parts[PARTS];
};
_Static_assert(sizeof(struct part) == 32 && sizeof(struct block) == 32, "powers of two: an offset is a shift");

static inline bool part_try(struct part *part)
{
    uint32_t nobody = 0;
    return atomic_compare_exchange_strong_explicit(&part->held, &nobody, 1, memory_order_acquire, memory_order_relaxed);
}

static inline void part_drop(struct part *part)
{
    atomic_store_explicit(&part->held, 0, memory_order_release);
}

/* Returns a hash of the key. Keys are addresses, multiples of 512 or of 2 MiB, so their low bits carry no information.
 * Therefore only high bits of the hash are used; the highest ones select the part. */
static inline uint64_t mix(uint64_t key)
{
    return key * 0x9e3779b97f4a7c15ull;
}

static inline struct part *part_of(struct block_map *map, uint64_t mixed)
{
    struct part *part = &map->parts[mixed >> (64 - PART_BITS)];
    __asm__("" : "+r"(part)); /* The empty asm makes the compiler compute the address once, as in counters_of. */
    return part;
}

static inline size_t home_of(const struct part *part, uint64_t mixed)
{
    return mixed >> 29 & part->mask;
}

static inline size_t after(const struct part *part, size_t place)
{
    return (place + sizeof(struct block)) & part->mask;
}

static inline struct block *block_at(const struct part *part, size_t place)
{
    return (struct block *)((char *)part->blocks + place);
}

/* Moves back the blocks after a freed position that a search would otherwise no longer find, because a search ends at a
 * free position. */
void part_close_gap(struct part *part, size_t hole);

static inline void erase(struct part *part, size_t place)
{
    if (__builtin_expect(block_at(part, after(part, place))->kind != 0, 0))
        part_close_gap(part, place);
    else
        block_at(part, place)->kind = 0;
    part->room++;
}

/* Finds the block of a key and copies it to *block. If `take` is true, also removes it from the table. The caller holds
 * the part's lock. */
static inline __attribute__((always_inline)) bool look(struct part *part, uint64_t key, uint64_t mixed, struct block *block,
                                                       bool take)
{
    if (__builtin_expect(!part->blocks, 0))
        return false;
    size_t place = home_of(part, mixed);
    while (block_at(part, place)->key != key || !block_at(part, place)->kind) {
        if (!block_at(part, place)->kind)
            return false;
        place = after(part, place);
    }
    *block = *block_at(part, place);
    if (take)
        erase(part, place);
    return true;
}

/* The fast versions of block_put and block_take. They return false without any effect if another thread has the part's
 * lock or the table must grow. */
static inline __attribute__((always_inline)) bool block_put_now(struct block_map *map, const struct block *block)
{
    uint64_t mixed = mix(block->key);
    struct part *part = part_of(map, mixed);
    if (__builtin_expect(!part_try(part), 0))
        return false;
    bool room = part->room != 0;
    if (__builtin_expect(room, 1)) {
        size_t place = home_of(part, mixed);
        while (block_at(part, place)->kind && (room = block_at(part, place)->key != block->key))
            place = after(part, place);
        if (__builtin_expect(room, 1)) {
            *block_at(part, place) = *block;
            part->room--;
        }
    }
    part_drop(part);
    return room;
}

static inline __attribute__((always_inline)) bool block_take_now(struct block_map *map, uint64_t key, struct block *block)
{
    uint64_t mixed = mix(key);
    struct part *part = part_of(map, mixed);
    if (__builtin_expect(!part_try(part), 0))
        return false;
    bool found = look(part, key, mixed, block, true);
    part_drop(part);
    return found;
}

#pragma GCC visibility pop

#endif
