/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The file operations of the ledger, the file in which the container's processes record their device memory: opening
 * it, initialising an empty file, and the byte locks that show which processes are alive. The tenant (the container's
 * user) can write, truncate or replace this file. In each of these cases either the ledger is still intact, or no
 * context can be created in this container.
 */
#include "ledger.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef F_OFD_GETLK
#define F_OFD_GETLK 36
#define F_OFD_SETLK 37
#endif

#define LAYOUT_PATIENCE_MS 2000

/* Uses the system call, because on new systems libc's fstat would make the library require GLIBC_2.33. */
static bool status_of(int descriptor, struct stat *status)
{
    return syscall(SYS_fstat, descriptor, status) == 0;
}

static bool complain(const char *path, const char *what)
{
    static _Atomic unsigned count;
    if (vgpu_log_again(&count))
        vgpu_log_line(LOG_ERROR, "ledger %s: %s; no context is created", path, what);
    return false;
}

static struct flock byte_lock(short type, uint64_t byte)
{
    return (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_start = (off_t)byte, .l_len = 1};
}

int ledger_range_held(int descriptor, uint64_t first, uint64_t count)
{
    struct flock lock = byte_lock(F_WRLCK, first);
    lock.l_len = (off_t)count;
    if (fcntl(descriptor, F_OFD_GETLK, &lock) != 0)
        return -1;
    return lock.l_type != F_UNLCK;
}

int ledger_byte_held(int descriptor, uint64_t byte)
{
    return ledger_range_held(descriptor, byte, 1);
}

bool ledger_byte_share(int descriptor, uint64_t byte)
{
    struct flock lock = byte_lock(F_RDLCK, byte);
    return fcntl(descriptor, F_OFD_SETLK, &lock) == 0;
}

bool ledger_byte_take(int descriptor, uint64_t byte)
{
    struct flock lock = byte_lock(F_WRLCK, byte);
    return fcntl(descriptor, F_OFD_SETLK, &lock) == 0;
}

void ledger_byte_drop(int descriptor, uint64_t byte)
{
    struct flock lock = byte_lock(F_UNLCK, byte);
    fcntl(descriptor, F_OFD_SETLK, &lock);
}

bool ledger_header_ok(const struct vgpu_ledger *header)
{
    return memcmp(header->magic, VGPU_LEDGER_MAGIC, sizeof header->magic) == 0 && header->version != 0 &&
           header->min_reader <= VGPU_LEDGER_VERSION && header->size == VGPU_LEDGER_FILE_SIZE &&
           header->slot_count == VGPU_LEDGER_SLOTS && header->slot_offset == VGPU_LEDGER_SLOT_OFFSET &&
           header->slot_size == sizeof(struct vgpu_ledger_slot) && header->device_count <= VGPU_MAX_DEVICES;
}

static bool blank(const struct vgpu_ledger *header)
{
    static const char none[sizeof header->magic];
    return memcmp(header->magic, none, sizeof none) == 0;
}

/* Allocates all blocks of the file. Without this, a store into a hole of the mapped file would kill the process when
 * the file system is full. Returns 0 or the error number. */
static int fill_holes(int descriptor)
{
    struct stat status;
    int error;
    if (status_of(descriptor, &status) && (uint64_t)status.st_blocks * 512 >= VGPU_LEDGER_FILE_SIZE)
        return 0;
    do /* On tmpfs posix_fallocate fails with EINTR if a timer signal interrupts it. */
        error = posix_fallocate(descriptor, 0, VGPU_LEDGER_FILE_SIZE);
    while (error == EINTR);
    return error;
}

/* Initialises the file. Writes the magic last: if this process dies before that, the next process initialises the file
 * again. */
static bool lay_out(const char *path, int descriptor)
{
    struct vgpu_ledger header = {
        .version = VGPU_LEDGER_VERSION,
        .min_reader = VGPU_LEDGER_MIN_READER,
        .size = VGPU_LEDGER_FILE_SIZE,
        .slot_count = VGPU_LEDGER_SLOTS,
        .slot_offset = VGPU_LEDGER_SLOT_OFFSET,
        .slot_size = sizeof(struct vgpu_ledger_slot),
    };
    if (ftruncate(descriptor, VGPU_LEDGER_FILE_SIZE) != 0 ||
        pwrite(descriptor, &header, sizeof header, 0) != (ssize_t)sizeof header)
        return complain(path, strerror(errno));
    int error = fill_holes(descriptor);
    if (error)
        return complain(path, strerror(error));
    if (pwrite(descriptor, VGPU_LEDGER_MAGIC, sizeof header.magic, 0) != (ssize_t)sizeof header.magic)
        return complain(path, strerror(errno));
    return true;
}

static bool check(const char *path, unsigned share, int descriptor)
{
    struct vgpu_ledger header;
    struct stat status;
    memset(&header, 0, sizeof header);
    if (!status_of(descriptor, &status) || !S_ISREG(status.st_mode))
        return complain(path, "it is not a file");
    ssize_t length = pread(descriptor, &header, sizeof header, 0);
    if (length < 0)
        return complain(path, strerror(errno));
    /* Refuse a file of another user, because its owner can truncate it, and an access to the mapping would then kill
     * this process. */
    if (limits_ledger_is_own() && status.st_uid != geteuid())
        return complain(path, "it belongs to another user; remove it, or name a ledger by CUDA_DEVICE_MEMORY_SHARED_CACHE");
    if (status.st_size == 0 || (blank(&header) && status.st_size <= (off_t)VGPU_LEDGER_FILE_SIZE)) {
        /* The node has initialised this ledger, so an empty file means that the tenant has emptied it. If it were
         * accepted, the tenant would get its full limit again, in addition to the memory that is in use. */
        if (limits_of_an_allocation())
            return complain(path, "it is empty, but had content when the container started");
        bool taken = false;
        for (int waited = 0; waited < LAYOUT_PATIENCE_MS; waited++) {
            taken = ledger_byte_take(descriptor, VGPU_LEDGER_INIT_BYTE);
            if (taken)
                break;
            nanosleep(&(struct timespec){0, 1000000}, NULL);
        }
        if (!taken)
            return complain(path, "another process has been initialising it for two seconds");
        bool done = pread(descriptor, &header, sizeof header, 0) == (ssize_t)sizeof header && !blank(&header);
        if (!done)
            done = lay_out(path, descriptor);
        ledger_byte_drop(descriptor, VGPU_LEDGER_INIT_BYTE);
        if (!done)
            return false;
        if (pread(descriptor, &header, sizeof header, 0) != (ssize_t)sizeof header || !status_of(descriptor, &status))
            return complain(path, strerror(errno));
    }
    if (!ledger_header_ok(&header))
        return complain(path, "it is not a ledger of a version that this library knows");
    if (status.st_size < (off_t)VGPU_LEDGER_FILE_SIZE)
        return complain(path, "it is truncated");
    if (!limits_same_allocation(share, header.allocation))
        return complain(path, "it is of another allocation than the limits file next to it");
    return true;
}

bool ledger_file_identity(int descriptor, uint64_t file[2])
{
    struct stat status;
    if (!status_of(descriptor, &status))
        return false;
    file[0] = (uint64_t)status.st_dev;
    file[1] = (uint64_t)status.st_ino;
    return true;
}

int ledger_file_again(const struct membership *member, bool write)
{
    uint64_t file[2];
    int descriptor = ledger_file_open(member->path, member->share, write);
    if (descriptor < 0)
        return -1;
    if (ledger_file_identity(descriptor, file) && memcmp(file, member->file, sizeof file) == 0)
        return descriptor;
    complain(member->path, "it was replaced by another file");
    close(descriptor);
    return -1;
}

int ledger_file_open(const char *path, unsigned share, bool write)
{
    int flags = (write ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NOFOLLOW | O_NOCTTY | O_NONBLOCK;
    int descriptor = open(path, flags);
    if (descriptor < 0 && errno == ENOENT && write && limits_ledger_create())
        descriptor = open(path, flags | O_CREAT, limits_ledger_is_own() ? 0600 : 0666);
    if (descriptor < 0) {
        if (write)
            complain(path, strerror(errno));
        return -1;
    }
    if (!write)
        return descriptor;
    if (!check(path, share, descriptor)) {
        close(descriptor);
        return -1;
    }
    int error = fill_holes(descriptor); /* The tenant may have punched holes into the file. */
    if (error) {
        complain(path, strerror(error));
        close(descriptor);
        return -1;
    }
    return descriptor;
}
