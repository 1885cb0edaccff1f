/* SPDX-License-Identifier: Apache-2.0 */
/* Bypasses by the slice's files inside the container: the limits and the ledger, which records the memory charged to
 * each process in a slot of its own. Damaged files are restored, because later checks use the slice. */
#include "bypass.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef F_OFD_SETLK
#define F_OFD_SETLK 37
#endif

#define SELF "/proc/self/exe"

/* Tries to open the node's files for writing, but writes nothing. */
enum attempt write_own_files(const struct fill *fill)
{
    const char *const files[] = {slice_limits(), VGPU_PATH_PRELOAD, VGPU_PATH_LIBRARY};
    enum attempt attempt = UNABLE;
    (void)fill;
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        if (access(files[i], F_OK) != 0)
            continue;
        attempt = REFUSED;
        int opened = open(files[i], O_WRONLY | O_CLOEXEC);
        if (opened >= 0) {
            close(opened);
            return GRANTED;
        }
    }
    return attempt;
}

struct copy {
    int file;
    size_t size;
    char *bytes;
};

/* Copies the ledger. From here on this process blocks all signals until it has restored the ledger. Programs that it
 * starts end by their own alarm. */
static bool ledger_copy(struct copy *copy)
{
    struct stat found;
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, NULL);
    copy->file = open(slice_ledger(), O_RDWR | O_CLOEXEC);
    /* Uses the system call, because on new systems libc's fstat would make the probe require GLIBC_2.33. */
    if (copy->file < 0 || syscall(SYS_fstat, copy->file, &found) != 0 || found.st_size <= 0)
        return false;
    copy->size = (size_t)found.st_size;
    copy->bytes = malloc(copy->size);
    return copy->bytes && pread(copy->file, copy->bytes, copy->size, 0) == (ssize_t)copy->size;
}

static void ledger_restore(const struct copy *copy)
{
    if (ftruncate(copy->file, (off_t)copy->size) != 0 || pwrite(copy->file, copy->bytes, copy->size, 0) < 0)
        _exit(UNABLE);
}

/* Writes as many random bytes as the ledger has, from an offset on. Returns whether any were written. */
static bool write_noise(const struct copy *copy, off_t from)
{
    char noise[4096];
    size_t wrote = 0;
    memset(noise, 0xff, sizeof noise);
    while (wrote < copy->size) {
        size_t most = copy->size - wrote < sizeof noise ? copy->size - wrote : sizeof noise;
        ssize_t taken = pwrite(copy->file, noise, most, from + (off_t)wrote);
        if (taken <= 0)
            break;
        wrote += (size_t)taken;
    }
    return wrote > 0;
}

static enum attempt ask_beside(const struct fill *fill)
{
    const char *const added[] = {NULL};
    return ask_as_program(SELF, added, fill->device);
}

enum attempt empty_the_ledger(const struct fill *fill)
{
    struct copy copy;
    if (!ledger_copy(&copy))
        return UNABLE;
    enum attempt attempt = ftruncate(copy.file, 0) == 0 ? ask_beside(fill) : REFUSED;
    ledger_restore(&copy);
    return attempt;
}

enum attempt spoil_the_ledger(const struct fill *fill)
{
    struct copy copy;
    if (!ledger_copy(&copy))
        return UNABLE;
    enum attempt attempt = write_noise(&copy, 0) ? ask_beside(fill) : REFUSED;
    ledger_restore(&copy);
    return attempt;
}

/* Renames the ledger, so that the next program finds no ledger. A mounted file can be neither renamed nor removed, so
 * the bypass fails if the ledger is a mount. */
enum attempt remove_the_ledger(const struct fill *fill)
{
    char aside[128];
    sigset_t all;
    snprintf(aside, sizeof aside, "%s.aside", slice_ledger());
    if (access(slice_ledger(), F_OK) != 0)
        return UNABLE;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, NULL);
    if (rename(slice_ledger(), aside) != 0)
        return REFUSED;
    enum attempt attempt = ask_beside(fill);
    unlink(slice_ledger()); /* Removes a new ledger that another process has created under this name. */
    return rename(aside, slice_ledger()) == 0 ? attempt : UNABLE;
}

/* Enlarges the ledger by random bytes, as if it had more slots than a reader knows. */
enum attempt grow_the_ledger(const struct fill *fill)
{
    struct copy copy;
    if (!ledger_copy(&copy))
        return UNABLE;
    bool longer = write_noise(&copy, (off_t)copy.size);
    bool grown = ftruncate(copy.file, (off_t)copy.size * 8) == 0 || longer;
    enum attempt attempt = grown ? ask_beside(fill) : REFUSED;
    ledger_restore(&copy);
    return attempt;
}

static char *ledger_mapped(int file)
{
    char *start = mmap(NULL, VGPU_LEDGER_FILE_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    return start == MAP_FAILED ? NULL : start;
}

#define HUGE_FIGURE (1ull << 60)
#define LAST (VGPU_LEDGER_SLOTS - 1)
#define PIECE (256 * MIB)

/* Writes `figure` into this process's slot and into the ledger's last slot, which it marks as alive. A figure of 0
 * undoes both changes. */
static void boast(int file, char *ledger, uint64_t figure)
{
    struct vgpu_ledger_slot *slots = (struct vgpu_ledger_slot *)(ledger + VGPU_LEDGER_SLOT_OFFSET);
    struct flock alive = {
        .l_type = figure ? F_WRLCK : F_UNLCK, .l_start = (off_t)VGPU_LEDGER_ALIVE_BASE + LAST, .l_len = 1,
    };
    for (unsigned i = 0; i < VGPU_LEDGER_SLOTS; i++)
        for (int device = 0; device < VGPU_MAX_DEVICES && (i == LAST || slots[i].pid == (uint32_t)getpid()); device++)
            slots[i].used[device] = figure;
    memset(slots[LAST].exported_mib, figure ? 0xff : 0, sizeof slots[LAST].exported_mib);
    slots[LAST].pid = figure ? (uint32_t)getpid() : 0;
    fcntl(file, F_OFD_SETLK, &alive);
}

/*
 * Returns how many bytes a process must get in an empty slice so that the node's watcher reports it: more than the
 * limit plus the watcher's tolerance. The tolerance is one sixteenth of the process's bytes, at least 64 MiB, and also
 * one context if contexts do not count. For a slice that is filled first, returns BEYOND.
 */
static uint64_t beyond_the_limit(const struct fill *fill)
{
    return slice_is_empty ? fill->limit + fill->limit / 15 + BEYOND + (contexts_count(fill) ? 0 : 1024 * MIB) : BEYOND;
}

/* Raises the ledger's figures, so that the watcher, which compares the driver's figure with the ledger's, sees no
 * excess. Then allocates memory by the driver's own functions. */
enum attempt boast_in_the_ledger(const struct fill *fill)
{
    struct cuda driver;
    CUcontext context;
    CUdeviceptr pointers[1024], pointer;
    char reason[200];
    uint64_t wanted = beyond_the_limit(fill), got = 0;
    int count = 0, file = open(slice_ledger(), O_RDWR | O_CLOEXEC);
    char *ledger = file < 0 ? NULL : ledger_mapped(file);
    const struct cuda *cuda = cuda_open(reason, sizeof reason);
    if (!ledger || !cuda || !driver_by_symbol_table(&driver) || cuda->ctx_create(&context, 0, fill->device) != CUDA_SUCCESS ||
        cuda->mem_alloc(&pointer, 1) != CUDA_SUCCESS)
        return UNABLE;
    boast(file, ledger, HUGE_FIGURE);
    for (uint64_t piece; got < wanted && count < 1024; got += piece, count++) {
        piece = wanted - got < PIECE ? wanted - got : PIECE;
        if (driver.mem_alloc(&pointers[count], piece) != CUDA_SUCCESS)
            break; /* The card is full. */
    }
    if (got == wanted)
        hold_what_was_got();
    while (count > 0)
        driver.mem_free(pointers[--count]);
    boast(file, ledger, 0);
    return got == wanted ? GRANTED : UNABLE;
}

/* Sets all charges to zero but keeps the ledger valid. A tenant that knows the ledger's layout could do this. */
void lie_in_the_ledger(const struct fill *fill)
{
    (void)fill;
    int file = open(slice_ledger(), O_RDWR | O_CLOEXEC);
    fill->board->status[1] = file; /* status[1]: below 0 if there was no ledger to change. */
    if (file < 0)
        return;
    char *start = ledger_mapped(file);
    close(file);
    if (!start)
        return;
    struct vgpu_ledger *ledger = (struct vgpu_ledger *)start;
    struct vgpu_ledger_slot *slots = (struct vgpu_ledger_slot *)(start + VGPU_LEDGER_SLOT_OFFSET);
    memset(ledger->total, 0, sizeof ledger->total);
    for (unsigned i = 0; i < ledger->slot_high && i < VGPU_LEDGER_SLOTS; i++) {
        memset(slots[i].used, 0, sizeof slots[i].used);
        memset(slots[i].context, 0, sizeof slots[i].context);
    }
}

/* Closes all descriptors that the program did not open itself, as some programs do. The program's memory must stay
 * charged. */
void close_descriptors(const struct fill *fill)
{
    (void)fill;
    for (int descriptor = 3; descriptor < 1024; descriptor++)
        close(descriptor);
}
