/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Shares memory between processes by the old IPC handles, and by handles of physical memory that are exported as
 * descriptors. Both kinds of handle name the exporting process's memory file by pid and descriptor number, so they work
 * between processes that see each other's /proc. The exporting process is charged. If the exporting process frees
 * memory that another process opened by an old handle, the memory stays, because the importing process has a lock on
 * the block's first byte in the memory file. Unlike on hardware, the memory of an old handle ends with the exporting
 * process. The memory of an exported descriptor does not; ../core/shared.c tracks it.
 */
#include "vmm.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define IPC_MAGIC 0x49504331u
#define PAGE 4096u
#define EXPORT_TYPE_FD 1

struct ticket {
    uint32_t magic;
    int32_t pid, fd, gpu;
    uint64_t serial; /* Serial of the exporting process. A later process with the same pid has another serial. */
    uint64_t offset, bytes;
    uint64_t reserved[2];
};
_Static_assert(sizeof(struct ticket) <= sizeof(CUipcMemHandle), "an IPC handle has 64 bytes");

struct opened {
    CUdeviceptr pointer;
    void *map;
    size_t length;
    struct ticket ticket;
    unsigned users;
    struct opened *next;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct opened *opened;

static struct ticket ticket_for(int device, const struct arena *arena, uintptr_t base, uint64_t bytes)
{
    return (struct ticket){.magic = IPC_MAGIC, .pid = getpid(), .fd = arena_fd(arena),
                           .gpu = driver.devices[device].gpu, .serial = sim_state()->procs[sim_slot()].serial,
                           .offset = arena_offset(arena, base), .bytes = bytes};
}

static bool exporter_alive(const struct ticket *ticket)
{
    bool alive = false;
    sim_lock();
    sim_reap();
    for (uint32_t slot = 0; slot < sim_state()->proc_high; slot++)
        alive = alive || (sim_state()->procs[slot].role == SIM_ROLE_CUDA &&
                          sim_state()->procs[slot].serial == ticket->serial);
    sim_unlock();
    return alive;
}

/* Memory that the program freed while another process has it open. It is freed once no process has it open. */
struct deferred {
    CUdeviceptr pointer;
    struct deferred *next;
};
static struct deferred *deferred;
static _Atomic bool exported, waiting;

static struct flock first_byte(short type, uint64_t offset)
{
    return (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_start = (off_t)offset, .l_len = 1};
}

static bool open_elsewhere(CUdeviceptr pointer)
{
    const struct arena *arena = memory_arena(pointer, &(int){0});
    struct flock lock = first_byte(F_WRLCK, arena_offset(arena, pointer));
    return fcntl(arena_fd(arena), F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

bool ipc_defer(CUdeviceptr pointer)
{
    struct block block;
    int device;
    if (!atomic_load(&exported) || !memory_find(pointer, &block, &device) || block.base != pointer ||
        block.kind != BLOCK_PLAIN || !open_elsewhere(pointer))
        return false;
    struct deferred *one = calloc(1, sizeof *one);
    if (!one)
        return false;
    pthread_mutex_lock(&mutex);
    *one = (struct deferred){pointer, deferred};
    deferred = one;
    atomic_store(&waiting, true);
    pthread_mutex_unlock(&mutex);
    return true;
}

void ipc_free_deferred(void)
{
    if (__builtin_expect(!atomic_load_explicit(&waiting, memory_order_relaxed), 1))
        return;
    pthread_mutex_lock(&mutex);
    for (struct deferred **link = &deferred; *link;) {
        struct deferred *one = *link;
        if (open_elsewhere(one->pointer)) {
            link = &one->next;
            continue;
        }
        memory_free_owned(one->pointer, 1u << BLOCK_PLAIN);
        *link = one->next;
        free(one);
    }
    atomic_store(&waiting, deferred != NULL);
    pthread_mutex_unlock(&mutex);
}

static int device_of_gpu(int gpu)
{
    for (int i = 0; i < driver.count; i++)
        if (driver.devices[i].gpu == gpu)
            return i;
    return -1;
}

static int open_file(const struct ticket *ticket)
{
    char path[64];
    if (ticket->magic != IPC_MAGIC || !exporter_alive(ticket))
        return -1;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", ticket->pid, ticket->fd);
    return open(path, O_RDWR | O_CLOEXEC);
}

EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr pointer)
{
    ENTER_CONTEXT(context);
    struct block block;
    int device;
    (void)context;
    REQUIRE(handle && memory_find(pointer, &block, &device) && block.kind == BLOCK_PLAIN, CUDA_ERROR_INVALID_VALUE);
    struct arena *arena = memory_arena(pointer, &(int){0});
    struct ticket ticket = ticket_for(device, arena, block.base, block.bytes);
    arena_touch(arena, block.base);
    atomic_store(&exported, true);
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &ticket, sizeof ticket);
    return CUDA_SUCCESS;
}

static CUresult map_ticket(const struct ticket *ticket, int device, CUdeviceptr *out)
{
    struct opened *record = calloc(1, sizeof *record);
    int fd = open_file(ticket);
    uint64_t start = ticket->offset / PAGE * PAGE, skip = ticket->offset - start;
    void *map = fd >= 0 && record ? mmap(NULL, ticket->bytes + skip, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE,
                                         fd, (off_t)start)
                                  : MAP_FAILED;
    struct flock lock = first_byte(F_RDLCK, ticket->offset);
    /* The lock lives as long as the mapping; a forked child inherits neither. */
    if (map != MAP_FAILED && (fcntl(fd, F_OFD_SETLK, &lock) != 0 || madvise(map, ticket->bytes + skip, MADV_DONTFORK) != 0)) {
        munmap(map, ticket->bytes + skip);
        map = MAP_FAILED;
    }
    if (fd >= 0)
        close(fd);
    if (map == MAP_FAILED) {
        free(record);
        return CUDA_ERROR_MAP_FAILED;
    }
    *record = (struct opened){.pointer = (uintptr_t)map + skip, .map = map, .length = ticket->bytes + skip,
                              .ticket = *ticket, .users = 1, .next = opened};
    CUresult result = vmm_adopt(record->pointer, ticket->bytes, device);
    if (result != CUDA_SUCCESS) {
        munmap(map, record->length);
        free(record);
        return result;
    }
    opened = record;
    *out = record->pointer;
    return CUDA_SUCCESS;
}

static CUresult open_handle(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned flags)
{
    ENTER_CONTEXT(context);
    struct ticket ticket;
    REQUIRE(pointer && flags <= 1, CUDA_ERROR_INVALID_VALUE);
    memcpy(&ticket, &handle, sizeof ticket);
    REQUIRE(ticket.magic == IPC_MAGIC, CUDA_ERROR_INVALID_VALUE);
    /* A process cannot import its own memory. */
    REQUIRE(ticket.serial != sim_state()->procs[sim_slot()].serial, CUDA_ERROR_INVALID_CONTEXT);
    int device = device_of_gpu(ticket.gpu);
    REQUIRE(device >= 0 && device == context->device, CUDA_ERROR_INVALID_DEVICE);
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&mutex);
    struct opened *known = opened;
    while (known && memcmp(&known->ticket, &ticket, sizeof ticket) != 0)
        known = known->next;
    if (known) {
        known->users++;
        *pointer = known->pointer;
    } else {
        result = map_ticket(&ticket, device, pointer);
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned flags)
{
    return open_handle(pointer, handle, flags);
}

EXPORT CUresult cuIpcOpenMemHandle(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned flags)
{
    return open_handle(pointer, handle, flags);
}

EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr pointer)
{
    ENTER_CONTEXT(context);
    CUresult result = context_wait(context);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&mutex);
    struct opened **link = &opened;
    while (*link && (*link)->pointer != pointer)
        link = &(*link)->next;
    struct opened *gone = *link;
    bool last = gone && --gone->users == 0;
    if (last) {
        *link = gone->next;
        vmm_disown(pointer);
        munmap(gone->map, gone->length);
        free(gone);
    }
    pthread_mutex_unlock(&mutex);
    return gone ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- physical handles as descriptors ---------------------------------------------------------------------------------- */

EXPORT CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, int type,
                                             unsigned long long flags)
{
    ENTER();
    struct physical *physical = (struct physical *)(uintptr_t)handle;
    REQUIRE(out && flags == 0 && physical && physical->magic == PHYSICAL_MAGIC, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(type == EXPORT_TYPE_FD && physical->prop.handle_types & EXPORT_TYPE_FD && !physical->imported,
            CUDA_ERROR_NOT_SUPPORTED);
    pthread_mutex_lock(&mutex);
    if (!physical->shared)
        physical->shared = 1 + sim_shared_new(&(struct sim_shared){
                                   .gpu = driver.devices[physical->device].gpu, .bytes = physical->bytes,
                                   .offset = physical->offset, .pid = getpid(), .fd = physical->fd});
    int fd = physical->shared ? sim_shared_handle(physical->shared - 1) : -1;
    pthread_mutex_unlock(&mutex);
    REQUIRE(fd >= 0, CUDA_ERROR_OPERATING_SYSTEM);
    *(int *)out = fd;
    return CUDA_SUCCESS;
}

/* Opens the exporting process's memory file by its pid. Fails after that process has ended. */
static int memory_of(const struct sim_shared *shared)
{
    char path[64];
    if (shared->pid == getpid())
        return fcntl(shared->fd, F_DUPFD_CLOEXEC, 0);
    snprintf(path, sizeof path, "/proc/%d/fd/%d", shared->pid, shared->fd);
    return open(path, O_RDWR | O_CLOEXEC);
}

EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *os_handle, int type)
{
    ENTER();
    struct sim_shared shared;
    REQUIRE(handle, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(type == EXPORT_TYPE_FD, CUDA_ERROR_NOT_SUPPORTED);
    int index = sim_shared_find((int)(intptr_t)os_handle, &shared);
    REQUIRE(index >= 0, CUDA_ERROR_INVALID_VALUE);
    int device = device_of_gpu(shared.gpu), fd = device >= 0 ? memory_of(&shared) : -1;
    REQUIRE(device >= 0, CUDA_ERROR_INVALID_DEVICE);
    REQUIRE(fd >= 0, CUDA_ERROR_INVALID_VALUE);
    void *hold = sim_shared_import(index);
    CUresult result = hold ? vmm_import(device, fd, &shared, hold, handle) : CUDA_ERROR_OPERATING_SYSTEM;
    if (result != CUDA_SUCCESS) {
        close(fd);
        if (hold)
            sim_shared_drop(hold);
    }
    return result;
}
