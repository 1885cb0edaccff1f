/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Uncharges memory and arrays of a context that ends. They are removed from the tables of charges before the driver
 * frees them, because another thread may get the same addresses at once. After the driver's call they are uncharged. If
 * the driver did not end the context, they are put back into the tables. Memory and arrays of a green context (a part
 * of a GPU's multiprocessors) outlive it and move to the device's primary context. Blocks of pools belong to the device
 * and end with its last context.
 */
#include "context/context.h"
#include "memory.h"

#include <stdlib.h>

static struct block_map *const maps[COLLECTED_MAPS] = {&vgpu_memory, &vgpu_arrays};

static bool collect(const struct block *block, void *data)
{
    struct collected *collected = data;
    if (block->kind == BLOCK_POOL ? block->device != collected->pools : block->owner != collected->owner)
        return false;
    if (collected->count == collected->room) {
        size_t room = collected->room ? collected->room * 2 : 64;
        struct block *blocks = realloc(collected->blocks, room * sizeof *blocks);
        if (!blocks)
            return false; /* There is no host memory for the list, so the block stays in its table and stays charged. */
        collected->blocks = blocks;
        collected->room = room;
    }
    collected->blocks[collected->count++] = *block;
    return true;
}

/* Makes the heir (the primary context) the owner of a green context's block. The block need not move, because its
 * position in the table does not depend on its owner. */
static bool bequeath(const struct block *block, void *data)
{
    const struct leaving *leaving = data;
    if (block->owner == (uintptr_t)leaving->context && block->kind != BLOCK_POOL)
        ((struct block *)(uintptr_t)block)->owner = (uintptr_t)leaving->heir;
    return false;
}

/* Clears the field `pools` if the context belongs to that device. */
static bool keep_pools(const struct block *context, void *data)
{
    struct collected *collected = data;
    if (context->device == collected->pools)
        collected->pools = -1;
    return false;
}

void memory_context_leaving(struct leaving *leaving)
{
    for (int i = 0; i < COLLECTED_MAPS; i++) {
        leaving->collected[i] = (struct collected){.owner = (uintptr_t)leaving->context, .pools = -1};
        if (leaving->ours)
            leaving->collected[i].pools = leaving->block.device;
        block_sweep(&vgpu_contexts, keep_pools, &leaving->collected[i]);
        if (leaving->heir)
            block_sweep(maps[i], bequeath, leaving);
        else if (leaving->ours)
            block_sweep(maps[i], collect, &leaving->collected[i]);
    }
}

void memory_context_left(struct leaving *leaving)
{
    for (int i = 0; i < COLLECTED_MAPS; i++) {
        struct collected *collected = &leaving->collected[i];
        struct block exported;
        for (size_t at = 0; at < collected->count; at++)
            if (leaving->gone && collected->blocks[at].kind == BLOCK_EXPORTED && ipc_exported(collected->blocks[at].key, &exported))
                ipc_freed(&exported);
            else if (leaving->gone && collected->blocks[at].kind == BLOCK_POOL)
                pool_freed(collected->blocks[at].owner, collected->blocks[at].bytes);
            else if (leaving->gone)
                memory_gone(&collected->blocks[at]);
            else
                block_put(maps[i], &collected->blocks[at]);
        free(collected->blocks);
    }
    if (leaving->gone)
        pools_waited(leaving->collected[0].pools >= 0);
}
