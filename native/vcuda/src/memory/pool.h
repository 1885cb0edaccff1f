/* SPDX-License-Identifier: Apache-2.0 */
/* Private to pool.c and async.c: the account of a pool. */
#ifndef VGPU_POOL_H
#define VGPU_POOL_H

#include "memory.h"

#pragma GCC visibility push(hidden)

#define POOL_UNIT (2 * MIB) /* A pool takes memory from the card in multiples of this size. */

struct pool {
    struct pool *next;
    struct lock lock;
    uint64_t key;
    const struct device *device; /* NULL if the pool's memory is not on a device. */
    uint64_t charged;
    uint64_t shared;      /* shared: object number of the pool's shareable handles, 0 if none exist. */
    bool exported;            /* exported: the ledger slot counts the pool's memory as exported. */
    uint64_t outstanding; /* outstanding: bytes of the program's live blocks. */
    /* destroyed: the program has destroyed the pool. It stays recorded until its last block is freed. */
    bool destroyed;
};

struct pool *pool_known(uint64_t key);
/* Returns the pool and creates its record if needed. NULL: no memory. */
struct pool *pool_add(uint64_t key, const struct device *device);
/* Reads an attribute from the driver; returns `otherwise` if that fails. */
uint64_t pool_attribute(const struct pool *pool, int which, uint64_t otherwise);

/* Records the pool's size in the ledger slot, because importing processes keep an exported pool's memory if this
 * process dies. Needs the pool's lock. */
void pool_hold(struct pool *pool, uint64_t bytes);
/* Uncharges memory that the pool no longer has. Growth is charged by the allocating call. Needs the pool's lock. */
void pool_settle_down(struct pool *pool);

#pragma GCC visibility pop

#endif
