/* SPDX-License-Identifier: Apache-2.0 */
/* Private to limits.c, limits_file.c and share_folder.c. */
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

/* share_folder.c: the limits of the share that the node mounted; -1: these are not the node's, for that reason. */
int share_limits_open(char *reason, size_t room);

#endif
