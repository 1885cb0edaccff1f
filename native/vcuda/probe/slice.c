/* SPDX-License-Identifier: Apache-2.0 */
/* The files of the slice, read without the library. */
#include "probe.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifndef F_OFD_GETLK
#define F_OFD_GETLK 36
#endif

static const char *named(const char *variable, const char *otherwise)
{
    const char *path = getenv(variable);
    return path && *path ? path : otherwise;
}

void slice_read(struct slice *slice)
{
    const char *path = named("VGPU_LIMITS_FILE", VGPU_PATH_LIMITS);
    union {
        struct vgpu_limits limits;
        unsigned char bytes[VGPU_LIMITS_FILE_SIZE];
    } file;
    memset(slice, 0, sizeof *slice);
    memset(&file, 0, sizeof file);
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = descriptor < 0 ? -1 : read(descriptor, &file, sizeof file);
    if (length < 0)
        snprintf(slice->reason, sizeof slice->reason, "%s: %s", path, strerror(errno));
    if (descriptor >= 0)
        close(descriptor);
    if (length < 0)
        return;
    const struct vgpu_limits *limits = &file.limits;
    if ((size_t)length < offsetof(struct vgpu_limits, devices) || memcmp(limits->magic, VGPU_LIMITS_MAGIC, 8) != 0 ||
        limits->min_reader > VGPU_LIMITS_VERSION || limits->device_count > VGPU_MAX_DEVICES ||
        limits->device_offset + (uint64_t)limits->device_count * limits->device_size > (uint64_t)length) {
        snprintf(slice->reason, sizeof slice->reason, "%s is no limits file of version %u", path, VGPU_LIMITS_VERSION);
        return;
    }
    size_t known = limits->device_size < sizeof *slice->devices ? limits->device_size : sizeof *slice->devices;
    slice->found = true;
    slice->flags = limits->flags;
    slice->core_policy = limits->core_policy;
    slice->count = (int)limits->device_count;
    for (int i = 0; i < slice->count; i++)
        memcpy(&slice->devices[i], file.bytes + limits->device_offset + (size_t)i * limits->device_size, known);
}

bool uuid_same(const char *left, const char *right)
{
    const char *l = strchr(left, '-'), *r = strchr(right, '-');
    return strcmp(l ? l : left, r ? r : right) == 0;
}

const struct vgpu_limits_device *slice_device(const struct slice *slice, const char *uuid)
{
    for (int i = 0; i < slice->count; i++)
        if (uuid_same(slice->devices[i].uuid, uuid))
            return &slice->devices[i];
    return NULL;
}

void uuid_spell(const CUuuid *uuid, char out[VGPU_UUID_SIZE])
{
    const unsigned char *b = uuid->bytes;
    snprintf(out, VGPU_UUID_SIZE, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0], b[1],
             b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
}

static bool slot_lives(int descriptor, uint32_t index)
{
    struct flock lock = {.l_type = F_WRLCK, .l_start = (off_t)VGPU_LEDGER_ALIVE_BASE + index, .l_len = 1};
    return fcntl(descriptor, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

/* The next slot, of somebody who lives or of anybody; false: there is none. */
static bool slot_next(int descriptor, uint32_t *index, bool living, struct vgpu_ledger_slot *slot)
{
    while (*index < VGPU_LEDGER_SLOTS) {
        uint32_t here = (*index)++;
        off_t at = (off_t)VGPU_LEDGER_SLOT_OFFSET + (off_t)here * (off_t)sizeof *slot;
        if (pread(descriptor, slot, sizeof *slot, at) != (ssize_t)sizeof *slot)
            return false;
        if (slot->pid && (!living || slot_lives(descriptor, here)))
            return true;
    }
    return false;
}

/* -1: there is no ledger. */
static int ledger_open(void)
{
    int descriptor = open(named("CUDA_DEVICE_MEMORY_SHARED_CACHE", VGPU_PATH_LEDGER), O_RDONLY | O_CLOEXEC);
    struct vgpu_ledger header;
    if (descriptor >= 0 && (pread(descriptor, &header, sizeof header, 0) != (ssize_t)sizeof header ||
                            memcmp(header.magic, VGPU_LEDGER_MAGIC, 8) != 0)) {
        close(descriptor);
        return -1;
    }
    return descriptor;
}

/* Of the slots of those who live, or of all; of one process alone, or of all (0). */
static int64_t bytes_of(bool living, uint32_t pid)
{
    struct vgpu_ledger_slot slot;
    int64_t bytes = 0;
    int descriptor = ledger_open();
    if (descriptor < 0)
        return -1;
    for (uint32_t index = 0; slot_next(descriptor, &index, living, &slot);)
        for (int device = 0; device < VGPU_MAX_DEVICES; device++)
            if (!pid || slot.pid == pid)
                bytes += (int64_t)(slot.used[device] + slot.context[device]);
    close(descriptor);
    return bytes;
}

int64_t ledger_live_bytes(void)
{
    return bytes_of(true, 0);
}

int64_t ledger_own_bytes(void)
{
    return bytes_of(true, (uint32_t)getpid());
}

int64_t ledger_all_bytes(void)
{
    return bytes_of(false, 0);
}

bool ledger_has(uint32_t pid)
{
    struct vgpu_ledger_slot slot;
    int descriptor = ledger_open();
    bool found = false;
    for (uint32_t index = 0; descriptor >= 0 && !found && slot_next(descriptor, &index, true, &slot);)
        found = slot.pid == pid;
    if (descriptor >= 0)
        close(descriptor);
    return found;
}

bool ledger_in_use(void)
{
    const struct timespec nap = {.tv_nsec = 10000000};
    int descriptor = open(VGPU_PATH_LEDGER, O_RDONLY | O_CLOEXEC);
    bool used = descriptor >= 0;
    /* The kernel may still be taking apart a process of the last check. */
    for (int tries = 0; used && tries < 100; tries++) {
        struct flock lock = {.l_type = F_WRLCK, .l_start = (off_t)VGPU_LEDGER_ALIVE_BASE, .l_len = VGPU_LEDGER_SLOTS};
        used = fcntl(descriptor, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
        if (used)
            nanosleep(&nap, NULL);
    }
    if (descriptor >= 0)
        close(descriptor);
    return used;
}
