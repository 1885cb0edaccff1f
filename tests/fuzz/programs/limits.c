/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fuzzes the parser of the limits file with arbitrary bytes. A fuzzer cannot guess a crc32, so every input is parsed a
 * second time with valid magic, size and crc32. Otherwise the parser would never reach the other fields.
 */
#include "limits/limits_file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t length);

static void must(bool condition, const char *what)
{
    if (!condition) {
        fprintf(stderr, "expected: %s\n", what);
        abort();
    }
}

static void parse(const unsigned char *data, size_t length)
{
    struct vgpu_limits out;
    char reason[200] = "";
    if (!limits_parse(data, length, &out, reason, sizeof reason)) {
        must(reason[0] != 0, "a reason for each refused file");
        return;
    }
    must(out.device_count <= VGPU_MAX_DEVICES, "at most VGPU_MAX_DEVICES devices");
    must(out.core_policy <= VGPU_CORE_DISABLE, "a known core policy");
    must(!(out.sequence & 1), "an even sequence number (no write in progress)");
    for (unsigned i = 0; i < out.device_count; i++)
        must(memchr(out.devices[i].uuid, 0, VGPU_UUID_SIZE) != NULL && out.devices[i].uuid[0] != 0, "a terminated, non-empty UUID of each device");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t length)
{
    parse(data, length);
    if (length < offsetof(struct vgpu_limits, devices))
        return 0;
    unsigned char *right = malloc(length);
    struct vgpu_limits header = {0};
    if (!right)
        return 0;
    memcpy(right, data, length);
    memcpy(&header, data, offsetof(struct vgpu_limits, devices));
    memcpy(header.magic, VGPU_LIMITS_MAGIC, sizeof header.magic);
    header.version |= 1;
    header.min_reader = 1;
    header.sequence &= ~1u;
    if (header.size < offsetof(struct vgpu_limits, devices) || header.size > length)
        header.size = (uint32_t)length;
    memcpy(right, &header, offsetof(struct vgpu_limits, devices));
    header.crc32 = limits_crc(right, header.size);
    memcpy(right, &header, offsetof(struct vgpu_limits, devices));
    parse(right, length);
    free(right);
    return 0;
}
