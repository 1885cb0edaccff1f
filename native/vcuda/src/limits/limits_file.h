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
/* Any bytes at all may be given. On false `reason` holds half a sentence. */
bool limits_parse(const unsigned char *data, size_t length, struct vgpu_limits *out, char *reason, size_t room);
bool limits_map(const char *path, struct limits_file *file, char *reason, size_t room);
/* The same of an open file; the descriptor is closed in any case. */
bool limits_map_open(int descriptor, struct limits_file *file, char *reason, size_t room);
uint32_t limits_sequence(const struct limits_file *file);
/* A valid copy, waiting at most patience_ms for a writer that is under way. */
bool limits_copy(const struct limits_file *file, unsigned patience_ms, struct vgpu_limits *out, char *reason, size_t room);

/* --- shares.c: the shares of this container ------------------------------------------------------------- */

struct share {
    struct limits_file file;
    int number; /* of its folder, where the node mounted it */
    char limits[256], ledger[512];
};
struct shares {
    unsigned count;
    struct share of[VGPU_MAX_SHARES];
};
/* One path, or as many ledgers as limits, with a colon between them. */
bool shares_by_hand(struct shares *shares, const char *limits, const char *ledgers);
bool shares_of_the_node(struct shares *shares, char *reason, size_t room);
/* Maps the limits of all; else those of one that cannot be mapped, and none is. */
const struct share *shares_map(struct shares *shares, bool of_the_node, char *reason, size_t room);
void shares_unmap(struct shares *shares);
/* How tight a policy is: the order in which the environment may move it. */
int policy_tightness(enum vgpu_core_policy policy);
/* What both allow together; false: too many devices. */
bool limits_add(struct vgpu_limits *all, const struct vgpu_limits *one);

/* share_folder.c: the numbers of the shares that the node mounted, from the lowest up; that of the first where there is none.
 * How many; -1: too many. */
int shares_find(int numbers[VGPU_MAX_SHARES], char *reason, size_t room);
/* The limits of one; -1: these are not the node's, for that reason. */
int share_limits_open(int number, char *reason, size_t room);

#endif
