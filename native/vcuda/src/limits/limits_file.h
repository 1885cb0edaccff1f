/* SPDX-License-Identifier: Apache-2.0 */
/* Reads limits files and finds the shares of the container. A share is one allocation of GPUs, with its own limits file
 * and ledger (the file in which charges are recorded). Only limits.c, limits_file.c, shares.c and share_folder.c
 * include this header. */
#ifndef VGPU_LIMITS_FILE_H
#define VGPU_LIMITS_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "vgpu_abi.h"

/* A limits file and its mapping. */
struct limits_file {
    const unsigned char *data; /* NULL: the file is not mapped. */
    size_t length;
    bool missing; /* limits_map() failed, because the file does not exist. */
};

uint32_t limits_crc(const unsigned char *data, size_t size);
/* Parses the bytes of a limits file; the content may be arbitrary. If it returns false, `reason` has the explanation,
 * worded as the end of a sentence. */
bool limits_parse(const unsigned char *data, size_t length, struct vgpu_limits *out, char *reason, size_t room);
bool limits_map(const char *path, struct limits_file *file, char *reason, size_t room);
/* Does the same as limits_map for a file that is already open. Closes the descriptor in any case. */
bool limits_map_open(int descriptor, struct limits_file *file, char *reason, size_t room);
/* Returns the sequence number in the file. The node changes it with each write, and it is odd during a write. */
uint32_t limits_sequence(const struct limits_file *file);
/* Copies the limits when no write is going on. Waits at most patience_ms for a writer to finish. */
bool limits_copy(const struct limits_file *file, unsigned patience_ms, struct vgpu_limits *out, char *reason, size_t room);

/* --- shares.c: the shares of this container ------------------------------------------------------------- */

struct share {
    struct limits_file file;
    int number; /* Number of the share's folder below /dev/vgpu, if the node mounted it. */
    char limits[256], ledger[512];
};
struct shares {
    unsigned count;
    struct share of[VGPU_MAX_SHARES];
};
/* Sets the shares' paths if the library was preloaded by hand, not by the node. Both lists separate paths by colons.
 * Returns false if they name different numbers of paths, or too many. */
bool shares_by_hand(struct shares *shares, const char *limits, const char *ledgers);
bool shares_of_the_node(struct shares *shares, char *reason, size_t room);
/* Maps the limits of all shares and returns NULL. If one of them cannot be mapped, maps none and returns the share that
 * failed. */
const struct share *shares_map(struct shares *shares, bool of_the_node, char *reason, size_t room);
void shares_unmap(struct shares *shares);
/* Returns the rank of a policy: the stricter the policy, the higher. The environment may only select a stricter policy
 * than the node. */
int policy_tightness(enum vgpu_core_policy policy);
/* Adds the limits of one share to `all`. Returns false if there are too many devices. */
bool limits_add(struct vgpu_limits *all, const struct vgpu_limits *one);

/* --- share_folder.c: the share folders that the node mounted ---------------------------------------------- */

/* Lists the numbers of the share folders in ascending order. If there is none, lists the number of the first share, so
 * that opening that share reports the error. Returns the count, or -1 and a `reason` if there are too many. */
int shares_find(int numbers[VGPU_MAX_SHARES], char *reason, size_t room);
/* Opens the limits of a share and returns a descriptor. Returns -1 if the limits are missing or were not mounted by the
 * node; `reason` then has the explanation. */
int share_limits_open(int number, char *reason, size_t room);

#endif
