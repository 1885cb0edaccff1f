/* SPDX-License-Identifier: Apache-2.0 */
/* Private to limits.c, limits_file.c, shares.c and share_folder.c. */
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
/* Parses any bytes. On false `reason` is half a sentence for a message. */
bool limits_parse(const unsigned char *data, size_t length, struct vgpu_limits *out, char *reason, size_t room);
bool limits_map(const char *path, struct limits_file *file, char *reason, size_t room);
/* The same for an open file; closes the descriptor in any case. */
bool limits_map_open(int descriptor, struct limits_file *file, char *reason, size_t room);
uint32_t limits_sequence(const struct limits_file *file);
/* Makes a valid copy; waits at most patience_ms for a writer to finish. */
bool limits_copy(const struct limits_file *file, unsigned patience_ms, struct vgpu_limits *out, char *reason, size_t room);

/* --- shares.c: the shares of this container ------------------------------------------------------------- */

struct share {
    struct limits_file file;
    int number; /* number of the share's folder, if the node mounted it */
    char limits[256], ledger[512];
};
struct shares {
    unsigned count;
    struct share of[VGPU_MAX_SHARES];
};
/* Sets the shares of a hand-preloaded library: one path each, or equally many limits and ledgers separated by
 * colons. */
bool shares_by_hand(struct shares *shares, const char *limits, const char *ledgers);
bool shares_of_the_node(struct shares *shares, char *reason, size_t room);
/* Maps the limits of all shares and returns NULL. Otherwise maps none and returns the share that failed. */
const struct share *shares_map(struct shares *shares, bool of_the_node, char *reason, size_t room);
void shares_unmap(struct shares *shares);
/* Rank of a policy by strictness: the environment may only move it upwards. */
int policy_tightness(enum vgpu_core_policy policy);
/* Adds the limits of one share to `all`. Returns false if there are too many devices. */
bool limits_add(struct vgpu_limits *all, const struct vgpu_limits *one);

/* share_folder.c: shares_find lists the numbers of the shares that the node mounted, in ascending order; the first
 * share's number if there is none. Returns their count; -1: too many. */
int shares_find(int numbers[VGPU_MAX_SHARES], char *reason, size_t room);
/* Opens the limits of a share. Returns a descriptor; -1: they are not the node's, see `reason`. */
int share_limits_open(int number, char *reason, size_t room);

#endif
