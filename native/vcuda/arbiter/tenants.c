/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Scans the folders of the allocations and their files. An allocation is what one container was given: parts of one or
 * more GPUs. The device plugin creates and removes the files of an allocation; the arbiter creates none. A file that is
 * created again under its name (before a container restarts) is detected by its inode.
 */
#include "tenants.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "limits/limits_file.h"

/* The device plugin makes an allocation's folder first and its files a moment later. So while the folder is younger
 * than this, missing files are no error. */
#define YOUNG_NS (900 * MS)

static void complain(const struct node *node, struct allocation *allocation, const char *what, const char *why)
{
    if (node->now - allocation->since < YOUNG_NS)
        return;
    if (!allocation->complained && !node->quiet)
        fprintf(stderr, "vgpu-arbiter: %s/%s: %s: %s; its tenant limits itself to its share\n", node->root, allocation->id, what, why);
    allocation->complained = true;
}

/* Uses the system call, because on new systems libc's fstat would require a new version of glibc. */
static bool regular(int descriptor, size_t size, ino_t *inode)
{
    struct stat status;
    if (syscall(SYS_fstat, descriptor, &status) != 0 || !S_ISREG(status.st_mode) || status.st_size < (off_t)size)
        return false;
    *inode = status.st_ino;
    return true;
}

/* --- gpu pages --------------------------------------------------------------------------------------------- */

static void drop_page(struct node *node, struct allocation *allocation, int device)
{
    seat_leave(node, allocation, device);
    if (allocation->device[device].page)
        munmap(allocation->device[device].page, VGPU_GPU_PAGE_FILE_SIZE);
    allocation->device[device].page = NULL;
    allocation->device[device].inode = 0;
}

static void map_page(struct node *node, struct allocation *allocation, int device)
{
    char name[VGPU_UUID_SIZE + 8];
    const char *uuid = allocation->limits.devices[device].uuid;
    ino_t inode = 0;
    snprintf(name, sizeof name, "gpu-%s", uuid);
    int descriptor = openat(allocation->folder, name, (node->quiet ? O_RDONLY : O_RDWR) | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    bool good = descriptor >= 0 && regular(descriptor, VGPU_GPU_PAGE_FILE_SIZE, &inode);
    if (good && allocation->device[device].page && allocation->device[device].inode == inode &&
        strcmp(allocation->device[device].uuid, uuid) == 0) {
        close(descriptor);
        return;
    }
    drop_page(node, allocation, device);
    void *page = MAP_FAILED;
    if (good)
        page = mmap(NULL, VGPU_GPU_PAGE_FILE_SIZE, node->quiet ? PROT_READ : PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (descriptor >= 0)
        close(descriptor);
    if (page == MAP_FAILED) {
        complain(node, allocation, name, "not a file of 4096 bytes");
        return;
    }
    const struct vgpu_gpu_page *header = page;
    if (memcmp(header->magic, VGPU_GPU_PAGE_MAGIC, sizeof header->magic) != 0 || header->min_reader > VGPU_GPU_PAGE_VERSION) {
        complain(node, allocation, name, "not a gpu page of this version");
        munmap(page, VGPU_GPU_PAGE_FILE_SIZE);
        return;
    }
    allocation->device[device].page = page;
    allocation->device[device].inode = inode;
    snprintf(allocation->device[device].uuid, VGPU_UUID_SIZE, "%s", uuid);
}

static void take_seat(struct node *node, struct allocation *allocation, int device, uint64_t now)
{
    if (!node->quiet && allocation->device[device].page && allocation->device[device].gpu < 0 &&
        !seat_take(node, allocation, device, now))
        complain(node, allocation, allocation->device[device].uuid, "more tenants are busy on this GPU than the arbiter can serve");
}

/* --- allocations ------------------------------------------------------------------------------------------- */

static void forget(struct node *node, struct allocation *allocation)
{
    for (int i = 0; i < VGPU_MAX_DEVICES; i++)
        drop_page(node, allocation, i);
    if (allocation->tenant >= 0)
        close(allocation->tenant);
    close(allocation->folder);
    memset(allocation, 0, sizeof *allocation);
}

static void read_limits(struct node *node, struct allocation *allocation)
{
    unsigned char bytes[VGPU_LIMITS_FILE_SIZE];
    char reason[200];
    struct vgpu_limits limits;
    int descriptor = openat(allocation->folder, "limits", O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    ssize_t length = descriptor >= 0 ? pread(descriptor, bytes, sizeof bytes, 0) : -1;
    if (descriptor >= 0)
        close(descriptor);
    if (length < 0) {
        complain(node, allocation, "limits", strerror(errno));
        allocation->limits_good = false;
    } else if (limits_parse(bytes, (size_t)length, &limits, reason, sizeof reason)) {
        allocation->limits = limits;
        allocation->limits_good = true;
    /* While the file is being written, the arbiter keeps the values that it read last. */
    } else if (!allocation->limits_good) {
        complain(node, allocation, "limits", reason);
    }
}

static void open_files(struct node *node, struct allocation *allocation, uint64_t now)
{
    ino_t inode;
    read_limits(node, allocation);
    int descriptor = openat(allocation->folder, "rw/tenant", O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (descriptor >= 0 && regular(descriptor, 0, &inode)) {
        if (allocation->tenant >= 0)
            close(allocation->tenant);
        allocation->tenant = descriptor;
    } else {
        if (descriptor >= 0)
            close(descriptor);
        complain(node, allocation, "rw/tenant", "not there");
    }
    for (uint32_t i = 0; i < VGPU_MAX_DEVICES; i++)
        if (allocation->limits_good && i < allocation->limits.device_count) {
            map_page(node, allocation, (int)i);
            take_seat(node, allocation, (int)i, now);
        } else {
            drop_page(node, allocation, (int)i);
        }
}

static struct allocation *find(struct node *node, const char *id)
{
    struct allocation *empty = NULL;
    for (int i = 0; i < ALLOCATIONS; i++) {
        if (node->allocation[i].used && strcmp(node->allocation[i].id, id) == 0)
            return &node->allocation[i];
        if (!node->allocation[i].used && !empty)
            empty = &node->allocation[i];
    }
    return empty;
}

bool tenants_scan(struct node *node, uint64_t now)
{
    node->now = now;
    DIR *folder = opendir(node->root);
    if (folder) {
        for (struct dirent *entry; (entry = readdir(folder));) {
            struct stat there, ours;
            if (entry->d_name[0] == '.' || strlen(entry->d_name) >= VGPU_ALLOCATION_SIZE)
                continue;
            struct allocation *allocation = find(node, entry->d_name);
            if (!allocation)
                /* There is no room for this allocation, so the arbiter does not schedule it and its container keeps
                 * its own share. */
                continue;
            int descriptor = openat(dirfd(folder), entry->d_name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
            if (descriptor < 0)
                continue;
            if (allocation->used && (syscall(SYS_fstat, descriptor, &there) != 0 || syscall(SYS_fstat, allocation->folder, &ours) != 0 ||
                                     there.st_ino != ours.st_ino))
                forget(node, allocation); /* The folder was replaced by a new folder with the same name. */
            if (!allocation->used) {
                snprintf(allocation->id, sizeof allocation->id, "%s", entry->d_name);
                allocation->used = true;
                allocation->since = now;
                allocation->folder = descriptor;
                allocation->tenant = -1;
                for (int i = 0; i < VGPU_MAX_DEVICES; i++)
                    allocation->device[i].gpu = -1;
            } else {
                close(descriptor);
            }
            allocation->seen = true;
        }
        closedir(folder);
    }
    for (int i = 0; i < ALLOCATIONS; i++) {
        struct allocation *allocation = &node->allocation[i];
        if (!allocation->used)
            continue;
        if (allocation->seen)
            open_files(node, allocation, now);
        else
            forget(node, allocation);
        allocation->seen = false;
    }
    return folder != NULL;
}

void tenants_limits(struct node *node, uint64_t now)
{
    node->now = now;
    for (int i = 0; i < ALLOCATIONS; i++) {
        if (!node->allocation[i].used)
            continue;
        read_limits(node, &node->allocation[i]);
        /* A tenant that has started to work takes a seat in the GPU's schedule from a resting tenant. */
        for (int d = 0; d < VGPU_MAX_DEVICES; d++)
            take_seat(node, &node->allocation[i], d, now);
    }
}

unsigned tenants_count(const struct node *node)
{
    unsigned count = 0;
    for (int i = 0; i < ALLOCATIONS; i++)
        count += node->allocation[i].used;
    return count;
}

bool tenants_page(const struct allocation *allocation, struct vgpu_tenant_page *page)
{
    memset(page, 0, sizeof *page);
    return allocation->tenant >= 0 && pread(allocation->tenant, page, sizeof *page, 0) == (ssize_t)sizeof *page &&
           memcmp(page->magic, VGPU_TENANT_MAGIC, sizeof page->magic) == 0 && page->min_reader <= VGPU_TENANT_VERSION;
}
