/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Manages device addresses and their bytes. An arena is one sparse memory file, mapped once: an allocation makes no
 * system call, unwritten memory costs nothing even for 80 GB, and another process can map it (IPC). The arena chooses
 * addresses only; sim_charge() of core decides whether the GPU has enough free memory.
 */
#ifndef GPUSIM_ARENA_H
#define GPUSIM_ARENA_H

#include "cuda_abi.h"

#include <stdbool.h>

enum block_kind { BLOCK_PLAIN = 1, BLOCK_MANAGED, BLOCK_POOL, BLOCK_BACKING, BLOCK_ARRAY, BLOCK_GRAPH };

struct block {
    uintptr_t base;
    /* Requested size. */
    uint64_t bytes;
    /* Value of CU_POINTER_ATTRIBUTE_BUFFER_ID. */
    uint64_t id;
    /* Context or pool that owns the block. */
    void *owner;
    enum block_kind kind;
    /* True for a managed block that is in host memory now and not charged to the GPU. */
    bool on_host;
};

struct arena;

/* Creates an arena. If `low` is set, its addresses are below 4 GiB, for entry points with 32-bit pointers. Returns NULL
 * if the mapping fails. */
struct arena *arena_create(uint64_t bytes, bool low);
bool arena_alloc(struct arena *arena, uint64_t bytes, enum block_kind kind, void *owner, struct block *out);
/* Frees the block that starts at base. Returns false if there is no such block or if `kinds`, a mask of 1 << kind,
 * excludes it. */
bool arena_free(struct arena *arena, uintptr_t base, unsigned kinds, struct block *out);
/* Finds the block that contains address; returns false if there is none. */
bool arena_find(struct arena *arena, uintptr_t address, struct block *out);
/* Moves a managed block to the host or the GPU. Returns false if no block has this address or it is already there. */
bool arena_place(struct arena *arena, uintptr_t address, bool on_host, struct block *out);
/* Records that the block was written, so that freeing it gives its pages back to the system. */
void arena_touch(struct arena *arena, uintptr_t address);
/* Calls visit for each block of the owner; visit may free the block. */
void arena_each(struct arena *arena, void *owner, void (*visit)(const struct block *));
bool arena_contains(const struct arena *arena, uintptr_t address);
int arena_fd(const struct arena *arena);
uint64_t arena_offset(const struct arena *arena, uintptr_t address);

#endif
