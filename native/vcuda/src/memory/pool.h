/* SPDX-License-Identifier: Apache-2.0 */
/* Private to pool.c and async.c: the account of a pool. */
#ifndef VGPU_POOL_H
#define VGPU_POOL_H

#include "memory.h"

#pragma GCC visibility push(hidden)

#define POOL_UNIT (2 * MIB) /* a pool takes memory from the card in multiples of this */

struct pool {
    struct pool *next;
    struct lock lock;
    uint64_t key;
    const struct device *device; /* NULL: the pool's memory is not on a device */
    uint64_t charged;
    uint64_t shared;      /* The object of the pool's shareable handles; 0: none exist. */
    bool exported;            /* The ledger slot counts the pool's memory as exported. */
    uint64_t outstanding; /* Bytes of the program's live blocks. */
    bool destroyed;       /* The pool stays recorded until its last block is freed. */
};

struct pool *pool_known(uint64_t key);
/* Returns the pool and creates its record if needed. NULL: no memory. */
struct pool *pool_add(uint64_t key, const struct device *device);
/* Reads an attribute from the driver; returns `otherwise` if that fails. */
uint64_t pool_attribute(const struct pool *pool, int which, uint64_t otherwise);

/* Records the pool's size in the slot: if this process dies, importing processes keep an exported pool's memory.
 * Needs the pool's lock. */
void pool_hold(struct pool *pool, uint64_t bytes);
/* Uncharges what the pool no longer holds. Growth is charged by the allocating call. Needs the pool's lock. */
void pool_settle_down(struct pool *pool);

#pragma GCC visibility pop

#endif
