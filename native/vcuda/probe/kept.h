/* SPDX-License-Identifier: Apache-2.0 */
/* The ways to have memory that was given back: what a process does that makes a piece, and one that takes it. */
#ifndef KEPT_H
#define KEPT_H

#include "probe.h"

/* What the maker sends the taker; a descriptor travels with it. */
struct note {
    CUipcMemHandle exported;
    char place[64]; /* of a pool's memory: CUmemPoolPtrExportData */
    bool placed;
    uint64_t bytes, context; /* of the piece, and what also ends with its maker */
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

#define NO_FUNCTION (-1) /* no answer of a driver */

struct kept {
    const char *what;
    CUresult (*make)(struct piece *piece, struct note *note);
    CUresult (*let_go)(struct piece *piece);                          /* NULL: it is kept after its maker's end alone */
    CUresult (*take)(struct piece *piece, const struct note *note); /* NULL: what keeps it is its maker's, and ends with it */
};
extern const struct kept kept_by_ipc, kept_by_handle, kept_by_pool, kept_by_array;

/* Before any of the functions above, in each process. */
void kept_begin(const struct cuda *cuda, CUdevice device);
/* The taker writes a word; false: there is an address, and nothing can be read by it. */
bool kept_write(struct piece *piece);
/* The card keeps it: the word is there, or there is no address to ask by. */
bool kept_lives(const struct piece *piece);

#endif
