/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Folders and pages. The device plugin lays the files of an allocation out and takes them away; the arbiter creates
 * nothing there. A file that is made again under its name (before a container starts again) is known by its inode.
 */
#include "tenants.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "limits/limits_file.h"

static void complain(const struct node *node, struct allocation *allocation, const char *what, const char *why)
{
    if (!allocation->complained && !node->quiet)
        fprintf(stderr, "vgpu-arbiter: %s/%s: %s: %s; its tenant keeps its own share\n", node->root, allocation->id, what, why);
    allocation->complained = true;
}

/* Also by number: libc's own fstat has a new version in new systems. */
static bool regular(int descriptor, size_t size, ino_t *inode)
{
    struct stat status;
    if (syscall(SYS_fstat, descriptor, &status) != 0 || !S_ISREG(status.st_mode) || status.st_size < (off_t)size)
        return false;
    *inode = status.st_ino;
    return true;
}

/* --- GPUs ------------------------------------------------------------------------------------------------- */

static int gpu_find(struct node *node, const char *uuid)
{
    int empty = -1;
    for (int i = 0; i < GPUS; i++) {
        if (strcmp(node->gpu[i].uuid, uuid) == 0)
            return i;
        if (!node->gpu[i].uuid[0] && empty < 0)
            empty = i;
    }
    if (empty >= 0) {
        memset(&node->gpu[empty], 0, sizeof node->gpu[empty]);
        snprintf(node->gpu[empty].uuid, VGPU_UUID_SIZE, "%s", uuid);
        node->gpu[empty].schedule.holder = -1;
    }
    return empty;
}

static void leave(struct node *node, struct allocation *allocation, int device)
{
    int gpu = allocation->device[device].gpu, slot = allocation->device[device].slot;
    if (gpu >= 0) {
        struct gpu *g = &node->gpu[gpu];
        bool any = false;
        g->tenant[slot] = NULL;
        memset(&g->schedule.tenant[slot], 0, sizeof g->schedule.tenant[slot]);
        if (g->schedule.holder == slot)
            g->schedule.turn_end = 0; /* a tenant that waits comes at the next look */
        for (int i = 0; i < SCHEDULE_TENANTS; i++)
            any = any || g->tenant[i];
        if (!any)
            memset(g, 0, sizeof *g);
    }
    if (allocation->device[device].page)
        munmap(allocation->device[device].page, VGPU_GPU_PAGE_FILE_SIZE);
    allocation->device[device].page = NULL;
    allocation->device[device].inode = 0;
    allocation->device[device].gpu = -1;
}

static void join(struct node *node, struct allocation *allocation, int device)
{
    char name[VGPU_UUID_SIZE + 8];
    const char *uuid = allocation->limits.devices[device].uuid;
    ino_t inode = 0;
    snprintf(name, sizeof name, "gpu-%s", uuid);
    int descriptor = openat(allocation->folder, name, (node->quiet ? O_RDONLY : O_RDWR) | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    bool good = descriptor >= 0 && regular(descriptor, VGPU_GPU_PAGE_FILE_SIZE, &inode);
    if (good && allocation->device[device].page && allocation->device[device].inode == inode &&
        strcmp(node->gpu[allocation->device[device].gpu].uuid, uuid) == 0) {
        close(descriptor);
        return;
    }
    leave(node, allocation, device);
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
    int gpu = -1, slot = -1;
    if (memcmp(header->magic, VGPU_GPU_PAGE_MAGIC, sizeof header->magic) == 0 && header->min_reader <= VGPU_GPU_PAGE_VERSION)
        gpu = gpu_find(node, uuid);
    else
        complain(node, allocation, name, "not a gpu page of this version");
    for (int i = 0; gpu >= 0 && i < SCHEDULE_TENANTS && slot < 0; i++)
        if (!node->gpu[gpu].tenant[i])
            slot = i;
    if (slot < 0) {
        if (gpu >= 0)
            complain(node, allocation, name, "more tenants of one GPU than the arbiter can serve");
        munmap(page, VGPU_GPU_PAGE_FILE_SIZE);
        return;
    }
    allocation->device[device].page = page;
    allocation->device[device].inode = inode;
    allocation->device[device].gpu = gpu;
    allocation->device[device].slot = slot;
    node->gpu[gpu].tenant[slot] = allocation;
    node->gpu[gpu].index[slot] = device;
    node->gpu[gpu].next = 0;
}

/* --- allocations ------------------------------------------------------------------------------------------- */

static void forget(struct node *node, struct allocation *allocation)
{
    for (int i = 0; i < VGPU_MAX_DEVICES; i++)
        leave(node, allocation, i);
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
    } else if (!allocation->limits_good) { /* a file that is being written keeps its last content here */
        complain(node, allocation, "limits", reason);
    }
}

static void open_files(struct node *node, struct allocation *allocation)
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
        if (allocation->limits_good && i < allocation->limits.device_count)
            join(node, allocation, (int)i);
        else
            leave(node, allocation, (int)i);
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

bool tenants_scan(struct node *node)
{
    DIR *folder = opendir(node->root);
    if (folder) {
        for (struct dirent *entry; (entry = readdir(folder));) {
            struct stat there, ours;
            if (entry->d_name[0] == '.' || strlen(entry->d_name) >= VGPU_ALLOCATION_SIZE)
                continue;
            struct allocation *allocation = find(node, entry->d_name);
            if (!allocation)
                continue; /* more than there is room for: it keeps its own share */
            int descriptor = openat(dirfd(folder), entry->d_name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
            if (descriptor < 0)
                continue;
            if (allocation->used && (syscall(SYS_fstat, descriptor, &there) != 0 || syscall(SYS_fstat, allocation->folder, &ours) != 0 ||
                                     there.st_ino != ours.st_ino))
                forget(node, allocation); /* another folder of the same name */
            if (!allocation->used) {
                snprintf(allocation->id, sizeof allocation->id, "%s", entry->d_name);
                allocation->used = true;
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
            open_files(node, allocation);
        else
            forget(node, allocation);
        allocation->seen = false;
    }
    return folder != NULL;
}

void tenants_limits(struct node *node)
{
    for (int i = 0; i < ALLOCATIONS; i++)
        if (node->allocation[i].used)
            read_limits(node, &node->allocation[i]);
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

/* --- looking and writing ------------------------------------------------------------------------------------ */

static void read_input(const struct allocation *allocation, int index, struct schedule_input *input)
{
    struct vgpu_tenant_page page;
    const struct vgpu_limits *limits = &allocation->limits;
    uint32_t percent = limits->devices[index].sm_percent;
    bool speaks = tenants_page(allocation, &page);
    *input = (struct schedule_input){
        .share_ppm = percent && percent < 100 ? percent * 10000 : 1000000,
        .force = limits->core_policy == VGPU_CORE_FORCE,
        .high = limits->priority == 0,
        .unlimited = limits->core_policy == VGPU_CORE_DISABLE || !percent || percent >= 100,
    };
    if (!speaks)
        return;
    struct vgpu_tenant_device *device = &page.devices[index];
    input->active_ns = device->active_ns;
    input->waiting_ns = device->waiting_ns;
    input->used_ns = device->used_ns;
    input->high = input->high && !(device->requests & VGPU_TENANT_LOW);
    for (unsigned i = 0; i < VGPU_TENANT_LANES; i++)
        if (device->busy_until_ns[i] > input->busy_until_ns)
            input->busy_until_ns = device->busy_until_ns[i];
}

/* For the watcher, which holds who was alone to no share. What the page says was so since the last look, unless the
 * arbiter was away. */
static void count_open(struct vgpu_gpu_page *page, uint64_t now)
{
    uint64_t passed = now - page->heartbeat_ns;
    if (page->heartbeat_ns && page->gate == VGPU_GATE_OPEN && page->rate_ppm == 1000000 && passed < VGPU_ARBITER_SILENT_NS)
        __atomic_store_n(&page->open_ns, page->open_ns + passed, __ATOMIC_RELAXED);
}

static void write_output(struct vgpu_gpu_page *page, const struct schedule_output *out, uint64_t now, uint32_t tenants,
                         uint32_t active)
{
    count_open(page, now);
    __atomic_store_n(&page->tenants, tenants, __ATOMIC_RELAXED);
    __atomic_store_n(&page->active, active, __ATOMIC_RELAXED);
    if (page->gate == out->gate && page->flags == out->flags && page->rate_ppm == out->rate_ppm &&
        page->turn_start_ns == out->turn_start_ns && page->turn_end_ns == out->turn_end_ns &&
        page->outstanding_max_us == out->outstanding_max_us && !(page->sequence & 1)) {
        __atomic_store_n(&page->heartbeat_ns, now, __ATOMIC_RELEASE);
        return;
    }
    uint32_t sequence = page->sequence | 1; /* odd already: an arbiter died here */
    __atomic_store_n(&page->sequence, sequence, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    __atomic_store_n(&page->gate, out->gate, __ATOMIC_RELAXED);
    __atomic_store_n(&page->flags, out->flags, __ATOMIC_RELAXED);
    __atomic_store_n(&page->rate_ppm, out->rate_ppm, __ATOMIC_RELAXED);
    __atomic_store_n(&page->turn_start_ns, out->turn_start_ns, __ATOMIC_RELAXED);
    __atomic_store_n(&page->turn_end_ns, out->turn_end_ns, __ATOMIC_RELAXED);
    __atomic_store_n(&page->outstanding_max_us, out->outstanding_max_us, __ATOMIC_RELAXED);
    __atomic_store_n(&page->turns, out->turns, __ATOMIC_RELAXED);
    __atomic_store_n(&page->heartbeat_ns, now, __ATOMIC_RELAXED);
    __atomic_store_n(&page->sequence, sequence + 1, __ATOMIC_RELEASE);
    __atomic_fetch_add(&page->wake, 1, __ATOMIC_RELEASE);
    if (out->gate != VGPU_GATE_CLOSED)
        syscall(SYS_futex, &page->wake, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

uint64_t tenants_look(struct node *node, struct gpu *gpu, uint64_t now)
{
    uint32_t count = 0, active = 0;
    (void)node;
    for (int i = 0; i < SCHEDULE_TENANTS; i++) {
        struct schedule_tenant *tenant = &gpu->schedule.tenant[i];
        tenant->present = gpu->tenant[i] != NULL;
        if (tenant->present)
            read_input(gpu->tenant[i], gpu->index[i], &tenant->in);
        count += tenant->present;
    }
    gpu->next = schedule_step(&gpu->schedule, now);
    for (int i = 0; i < SCHEDULE_TENANTS; i++)
        active += gpu->tenant[i] && gpu->schedule.tenant[i].active;
    for (int i = 0; i < SCHEDULE_TENANTS; i++)
        if (gpu->tenant[i])
            write_output(gpu->tenant[i]->device[gpu->index[i]].page, &gpu->schedule.tenant[i].out, now, count, active);
    return gpu->next;
}

void tenants_release(struct node *node)
{
    const struct schedule_output nothing = {.gate = VGPU_GATE_NONE};
    for (int i = 0; i < GPUS; i++)
        for (int t = 0; t < SCHEDULE_TENANTS; t++)
            if (node->gpu[i].tenant[t])
                write_output(node->gpu[i].tenant[t]->device[node->gpu[i].index[t]].page, &nothing, 0, 0, 0);
}
