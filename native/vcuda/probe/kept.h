/* SPDX-License-Identifier: Apache-2.0 */
/* The ways to keep memory that was freed: the functions of the exporting process and of the importing process. */
#ifndef KEPT_H
#define KEPT_H

#include "probe.h"

/* The message of the exporting process to the importing process; a descriptor travels with it. */
struct note {
    CUipcMemHandle exported;
    char place[64]; /* for a pool's memory: CUmemPoolPtrExportData */
    bool placed;
    uint64_t bytes, context; /* bytes of the piece, and of the context that ends with the exporting process */
    CUresult status;
};

struct piece {
    CUdeviceptr pointer; /* 0: there is no address */
    CUmemGenericAllocationHandle handle;
    CUmemoryPool pool;
    int descriptor;
    uint64_t bytes;
    bool written;
};

#define NO_FUNCTION (-1) /* not an error code of a driver */

struct kept {
    const char *what;
    CUresult (*make)(struct piece *piece, struct note *note);
    /* NULL: the memory is kept only after the exporting process has ended */
    CUresult (*let_go)(struct piece *piece);
    /* NULL: the exporting process itself keeps the memory, and it ends with that process */
    CUresult (*take)(struct piece *piece, const struct note *note);
};
extern const struct kept kept_by_ipc, kept_by_handle, kept_by_pool, kept_by_array;

/* Call this in each process before the functions above. */
void kept_begin(const struct cuda *cuda, CUdevice device);
/* Writes a word in the importing process. Returns false if there is an address but it cannot be read. */
bool kept_write(struct piece *piece);
/* Returns true if the card still has the memory: the word is there, or there is no address to read. */
bool kept_lives(const struct piece *piece);

#endif
