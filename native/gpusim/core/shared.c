/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Keeps track of memory that has a shareable handle. A handle is a file descriptor, as on hardware. The memory lives as
 * long as a process has such a descriptor or has imported the memory, even after the exporting process has ended. A
 * descriptor in transit in a socket keeps the memory too. Each descriptor and each import has a lock on a byte of one
 * file. A descriptor's lock belongs to its open file description. An importer's lock lives as long as its mapping of
 * the file.
 *
 * Memory that the exporting process has released still counts as used on the GPU (sim_gpu.used), but no process is
 * charged for it.
 */
#include "internal.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define HANDLE_BYTES ((off_t)0x1000000000)
#define IMPORT_BYTES ((off_t)0x2000000000)
#define PAGE 4096
#define HANDLES 256 /* Maximum number of handles of one block. Each handle has one lock byte. */

static int open_file(void)
{
    char path[4096];
    snprintf(path, sizeof path, "%s.shareable", sim_state_path());
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    struct stat info;
    if (fd >= 0 && fstat(fd, &info) == 0 && info.st_size < PAGE) {
        fchmod(fd, 0666);
        if (ftruncate(fd, PAGE) < 0) {
            close(fd);
            fd = -1;
        }
    }
    return fd;
}

static bool lock_byte(int fd, off_t byte)
{
    struct flock lock = {.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    return fcntl(fd, F_OFD_SETLK, &lock) == 0;
}

/* True if an open file description other than fd's has a lock on one of the bytes. */
static bool bytes_held(int fd, off_t first, int count)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = first, .l_len = count};
    return fcntl(fd, F_OFD_GETLK, &lock) < 0 || lock.l_type != F_UNLCK;
}

static bool held(int fd, int index)
{
    return bytes_held(fd, HANDLE_BYTES + (off_t)index * HANDLES, HANDLES) || bytes_held(fd, IMPORT_BYTES + index, 1);
}

int sim_shared_new(const struct sim_shared *what)
{
    struct sim_state *state = sim_self.state;
    int found = -1;
    sim_lock();
    for (int i = 0; i < SIM_SHARED && found < 0; i++)
        if (!state->shared[i].used)
            found = i;
    if (found >= 0) {
        state->shared[found] = *what;
        state->shared[found].used = 1;
        state->shared[found].serial = state->procs[sim_self.slot].serial;
        memcpy(state->shared[found].groups, state->procs[sim_self.slot].groups, sizeof state->shared[found].groups);
    }
    sim_unlock();
    return found;
}

void sim_shared_resize(int index, uint64_t bytes)
{
    sim_lock();
    sim_self.state->shared[index].bytes = bytes;
    sim_unlock();
}

int sim_shared_handle(int index)
{
    int fd = open_file(), number = 0;
    off_t first = HANDLE_BYTES + (off_t)index * HANDLES;
    while (fd >= 0 && number < HANDLES && bytes_held(fd, first + number, 1))
        number++;
    if (fd >= 0 && (number == HANDLES || !lock_byte(fd, first + number))) {
        close(fd);
        fd = -1;
    }
    return fd;
}

/* True if `handle` is a handle of block `index`. A query of locks reports the locks of all open file descriptions
 * except the one that is used for the query. So if a byte is reported as locked to fd and as free to `handle`, then
 * `handle` has the lock. */
static bool stands_for(int handle, int fd, int index)
{
    off_t first = HANDLE_BYTES + (off_t)index * HANDLES;
    for (int number = 0; number < HANDLES && bytes_held(fd, first, HANDLES); number++)
        if (bytes_held(fd, first + number, 1) && !bytes_held(handle, first + number, 1))
            return true;
    return false;
}

int sim_shared_find(int handle, struct sim_shared *what)
{
    struct sim_state *state = sim_self.state;
    struct stat one, other;
    int fd = open_file(), found = -1;
    if (fd < 0)
        return -1;
    if (fstat(fd, &one) == 0 && fstat(handle, &other) == 0 && one.st_dev == other.st_dev && one.st_ino == other.st_ino) {
        sim_lock();
        for (int i = 0; i < SIM_SHARED && found < 0; i++)
            if (state->shared[i].used && stands_for(handle, fd, i)) {
                *what = state->shared[i];
                found = i;
            }
        sim_unlock();
    }
    close(fd);
    return found;
}

void *sim_shared_import(int index)
{
    int fd = open_file();
    void *hold = MAP_FAILED;
    if (fd >= 0 && lock_byte(fd, IMPORT_BYTES + index))
        hold = mmap(NULL, PAGE, PROT_READ, MAP_SHARED, fd, 0);
    if (hold != MAP_FAILED)
        madvise(hold, PAGE, MADV_DONTFORK);
    if (fd >= 0)
        close(fd);
    return hold == MAP_FAILED ? NULL : hold;
}

void sim_shared_drop(void *hold)
{
    munmap(hold, PAGE);
}

/* Releases a block for its exporting process. Returns true if other processes still use the block; no process is
 * charged for it from then on. The caller must hold the lock. */
static bool orphan(int fd, int index)
{
    struct sim_shared *shared = &sim_self.state->shared[index];
    bool kept = fd >= 0 && held(fd, index);
    shared->serial = 0;
    shared->used = kept;
    return kept;
}

bool sim_shared_release(int index)
{
    struct sim_state *state = sim_self.state;
    int fd = open_file();
    sim_lock();
    struct sim_shared *shared = &state->shared[index];
    bool kept = orphan(fd, index);
    if (kept) {
        uint64_t *memory = &state->procs[sim_self.slot].use[shared->gpu].memory;
        *memory -= shared->bytes < *memory ? shared->bytes : *memory;
    }
    sim_unlock();
    if (fd >= 0)
        close(fd);
    return kept;
}

uint64_t sim_shared_leave(uint64_t serial, int gpu)
{
    struct sim_state *state = sim_self.state;
    uint64_t bytes = 0;
    int fd = -1;
    for (int i = 0; i < SIM_SHARED; i++) {
        struct sim_shared *shared = &state->shared[i];
        if (!shared->used || shared->serial != serial || shared->gpu != gpu)
            continue;
        if (fd < 0)
            fd = open_file();
        if (orphan(fd, i))
            bytes += shared->bytes;
    }
    if (fd >= 0)
        close(fd);
    return bytes;
}

uint64_t sim_shared_orphans(int gpu, bool reap)
{
    struct sim_state *state = sim_self.state;
    uint64_t bytes = 0;
    int fd = -1;
    for (int i = 0; i < SIM_SHARED; i++) {
        struct sim_shared *shared = &state->shared[i];
        if (!shared->used || shared->serial || shared->gpu != gpu)
            continue;
        if (reap && fd < 0)
            fd = open_file();
        if (reap && fd >= 0 && !held(fd, i)) {
            shared->used = 0;
            state->gpus[gpu].used -= shared->bytes;
        } else {
            bytes += shared->bytes;
        }
    }
    if (fd >= 0)
        close(fd);
    return bytes;
}
