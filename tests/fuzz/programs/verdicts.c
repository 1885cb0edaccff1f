/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Prints the library's result for limits files and ledgers, for comparison with the node's parser. Standard input holds
 * frames: 'L' for a limits file or 'H' for the header of a ledger, then the length as 4 little endian bytes, then the
 * bytes. The program prints one line for each frame: "no" if the library refuses the bytes, else "yes" and, for limits,
 * the fields.
 */
#include "alone.h"
#include "account/ledger.h"
#include "limits/limits_file.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *limits_ledger_path(unsigned share)
{
    (void)share;
    return "";
}
bool limits_ledger_create(void)
{
    return false;
}
bool limits_of_an_allocation(void)
{
    return false;
}
unsigned limits_shares(void)
{
    return 1;
}

uint64_t limits_share_memory(unsigned share, const char *uuid, bool *named)
{
    (void)share, (void)uuid;
    *named = false;
    return 0;
}

bool limits_same_allocation(unsigned share, const char allocation[VGPU_ALLOCATION_SIZE])
{
    (void)share;
    (void)allocation;
    return true;
}
bool limits_ledger_is_own(void)
{
    return false;
}

static void limits(const unsigned char *data, size_t length)
{
    struct vgpu_limits out;
    char reason[200];
    if (!limits_parse(data, length, &out, reason, sizeof reason)) {
        puts("no");
        return;
    }
    printf("yes %u %u %u %u %u %u", out.sequence, out.flags, out.core_policy, out.priority, out.log_level, out.device_count);
    for (unsigned i = 0; i < out.device_count; i++) {
        const struct vgpu_limits_device *device = &out.devices[i];
        printf(" ");
        for (const char *c = device->uuid; *c; c++)
            printf("%02x", (unsigned char)*c);
        printf(" %" PRIu64 " %u %u", device->memory_bytes, device->sm_percent, device->flags);
    }
    puts("");
}

int main(void)
{
    unsigned char head[5];
    while (fread(head, 1, sizeof head, stdin) == sizeof head) {
        size_t length = head[1] | (size_t)head[2] << 8 | (size_t)head[3] << 16 | (size_t)head[4] << 24;
        unsigned char *data = malloc(length ? length : 1); /* Exact size: the sanitizer reports a read past the end. */
        if (!data || fread(data, 1, length, stdin) != length)
            return 2;
        struct vgpu_ledger ledger;
        if (head[0] == 'L') {
            limits(data, length);
        } else {
            memset(&ledger, 0, sizeof ledger);
            memcpy(&ledger, data, length < sizeof ledger ? length : sizeof ledger);
            puts(ledger_header_ok(&ledger) ? "yes" : "no");
        }
        fflush(stdout);
        free(data);
    }
    return 0;
}
