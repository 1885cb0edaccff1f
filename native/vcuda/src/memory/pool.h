/* SPDX-License-Identifier: Apache-2.0 */
/* Private to pool.c and async.c: the account of a pool. */
#ifndef VGPU_POOL_H
#define VGPU_POOL_H

#include "memory.h"

#pragma GCC visibility push(hidden)

#define POOL_UNIT (2 * MIB) /* a pool takes from the card in multiples of this */

struct pool {
    struct pool *next;
    struct lock lock;
    uint64_t key;
    const struct device *device; /* NULL: its memory is not on a device */
    uint64_t charged;
    uint64_t shared;      /* the object that its shareable handles stand for; 0: there are none */
    bool exported;            /* its slot says that others may have what it holds */
    uint64_t outstanding; /* bytes of blocks that the program holds */
    bool destroyed;       /* lives on until its last block is freed */
};

struct pool *pool_known(uint64_t key);
/* The same, made if it was not known; NULL: there is no memory. */
struct pool *pool_add(uint64_t key, const struct device *device);
/* What the driver says of it, `otherwise` where it does not. */
uint64_t pool_attribute(const struct pool *pool, int which, uint64_t otherwise);

/* Pool locked. What an exported pool holds its importers keep when this process dies: its slot says how much. */
void pool_hold(struct pool *pool, uint64_t bytes);
/* Pool locked. Gives back what the pool no longer holds; what it holds beyond its charge is charged by who allocates. */
void pool_settle_down(struct pool *pool);

#pragma GCC visibility pop

#endif
