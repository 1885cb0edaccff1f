/* SPDX-License-Identifier: Apache-2.0 */
/* The ways to keep GPU memory on the card after the process that allocated it has freed it. Each way has functions for
 * the exporting process, which allocates one piece of memory, and for the importing process, which keeps the piece. */
#ifndef KEPT_H
#define KEPT_H

#include "probe.h"

/* The message that the exporting process sends to the importing process, together with a descriptor. */
struct note {
    CUipcMemHandle exported;
    char place[64]; /* place: a CUmemPoolPtrExportData if the memory belongs to a pool. */
    bool placed;
    /* Bytes of the piece, and of the exporting process's context, which ends with that process. */
    uint64_t bytes, context;
    CUresult status;
};

struct piece {
    CUdeviceptr pointer; /* pointer: 0 if the piece has no address. */
    CUmemGenericAllocationHandle handle;
    CUmemoryPool pool;
    int descriptor;
    uint64_t bytes;
    bool written;
};

#define NO_FUNCTION (-1) /* A value that is no error code of a driver. */

struct kept {
    const char *what;
    CUresult (*make)(struct piece *piece, struct note *note);
    /* let_go: releases the piece in the exporting process. NULL if the memory can be kept only after that process has
     * ended. */
    CUresult (*let_go)(struct piece *piece);
    /* take: imports the piece. NULL if the exporting process itself keeps the memory, which is freed when that process
     * ends. */
    CUresult (*take)(struct piece *piece, const struct note *note);
};
extern const struct kept kept_by_ipc, kept_by_handle, kept_by_pool, kept_by_array;

/* Call this in each process before the functions above. */
void kept_begin(const struct cuda *cuda, CUdevice device);
/* Writes a word into the piece, in the importing process. Returns false if the piece has an address that cannot be
 * read. */
bool kept_write(struct piece *piece);
/* Returns true if the card still has the memory: the word can be read back, or the piece has no address. */
bool kept_lives(const struct piece *piece);

#endif
