/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The pages that the processes of a container share with the arbiter, the node's service that divides a GPU's time. The
 * tenant page has the container's balance of GPU time. The gpu page says when the container may launch GPU work. Both
 * are in the same folder as the ledger (the file with the memory charges). If a container has several allocations on
 * one card (the code calls an allocation a share), the pages in the first allocation's folder are used.
 *
 * It is no error if a page is missing or has an unknown version. Without a tenant page each process alone keeps to the
 * container's share of GPU time. Without a gpu page, or while the arbiter does not update it, the container as a whole
 * keeps to its share.
 */
#include "limiter.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LOOK_NS (1000 * MS)

static struct limited limits_of[VGPU_MAX_DEVICES];
static _Atomic bool opened[VGPU_MAX_DEVICES];
static struct vgpu_tenant_device alone[VGPU_MAX_DEVICES];
static struct vgpu_tenant_page *tenants[VGPU_MAX_SHARES];
static bool tenant_tried[VGPU_MAX_SHARES];
static struct lock lock;

static void *map(const char *path, int flags, int protection, size_t size)
{
    struct stat status;
    void *page = MAP_FAILED;
    int descriptor = open(path, flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY);
    if (descriptor < 0)
        return NULL;
    if (syscall(SYS_fstat, descriptor, &status) == 0 && S_ISREG(status.st_mode) && status.st_size >= (off_t)size)
        page = mmap(NULL, size, protection, MAP_SHARED, descriptor, 0);
    close(descriptor);
    if (page == MAP_FAILED)
        return NULL;
    madvise(page, size, MADV_DONTFORK); /* A forked child does not inherit the mapping and maps the page again. */
    return page;
}

/* Builds the path of the page `name` in the ledger's folder. Returns false if the ledger's file name is not the node's,
 * for example because a user preloaded the library by hand. Then there are no pages. */
static bool neighbour(char *path, size_t room, unsigned share, const char *name, const char *uuid)
{
    const char *ledger = limits_ledger_path(share), *slash = strrchr(ledger, '/');
    if (!slash || strcmp(slash, "/ledger") != 0)
        return false;
    return snprintf(path, room, "%.*s/%s%s", (int)(slash - ledger), ledger, name, uuid) < (int)room;
}

/* Returns the index of the first share that names the card, because its pages are used; 0 if no share does. */
static unsigned share_of(const char *uuid)
{
    bool named = false;
    unsigned shares = limits_shares(), share = 0;
    while (share < shares && (limits_share_memory(share, uuid, &named), !named))
        share++;
    return share < shares ? share : 0;
}

static bool ours(const char *magic, const char *expected, uint32_t version, uint32_t min_reader, uint32_t mine)
{
    return memcmp(magic, expected, 8) == 0 && version && min_reader <= mine;
}

static struct vgpu_tenant_device *tenant_device(const char *uuid)
{
    char path[600];
    unsigned share = share_of(uuid);
    struct vgpu_tenant_page *tenant = tenants[share];
    if (!tenant_tried[share] && neighbour(path, sizeof path, share, "tenant", "")) {
        struct vgpu_tenant_page *page = map(path, O_RDWR, PROT_READ | PROT_WRITE, VGPU_TENANT_FILE_SIZE);
        if (page && ours(page->magic, VGPU_TENANT_MAGIC, page->version, page->min_reader, VGPU_TENANT_VERSION) &&
            page->device_size >= sizeof(struct vgpu_tenant_device))
            tenant = tenants[share] = page;
        else
            vgpu_log(LOG_INFO, "%s is %s, so each process limits itself to the compute share", path,
                     page ? "not a tenant page" : "missing");
    }
    tenant_tried[share] = true;
    for (uint32_t i = 0; tenant && i < tenant->device_count && i < VGPU_MAX_DEVICES; i++) {
        uint64_t offset = tenant->device_offset + (uint64_t)i * tenant->device_size;
        char name[VGPU_UUID_SIZE];
        memcpy(name, tenant->uuids[i], sizeof name);
        name[sizeof name - 1] = 0;
        if (offset % 8 == 0 && offset + sizeof(struct vgpu_tenant_device) <= VGPU_TENANT_FILE_SIZE && uuid_same(name, uuid))
            return (struct vgpu_tenant_device *)((char *)tenant + offset);
    }
    return NULL;
}

static const struct vgpu_gpu_page *open_page(const char *uuid)
{
    char path[600];
    if (!neighbour(path, sizeof path, share_of(uuid), "gpu-", uuid))
        return NULL;
    struct vgpu_gpu_page *page = map(path, O_RDONLY, PROT_READ, VGPU_GPU_PAGE_FILE_SIZE);
    if (page && ours(page->magic, VGPU_GPU_PAGE_MAGIC, page->version, page->min_reader, VGPU_GPU_PAGE_VERSION))
        return page;
    if (page)
        munmap(page, VGPU_GPU_PAGE_FILE_SIZE);
    return NULL;
}

struct limited *tenant_limited(const struct device *device)
{
    struct limited *limited = &limits_of[device->ledger];
    if (atomic_load_explicit(&opened[device->ledger], memory_order_acquire))
        return limited;
    lock_take(&lock);
    if (!atomic_load_explicit(&opened[device->ledger], memory_order_relaxed)) {
        limited->device = device;
        limited->tenant = tenant_device(device->uuid);
        if (!limited->tenant)
            limited->tenant = &alone[device->ledger];
        atomic_store_explicit(&limited->page, open_page(device->uuid), memory_order_relaxed);
        limited->own = (struct vgpu_tenant_device){.balance_ns = BUCKET_CAP_NS};
        limited->busy_lane = &limited->tenant->busy_until_ns[(unsigned)getpid() % VGPU_TENANT_LANES];
        atomic_store_explicit(&opened[device->ledger], true, memory_order_release);
    }
    lock_drop(&lock);
    return limited;
}

void tenant_look_again(struct limited *limited, uint64_t now)
{
    uint64_t looked = atomic_load_explicit(&limited->looked, memory_order_relaxed);
    if (atomic_load_explicit(&limited->page, memory_order_relaxed) || now - looked < LOOK_NS)
        return;
    lock_take(&lock);
    atomic_store_explicit(&limited->looked, now, memory_order_relaxed);
    if (!atomic_load_explicit(&limited->page, memory_order_relaxed))
        atomic_store_explicit(&limited->page, open_page(limited->device->uuid), memory_order_release);
    lock_drop(&lock);
}

/* Returns how old the arbiter's last update is. The arbiter may have written the page after this thread read the clock,
 * so a time slightly in the future is valid. Therefore the absolute difference counts. */
static uint64_t age(uint64_t now, uint64_t heartbeat)
{
    return now > heartbeat ? now - heartbeat : heartbeat - now;
}

bool tenant_page(const struct limited *limited, uint64_t now, struct vgpu_gpu_page *copy)
{
    const struct vgpu_gpu_page *page = atomic_load_explicit(&limited->page, memory_order_acquire);
    if (!page)
        return false;
    for (int attempt = 0; attempt < 8; attempt++) {
        uint32_t before = __atomic_load_n(&page->sequence, __ATOMIC_ACQUIRE);
        /* A seqlock: the sequence number is read again after the fields. Acquire loads of the fields keep this second
         * read after them. A memory fence would do so too, but the thread sanitizer does not support fences. */
        copy->wake = __atomic_load_n(&page->wake, __ATOMIC_ACQUIRE);
        copy->gate = __atomic_load_n(&page->gate, __ATOMIC_ACQUIRE);
        copy->flags = __atomic_load_n(&page->flags, __ATOMIC_ACQUIRE);
        copy->rate_ppm = __atomic_load_n(&page->rate_ppm, __ATOMIC_ACQUIRE);
        copy->turn_start_ns = __atomic_load_n(&page->turn_start_ns, __ATOMIC_ACQUIRE);
        copy->turn_end_ns = __atomic_load_n(&page->turn_end_ns, __ATOMIC_ACQUIRE);
        copy->outstanding_max_us = __atomic_load_n(&page->outstanding_max_us, __ATOMIC_ACQUIRE);
        copy->heartbeat_ns = __atomic_load_n(&page->heartbeat_ns, __ATOMIC_ACQUIRE);
        if (!(before & 1) && __atomic_load_n(&page->sequence, __ATOMIC_RELAXED) == before)
            return copy->gate != VGPU_GATE_NONE && copy->heartbeat_ns && age(now, copy->heartbeat_ns) < VGPU_ARBITER_SILENT_NS;
    }
    return false; /* The writer died during a write, or writes faster than this thread can read. */
}

void tenant_charge(struct limited *limited, uint64_t ns)
{
    bucket_charge(limited->tenant, ns);
    bucket_charge(&limited->own, ns);
}

void tenant_correct(struct limited *limited, uint64_t predicted, uint64_t real)
{
    bucket_correct(limited->tenant, predicted, real);
    bucket_correct(&limited->own, predicted, real);
}

int64_t tenant_balance(struct limited *limited, uint64_t now, uint32_t rate_ppm, bool busy)
{
    bucket_accrue(limited->tenant, now, rate_ppm, busy);
    bucket_accrue(&limited->own, now, rate_ppm, busy);
    int64_t all = bucket_balance(limited->tenant), own = bucket_balance(&limited->own);
    return all < own ? all : own;
}

void tenant_reset(void)
{
    /* A forked child does not inherit the mappings, so it opens the pages again. */
    memset(limits_of, 0, sizeof limits_of);
    memset(alone, 0, sizeof alone);
    memset(opened, 0, sizeof opened);
    memset(tenants, 0, sizeof tenants);
    memset(tenant_tried, 0, sizeof tenant_tried);
    atomic_store_explicit(&lock.word, 0, memory_order_relaxed);
}
