/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the files of the slice (its limits, and the ledger with the memory charged to each process) directly, without
 * libvgpu. */
#include "probe.h"

#include <dirent.h>
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

#define PLACE 256

/* Paths of the files of this container's shares. A share is a numbered folder with the files of one allocation. If the
 * library was preloaded by hand, the paths are those in the library's environment variables. */
struct places {
    int count;
    char limits[VGPU_MAX_SHARES][PLACE], ledger[VGPU_MAX_SHARES][PLACE];
};

/* Splits a list of paths at the colons. */
static int listed(const char *list, char paths[VGPU_MAX_SHARES][PLACE])
{
    int count = 0;
    for (; *list && count < VGPU_MAX_SHARES; count++) {
        size_t length = strcspn(list, ":");
        snprintf(paths[count], PLACE, "%.*s", (int)length, list);
        list += length + (list[length] == ':');
    }
    return count;
}

static void find_folders(struct places *places)
{
    char path[PLACE];
    DIR *root = opendir(VGPU_PATH_ROOT);
    for (struct dirent *entry; root && places->count < VGPU_MAX_SHARES && (entry = readdir(root));) {
        size_t digits = strspn(entry->d_name, "0123456789");
        snprintf(path, sizeof path, VGPU_PATH_ROOT "/%.16s/limits", entry->d_name);
        if (!digits || digits > 4 || entry->d_name[digits] || access(path, F_OK) != 0)
            continue;
        memcpy(places->limits[places->count], path, sizeof path);
        snprintf(places->ledger[places->count++], PLACE, VGPU_PATH_ROOT "/%.16s/ledger", entry->d_name);
    }
    if (root)
        closedir(root);
}

static const struct places *find(void)
{
    static struct places places;
    const char *limits = getenv("VGPU_LIMITS_FILE"), *ledgers = getenv("CUDA_DEVICE_MEMORY_SHARED_CACHE");
    if (places.count)
        return &places;
    find_folders(&places);
    if (!places.count) {
        places.count = 1;
        snprintf(places.limits[0], PLACE, "%s", VGPU_PATH_LIMITS);
        snprintf(places.ledger[0], PLACE, "%s", VGPU_PATH_LEDGER);
    }
    if (limits && *limits)
        places.count = listed(limits, places.limits);
    if (ledgers && *ledgers) {
        int count = listed(ledgers, places.ledger);
        places.count = limits && *limits && count > places.count ? places.count : count;
    }
    return &places;
}

const char *slice_limits(void)
{
    return find()->limits[0];
}

const char *slice_ledger(void)
{
    return find()->ledger[0];
}

/* Adds a share's limits of one device to those of the earlier shares. */
static bool add_device(struct slice *slice, const struct vgpu_limits_device *one)
{
    for (int i = 0; i < slice->count; i++) {
        struct vgpu_limits_device *all = &slice->devices[i];
        if (!uuid_same(all->uuid, one->uuid))
            continue;
        /* 0 means no limit or no memory, depending on the flags. */
        bool unlimited = all->memory_bytes == 0 || one->memory_bytes == 0;
        all->memory_bytes = unlimited ? 0 : all->memory_bytes + one->memory_bytes;
        all->sm_percent = all->sm_percent && one->sm_percent ? all->sm_percent + one->sm_percent : 0;
        return true;
    }
    if (slice->count == VGPU_MAX_DEVICES)
        return false;
    slice->devices[slice->count++] = *one;
    return true;
}

static bool read_one(struct slice *slice, const char *path)
{
    union {
        struct vgpu_limits limits;
        unsigned char bytes[VGPU_LIMITS_FILE_SIZE];
    } file;
    memset(&file, 0, sizeof file);
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = descriptor < 0 ? -1 : read(descriptor, &file, sizeof file);
    if (length < 0)
        snprintf(slice->reason, sizeof slice->reason, "%.120s: %s", path, strerror(errno));
    if (descriptor >= 0)
        close(descriptor);
    if (length < 0)
        return false;
    const struct vgpu_limits *limits = &file.limits;
    if ((size_t)length < offsetof(struct vgpu_limits, devices) || memcmp(limits->magic, VGPU_LIMITS_MAGIC, 8) != 0 ||
        limits->min_reader > VGPU_LIMITS_VERSION || limits->device_count > VGPU_MAX_DEVICES ||
        limits->device_offset + (uint64_t)limits->device_count * limits->device_size > (uint64_t)length) {
        snprintf(slice->reason, sizeof slice->reason, "%.100s is not a limits file of version %u", path, VGPU_LIMITS_VERSION);
        return false;
    }
    struct vgpu_limits_device device;
    size_t known = limits->device_size < sizeof device ? limits->device_size : sizeof device;
    slice->flags |= limits->flags;
    if (limits->core_policy != VGPU_CORE_DISABLE)
        slice->core_policy = slice->core_policy == VGPU_CORE_FORCE ? slice->core_policy : limits->core_policy;
    for (uint32_t i = 0; i < limits->device_count; i++) {
        memset(&device, 0, sizeof device);
        memcpy(&device, file.bytes + limits->device_offset + (size_t)i * limits->device_size, known);
        if (!add_device(slice, &device))
            return false;
    }
    return true;
}

void slice_read(struct slice *slice)
{
    const struct places *places = find();
    memset(slice, 0, sizeof *slice);
    slice->core_policy = VGPU_CORE_DISABLE;
    slice->found = true;
    for (int i = 0; i < places->count && slice->found; i++)
        slice->found = read_one(slice, places->limits[i]);
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

/* Finds the next slot with a live owner, or any slot. Returns false if there is none. */
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

/* Opens a ledger. Returns -1 if there is none. */
static int ledger_open(const char *path)
{
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    struct vgpu_ledger header;
    if (descriptor >= 0 && (pread(descriptor, &header, sizeof header, 0) != (ssize_t)sizeof header ||
                            memcmp(header.magic, VGPU_LEDGER_MAGIC, 8) != 0)) {
        close(descriptor);
        return -1;
    }
    return descriptor;
}

/* Returns the bytes of the live slots or of all slots, for one process or, with pid 0, for all processes. */
static int64_t bytes_of(bool living, uint32_t pid)
{
    struct vgpu_ledger_slot slot;
    int64_t bytes = 0;
    for (int i = 0; i < find()->count; i++) {
        int descriptor = ledger_open(find()->ledger[i]);
        if (descriptor < 0)
            return -1;
        for (uint32_t index = 0; slot_next(descriptor, &index, living, &slot);)
            for (int device = 0; device < VGPU_MAX_DEVICES; device++)
                if (!pid || slot.pid == pid)
                    bytes += (int64_t)(slot.used[device] + slot.context[device]);
        close(descriptor);
    }
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
    /* One ledger suffices for this test, because each process has a slot in every ledger. */
    int descriptor = ledger_open(slice_ledger());
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
    int descriptor = open(slice_ledger(), O_RDONLY | O_CLOEXEC);
    bool used = descriptor >= 0;
    /* Try again, because the kernel may still be removing a process of the last check. */
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
