/* SPDX-License-Identifier: Apache-2.0 */
/* Declarations for limits.c, limits_file.c, shares.c and share_folder.c only. */
#ifndef VGPU_LIMITS_FILE_H
#define VGPU_LIMITS_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "vgpu_abi.h"

struct limits_file {
    const unsigned char *data;
    size_t length;
    bool missing;
};

uint32_t limits_crc(const unsigned char *data, size_t size);
/* Parses the bytes of a limits file; any bytes are allowed. If it returns false, `reason` has the end of a message's
 * sentence. */
bool limits_parse(const unsigned char *data, size_t length, struct vgpu_limits *out, char *reason, size_t room);
bool limits_map(const char *path, struct limits_file *file, char *reason, size_t room);
/* Does the same as limits_map for an open file. Closes the descriptor in any case. */
bool limits_map_open(int descriptor, struct limits_file *file, char *reason, size_t room);
uint32_t limits_sequence(const struct limits_file *file);
/* Copies the limits consistently. Waits at most patience_ms for a writer to finish. */
bool limits_copy(const struct limits_file *file, unsigned patience_ms, struct vgpu_limits *out, char *reason, size_t room);

/* --- shares.c: the shares of this container ------------------------------------------------------------- */

struct share {
    struct limits_file file;
    int number; /* Number of the share's folder, if the node mounted the folder. */
    char limits[256], ledger[512];
};
struct shares {
    unsigned count;
    struct share of[VGPU_MAX_SHARES];
};
/* Sets the shares of a library that was preloaded by hand. Each argument is one path or a list of paths separated by
 * colons; both lists must have the same length. */
bool shares_by_hand(struct shares *shares, const char *limits, const char *ledgers);
bool shares_of_the_node(struct shares *shares, char *reason, size_t room);
/* Maps the limits of all shares and returns NULL. Otherwise maps none and returns the share that failed. */
const struct share *shares_map(struct shares *shares, bool of_the_node, char *reason, size_t room);
void shares_unmap(struct shares *shares);
/* Rank of a policy by strictness: the environment may only move it upwards. */
int policy_tightness(enum vgpu_core_policy policy);
/* Adds the limits of one share to `all`. Returns false if there are too many devices. */
bool limits_add(struct vgpu_limits *all, const struct vgpu_limits *one);

/* share_folder.c: lists the numbers of the shares that the node mounted, in ascending order. If there is none, lists
 * the first share's number. Returns the count; -1: too many. */
int shares_find(int numbers[VGPU_MAX_SHARES], char *reason, size_t room);
/* Opens the limits of a share and returns a descriptor. Returns -1 if the limits are missing or not from the node;
 * `reason` then has the explanation. */
int share_limits_open(int number, char *reason, size_t room);

#endif
