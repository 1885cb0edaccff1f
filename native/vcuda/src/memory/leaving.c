/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Uncharges memory and arrays of a context that ends. They are removed from the tables of charges before the driver
 * frees them, because another thread may get the same addresses at once. After the driver's call they are uncharged. If
 * the driver did not end the context, they are put back into the tables. Memory and arrays of a green context (a part
 * of a GPU's multiprocessors) outlive it and move to the device's primary context.
 */
#include "context/context.h"
#include "memory.h"

#include <stdlib.h>

static struct block_map *const maps[COLLECTED_MAPS] = {&vgpu_memory, &vgpu_arrays};

static bool collect(const struct block *block, void *data)
{
    struct collected *collected = data;
    if (block->owner != collected->owner || block->kind == BLOCK_POOL)
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

void memory_context_leaving(struct leaving *leaving)
{
    for (int i = 0; i < COLLECTED_MAPS; i++) {
        leaving->collected[i] = (struct collected){.owner = (uintptr_t)leaving->context};
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
            else if (leaving->gone)
                memory_gone(&collected->blocks[at]);
            else
                block_put(maps[i], &collected->blocks[at]);
        free(collected->blocks);
    }
}
