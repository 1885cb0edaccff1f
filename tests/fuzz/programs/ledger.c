/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fuzzes the code of the ledger, the file in which the processes of a container record their charged memory. It opens,
 * joins, charges and reads a ledger of arbitrary bytes, as a tenant may write it. No ledger may crash the process, and
 * a process that has joined must be able to charge and to uncharge memory.
 */
#include "alone.h"
#include "account/ledger.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t length);

static char path[64];

/* Stubs of the functions of limits.c. */
const char *limits_ledger_path(unsigned share)
{
    (void)share;
    return path;
}
bool limits_ledger_create(void)
{
    return true;
}
static bool of_an_allocation; /* If true, an empty ledger is refused. */
bool limits_of_an_allocation(void)
{
    return of_an_allocation;
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

/*
 * Writes the input into an empty ledger: the first bytes over the header, the rest over the first slots. So most
 * inputs pass the check of the magic, and a short input is a ledger with a damaged header.
 */
static bool write_ledger(const uint8_t *data, size_t length)
{
    static unsigned char image[VGPU_LEDGER_FILE_SIZE];
    bool whole = length < 2 || !(data[0] & 1), cut = length >= 2 && (data[0] & 2);
    struct vgpu_ledger header = {.magic = VGPU_LEDGER_MAGIC, .version = 1, .min_reader = 1, .size = VGPU_LEDGER_FILE_SIZE,
                                 .slot_count = VGPU_LEDGER_SLOTS, .slot_offset = VGPU_LEDGER_SLOT_OFFSET,
                                 .slot_size = sizeof(struct vgpu_ledger_slot)};
    memset(image, 0, sizeof image);
    memcpy(image, &header, sizeof header);
    if (length) {
        data++;
        length--;
    }
    /* In half of the inputs magic, version and sizes stay valid, so that the ledger is not refused at once. */
    size_t from = whole ? offsetof(struct vgpu_ledger, device_count) : 0, room = sizeof header - from;
    size_t first = length < room ? length : room;
    memcpy(image + from, data, first);
    size_t rest = length - first < 8192 ? length - first : 8192;
    memcpy(image + VGPU_LEDGER_SLOT_OFFSET, data + first, rest);
    int descriptor = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    size_t size = cut && length >= 2 ? (data[0] | data[1] << 8) * 6u : sizeof image;
    bool written = descriptor >= 0 && write(descriptor, image, size < sizeof image ? size : sizeof image) >= 0;
    if (descriptor >= 0)
        close(descriptor);
    return written;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t length)
{
    uint64_t total;
    if (!path[0]) {
        snprintf(path, sizeof path, "/dev/shm/vgpu-fuzz-ledger-%d", (int)getpid());
        vgpu_log_level = -1;
    }
    of_an_allocation = length && (data[0] & 4);
    if (!write_ledger(data, length))
        abort();
    ledger_total("GPU-0", &total); /* This process reads the total before it joins the ledger. */
    if (ledger_join()) {
        int device = ledger_device("GPU-0");
        uint64_t own = ledger_own(device, ACCOUNT_USED);
        if (own != 0)
            abort();
        /* The total in the ledger may be any value, so even with the highest possible limit the charge may succeed or
         * fail. */
        enum charge answer = ledger_charge(device, ACCOUNT_USED, 4096, UINT64_MAX);
        if (answer == CHARGE_OK && ledger_own(device, ACCOUNT_USED) != 4096)
            abort();
        if (answer == CHARGE_OK)
            ledger_uncharge(device, ACCOUNT_USED, 4096);
        if (ledger_own(device, ACCOUNT_USED) != 0)
            abort();
        ledger_total("GPU-0", &total);
        ledger_context_bytes(device);
        munmap(ledger_members[0].map, VGPU_LEDGER_FILE_SIZE);
    }
    ledger_reset();
    unlink(path);
    return 0;
}
