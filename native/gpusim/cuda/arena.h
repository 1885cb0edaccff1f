/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Device addresses and the bytes behind them. An arena is one sparse memory file, mapped once: allocating in it costs no
 * system call, 80 GB that nobody writes cost nothing, and another process can map it (IPC). It says where a block lies;
 * whether the GPU has room for it is core's business (sim_charge).
 */
#ifndef GPUSIM_ARENA_H
#define GPUSIM_ARENA_H

#include "cuda_abi.h"

#include <stdbool.h>

enum block_kind { BLOCK_PLAIN = 1, BLOCK_MANAGED, BLOCK_POOL, BLOCK_BACKING, BLOCK_ARRAY, BLOCK_GRAPH };

struct block {
    uintptr_t base;
    uint64_t bytes; /* as asked for */
    uint64_t id;    /* CU_POINTER_ATTRIBUTE_BUFFER_ID */
    void *owner;    /* context or pool */
    enum block_kind kind;
    bool on_host; /* managed: its bytes are in host memory now, the GPU is not charged for them */
};

struct arena;

/* low: addresses below 4 GiB, for the entry points with 32-bit pointers. NULL if the system gives no addresses. */
struct arena *arena_create(uint64_t bytes, bool low);
bool arena_alloc(struct arena *arena, uint64_t bytes, enum block_kind kind, void *owner, struct block *out);
/* Frees the block that starts at base; false if none does, or if it is of another kind (kinds: a mask of 1 << kind). */
bool arena_free(struct arena *arena, uintptr_t base, unsigned kinds, struct block *out);
/* The block that holds address; false if none. */
bool arena_find(struct arena *arena, uintptr_t address, struct block *out);
/* Says where a managed block is from now on; false if address is in no block, or it was there already. */
bool arena_place(struct arena *arena, uintptr_t address, bool on_host, struct block *out);
void arena_touch(struct arena *arena, uintptr_t address); /* data was written: give the pages back at free */
/* Calls visit for each block of the owner; visit may free it. */
void arena_each(struct arena *arena, void *owner, void (*visit)(const struct block *));
bool arena_contains(const struct arena *arena, uintptr_t address);
int arena_fd(const struct arena *arena);
uint64_t arena_offset(const struct arena *arena, uintptr_t address);

#endif
