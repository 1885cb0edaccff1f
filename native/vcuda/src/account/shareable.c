/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Marks shareable handles, which cuMemExportToShareableHandle returns. A handle is a file descriptor that refers to an
 * object, that is, to device memory or a memory pool. A mark is a lock on one byte far past the end of the descriptor's
 * file. The lock belongs to the handle's open file description (here: description). Through another description of the
 * file a process can query (F_OFD_GETLK) whether the lock exists.
 *
 * The object and the lock both exist as long as any process has the descriptor open or a message in a socket carries
 * it. So the query shows whether the handle is open in any process, even after the exporting process has died.
 *
 * All handles of a driver are descriptions of one file (/dev/nvidiactl), which other containers may share. The number
 * of the locked byte is 2^62 plus 30 bits for the container's ledger (the file with its charges), 24 bits for the
 * object and 8 bits for the handle.
 *
 * If a mark cannot be set or read, the memory stays charged until the exporting process exits, and the ledger records
 * that the container has an unmarked handle. From then on, an import without a readable mark may be of this container's
 * memory, so the importing process is charged. Before that, such an import counts as another container's memory.
 */
#include "account.h"
#include "ledger.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef F_OFD_GETLK
#define F_OFD_GETLK 36
#define F_OFD_SETLK 37
#endif

#define BASE (1ull << 62)
/* Maximum number of handles of an object. */
#define HANDLES 256ull
/* Each object has a number: the slot (entry) of its process in the ledger (high bits) and a count in this process. The
 * count has this many bits. */
#define OBJECT_BITS 14
#define SPAN (1ull << 32)

static _Atomic uint32_t next_object;
static _Atomic uint64_t released[VGPU_MAX_DEVICES];

/* Returns the first of the bytes that are locked for a container's handles. `ledger` is the device and inode number of
 * the container's ledger file. */
static uint64_t container(const uint64_t ledger[2])
{
    uint64_t hash = (ledger[0] * 0x9e3779b97f4a7c15ull ^ ledger[1]) * 0xff51afd7ed558ccdull;
    return BASE | (hash >> 34) << 32;
}

/* Sets `file` to the device and inode of an open file. Uses the system call, because on new systems libc's fstat would
 * make the library require GLIBC_2.33. */
static bool identity(int descriptor, uint64_t file[2])
{
    struct stat status;
    if (descriptor < 0 || syscall(SYS_fstat, descriptor, &status) != 0)
        return false;
    /* A lock is visible only through the inode on which it was set, and two nodes of the same device are two inodes. So
     * a device node is identified by its inode, like a file. The top bit marks a character device, for readers of the
     * ledger. */
    file[0] = S_ISCHR(status.st_mode) ? 1ull << 63 | (uint64_t)status.st_dev : (uint64_t)status.st_dev;
    file[1] = (uint64_t)status.st_ino;
    return true;
}

static bool same(const uint64_t one[2], const uint64_t other[2])
{
    return one[0] == other[0] && one[1] == other[1];
}

/* The part of a lock that lies within a requested range: from byte `first` up to but not including byte `end`. */
struct span {
    uint64_t first, end;
};

/* Returns 1 and sets *found if another description holds a lock in the range, 0 if none does, -1 if that is unknown. */
static int locked_at(int descriptor, uint64_t first, uint64_t count, struct span *found)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)first, .l_len = (off_t)count};
    if (count == 0)
        return 0;
    if (fcntl(descriptor, F_OFD_GETLK, &lock) != 0)
        return -1;
    /* The lock of another description may begin before the range and end after it. A length of 0 means that the lock
     * is unbounded. */
    uint64_t begin = (uint64_t)lock.l_start, length = (uint64_t)lock.l_len, end = first + count;
    *found = (struct span){begin > first ? begin : first, length && begin + length < end ? begin + length : end};
    return lock.l_type != F_UNLCK;
}

static int locked(int descriptor, uint64_t first, uint64_t count)
{
    struct span unused;
    return locked_at(descriptor, first, count, &unused);
}

/* Opens the file whose descriptions are the handles; its path is in the ledger. Returns -1 if no handle was marked in
 * this container, or if that path now names another file. */
static int open_file(const struct vgpu_ledger *ledger, bool *marked)
{
    char path[sizeof ledger->shareable];
    uint64_t file[2];
    memcpy(path, ledger->shareable, sizeof path);
    *marked = path[0] != 0;
    if (path[0] != '/' || !memchr(path, 0, sizeof path))
        return -1;
    int descriptor = open(path, O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    if (descriptor < 0 || (identity(descriptor, file) && same(file, ledger->shareable_file)))
        return descriptor;
    close(descriptor);
    return -1;
}

/* Records the path of the handles' file in the ledger, unless a path is already recorded. Returns false if another file
 * is recorded or if recording fails. The handle then gets no mark. */
static bool note_file(int descriptor)
{
    struct vgpu_ledger *ledger = ledger_members[0].map;
    char link[32], path[sizeof ledger->shareable] = {0};
    uint64_t file[2];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0 || path[0] != '/' || length >= (ssize_t)sizeof path - 1 || !identity(descriptor, file) ||
        !ledger_lock_take(&ledger_members[0]))
        return false;
    if (!ledger->shareable[0]) {
        memcpy(ledger->shareable_file, file, sizeof file);
        memcpy(ledger->shareable + 1, path + 1, sizeof path - 1);
        /* Store the first letter last, because a reader takes an entry with a first letter as complete. No memory fence
         * is used, because the thread sanitizer does not support fences. */
        __atomic_store_n(&ledger->shareable[0], path[0], __ATOMIC_RELEASE);
    }
    bool noted = memcmp(ledger->shareable, path, sizeof path) == 0 && same(ledger->shareable_file, file);
    ledger_lock_drop(&ledger_members[0]);
    return noted;
}

/* Returns an object number that no handle uses; 0: none is free. */
static uint64_t new_object(int file)
{
    for (uint32_t tries = 0; tries < 1u << OBJECT_BITS; tries++) {
        uint64_t number = atomic_fetch_add(&next_object, 1) & ((1u << OBJECT_BITS) - 1);
        uint64_t object = container(ledger_members[0].file) | ((uint64_t)ledger_members[0].slot << OBJECT_BITS | number) * HANDLES;
        if (locked(file, object, HANDLES) == 0)
            return object;
    }
    return 0;
}

void shareable_unmarked(void)
{
    __atomic_store_n(&ledger_members[0].map->shareable_unmarked, 1, __ATOMIC_RELEASE);
}

static bool mark(int descriptor, uint64_t *object)
{
    bool marked, done = false;
    /* A mark names one ledger. In a container with several shares (allocations of GPUs, each with a ledger) the memory
     * may be charged in another ledger, so no mark is set there. */
    if (limits_shares() > 1 || !note_file(descriptor))
        return false;
    int file = open_file(ledger_members[0].map, &marked);
    if (file < 0)
        return false;
    uint64_t mine = *object ? *object : new_object(file);
    uint64_t byte = mine, end = mine + HANDLES;
    while (mine && byte < end && locked(file, byte, 1) == 1)
        byte++;
    if (mine && byte < end) {
        struct flock lock = {.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = (off_t)byte, .l_len = 1};
        /* Check that the lock is visible: the file may not support locks. */
        done = fcntl(descriptor, F_OFD_SETLK, &lock) == 0 && locked(file, byte, 1) == 1;
    }
    close(file);
    if (done)
        *object = mine;
    return done;
}

bool shareable_mark(int descriptor, uint64_t *object)
{
    bool done = mark(descriptor, object);
    if (!done)
        shareable_unmarked();
    return done;
}

bool shareable_open(uint64_t object)
{
    bool marked;
    int file = open_file(ledger_members[0].map, &marked);
    bool open = file < 0 || locked(file, object, HANDLES) != 0;
    if (file >= 0)
        close(file);
    return open;
}

bool shareable_any(const struct vgpu_ledger *ledger, const uint64_t identity[2])
{
    bool marked;
    int file = open_file(ledger, &marked);
    bool any = file < 0 ? marked : locked(file, container(identity), SPAN) != 0;
    if (file >= 0)
        close(file);
    return any;
}

/* Returns the byte that this open file description has locked; 0: none. Reads /proc/self/fdinfo, which lists only the
 * description's own locks, so locks of other descriptions cannot hide it. */
static uint64_t listed_byte(int descriptor, uint64_t first, uint64_t count)
{
    char path[40], text[2048];
    snprintf(path, sizeof path, "/proc/self/fdinfo/%d", descriptor);
    int list = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = list >= 0 ? read(list, text, sizeof text - 1) : 0;
    if (list >= 0)
        close(list);
    text[length > 0 ? length : 0] = 0;
    /* A line of fdinfo looks like this: "lock: 1: OFDLCK ADVISORY READ -1 08:01:1234 FIRST LAST". */
    for (char *line = strstr(text, "OFDLCK"), *end; line && (end = strchr(line, '\n')); line = strstr(end + 1, "OFDLCK")) {
        uint64_t number[2] = {0, 0};
        char *at = end;
        for (int word = 1; word >= 0; word--) {
            while (at > line && at[-1] != ' ')
                at--;
            for (const char *digit = at; *digit >= '0' && *digit <= '9'; digit++)
                number[word] = number[word] * 10 + (uint64_t)(*digit - '0');
            at -= at > line;
        }
        if (number[0] == number[1] && number[0] >= first && number[0] - first < count)
            return number[0];
    }
    return 0;
}

/* Does the same as listed_byte by queries of locks, for the case that fdinfo cannot be read. A query reports only the
 * locks of other descriptions. So the byte that this description has locked is reported to `file`, which is another
 * description, but not to this one. */
static uint64_t scanned_byte(int file, int descriptor, uint64_t first, uint64_t count)
{
    struct span found;
    if (locked_at(file, first, count, &found) != 1)
        return 0;
    if (locked(descriptor, found.first, 1) == 0)
        return found.first;
    /* The kernel may report any of several locks first, so the function searches both sides of the reported lock. */
    uint64_t byte = scanned_byte(file, descriptor, first, found.first - first);
    return byte ? byte : scanned_byte(file, descriptor, found.end, first + count - found.end);
}

static uint64_t own_byte(int file, int descriptor, uint64_t first, uint64_t count)
{
    uint64_t byte = listed_byte(descriptor, first, count);
    return byte ? byte : scanned_byte(file, descriptor, first, count);
}

bool shareable_marked(int descriptor)
{
    char link[32];
    struct stat status;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    /* Open the device node to which the handle belongs, not this container's node. A handle of another container may
     * belong to another node, and a lock is visible only through the node on which it was set. */
    bool may_be = descriptor >= 0 && syscall(SYS_fstat, descriptor, &status) == 0 &&
                  (S_ISCHR(status.st_mode) || S_ISREG(status.st_mode));
    int file = may_be ? open(link, O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK) : -1;
    bool marked = file >= 0 && own_byte(file, descriptor, BASE, BASE) != 0;
    if (file >= 0)
        close(file);
    return marked;
}

uint64_t shareable_import_byte(uint64_t object)
{
    uint64_t last = VGPU_LEDGER_IMPORT_SPAN - 1;
    return VGPU_LEDGER_IMPORT_BASE + (object ? (object * 0x9e3779b97f4a7c15ull >> 32) % VGPU_LEDGER_IMPORT_SPAN : last);
}

enum shareable_origin shareable_origin(int descriptor, uint64_t *object)
{
    bool marked = false;
    uint64_t known[2], file[2];
    *object = 0;
    int all = descriptor < 0 ? -1 : open_file(ledger_members[0].map, &marked);
    if (all < 0) {
        bool ours = marked || __atomic_load_n(&ledger_members[0].map->shareable_unmarked, __ATOMIC_ACQUIRE);
        return ours ? SHAREABLE_UNKNOWN : SHAREABLE_FOREIGN;
    }
    if (identity(all, known) && identity(descriptor, file) && same(known, file))
        *object = own_byte(all, descriptor, container(ledger_members[0].file), SPAN) / HANDLES * HANDLES;
    close(all);
    return *object ? SHAREABLE_OURS : SHAREABLE_FOREIGN;
}

void shareable_release(const uint64_t bytes[VGPU_MAX_DEVICES])
{
    for (int device = 0; device < VGPU_MAX_DEVICES; device++)
        atomic_store(&released[device], bytes[device]);
}

uint64_t shareable_released(int device)
{
    return atomic_load(&released[device]);
}

void shareable_reset(void)
{
    shareable_release((uint64_t[VGPU_MAX_DEVICES]){0});
}
