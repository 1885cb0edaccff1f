/* SPDX-License-Identifier: Apache-2.0 */
/* Private to pool.c and async.c: the pools of stream-ordered memory, and how much each pool is charged. The library
 * keeps a record (struct pool) of each pool. The ledger is the file in which all processes of the container record
 * their charges. */
#ifndef VGPU_POOL_H
#define VGPU_POOL_H

#include "memory.h"

#pragma GCC visibility push(hidden)

#define POOL_UNIT (2 * MIB) /* A pool takes memory from the card in multiples of this size. */

struct pool {
    struct pool *next;
    struct lock lock;
    /* key: handle of the pool; 0: the program has destroyed the pool. The record is still needed until the pool's memory
     * is uncharged. After that it serves another pool. */
    _Atomic uint64_t key;
    const struct device *device; /* device: NULL if the pool's memory is not on a device. */
    /* charged: bytes that are charged for the pool. */
    uint64_t charged;
    uint64_t shared;      /* shared: number that marks the pool's shareable handles (shareable.c); 0 if none exist. */
    /* exported: true if the process's slot (entry) in the ledger counts the pool's memory as exported. */
    bool exported;
    uint64_t outstanding; /* outstanding: bytes of the program's blocks that are not freed. */
};

/* Returns the record of a pool that is not destroyed; NULL: there is none. */
struct pool *pool_known(uint64_t key);
/* Returns the pool and creates its record if needed. `fresh` is true if the driver has just created the pool. NULL: no
 * host memory. */
struct pool *pool_add(uint64_t key, const struct device *device, bool fresh);
/* Reads an attribute of the pool from the driver; returns `otherwise` if that fails. */
uint64_t pool_attribute(const struct pool *pool, int which, uint64_t otherwise);

/* Records the pool's size. An exported pool's size is also recorded in this process's slot of the ledger: if this
 * process dies, importing processes keep the pool's memory. Needs the pool's lock. */
void pool_hold(struct pool *pool, uint64_t bytes);
/* Uncharges memory that the pool no longer has. The pool's growth is not handled here, because the allocating call
 * charges it. Needs the pool's lock. */
void pool_settle_down(struct pool *pool);

#pragma GCC visibility pop

#endif
