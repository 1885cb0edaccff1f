/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reads the ledger (the file with the charges of the container's processes) without writing it: which processes are
 * alive, their pids, and the bytes of each. This works even for a process that has no slot in the ledger, such as
 * nvidia-smi.
 *
 * The pid in a slot is the pid that the slot's owner has in its own pid namespace. A reader in another pid namespace of
 * the same container (unshare, a shared process namespace) sees that process under another pid, or not at all.
 */
#include "ledger.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

struct view {
    int descriptor, device;
    struct vgpu_ledger *ledger;
};

static void view_close(struct view *view)
{
    if (view->ledger)
        munmap(view->ledger, VGPU_LEDGER_FILE_SIZE);
    if (view->descriptor >= 0)
        close(view->descriptor);
}

/* Opens the ledger of a share (an allocation of the container) for reading. Sets view->device to -1 if the ledger does
 * not list the device. */
static bool view_open(struct view *view, unsigned share, const char *uuid)
{
    *view = (struct view){.descriptor = ledger_file_open(limits_ledger_path(share), share, false), .device = -1};
    if (view->descriptor < 0)
        return false;
    if (lseek(view->descriptor, 0, SEEK_END) >= (off_t)VGPU_LEDGER_FILE_SIZE) {
        void *map = mmap(NULL, VGPU_LEDGER_FILE_SIZE, PROT_READ, MAP_SHARED, view->descriptor, 0);
        view->ledger = map == MAP_FAILED ? NULL : map;
    }
    if (!view->ledger || !ledger_header_ok(view->ledger)) {
        view_close(view);
        return false;
    }
    view->device = ledger_device_index(view->ledger, uuid);
    return true;
}

/* Returns the next slot, starting at index *at, whose owner is alive and uses memory of the device. NULL: there is no
 * further such slot. */
static const struct vgpu_ledger_slot *view_next(const struct view *view, uint32_t *at, uint64_t *bytes)
{
    for (uint32_t high = view->device < 0 ? 0 : ledger_high(view->ledger); *at < high;) {
        const struct vgpu_ledger_slot *slot = ledger_slot(view->ledger, *at);
        *bytes = slot->used[view->device] + slot->context[view->device];
        if (ledger_byte_held(view->descriptor, VGPU_LEDGER_ALIVE_BASE + (*at)++) != 0 && *bytes)
            return slot;
    }
    return NULL;
}

/* Returns the bytes that dead processes exported and that another process still has open. The list of processes does
 * not include these bytes. */
static uint64_t view_of_the_dead(const struct view *view)
{
    uint64_t sum = 0, bytes;
    for (uint32_t at = 0, high = view->device < 0 ? 0 : ledger_high(view->ledger); at < high; at++) {
        const struct vgpu_ledger_slot *slot = ledger_slot(view->ledger, at);
        bytes = ledger_slot_exported_bytes(slot, view->device);
        if (bytes && ledger_byte_held(view->descriptor, VGPU_LEDGER_ALIVE_BASE + at) == 0 &&
            ledger_slot_exported(view->descriptor, view->ledger, slot))
            sum += bytes;
    }
    return sum;
}

bool ledger_view_total(const char *uuid, uint64_t *bytes)
{
    struct view view;
    uint64_t held;
    *bytes = 0;
    for (unsigned share = 0; share < limits_shares(); share++) {
        if (!view_open(&view, share, uuid))
            return false;
        for (uint32_t at = 0; view_next(&view, &at, &held);)
            *bytes += held;
        *bytes += view_of_the_dead(&view);
        view_close(&view);
    }
    return true;
}

/* This value is stored only in the first ledger that lists the card. */
uint64_t ledger_view_beyond(const char *uuid)
{
    struct view view;
    uint64_t bytes = 0;
    bool found = false;
    for (unsigned share = 0; share < limits_shares() && !found && view_open(&view, share, uuid); share++) {
        found = view.device >= 0;
        if (found)
            bytes = __atomic_load_n(&view.ledger->beyond_bytes[view.device], __ATOMIC_RELAXED);
        view_close(&view);
    }
    return bytes;
}

bool ledger_shares(unsigned share, const char *uuid, uint64_t *own, uint64_t *total, bool *largest)
{
    const struct membership *member = &ledger_members[share];
    struct view view;
    uint64_t held, most = 0;
    *own = *total = 0;
    if (!atomic_load_explicit(&ledger_members[0].joined, memory_order_acquire) || !view_open(&view, share, uuid))
        return false;
    uint32_t at = 0, who = 0;
    while (view_next(&view, &at, &held)) {
        *total += held;
        if (at - 1 == member->slot)
            *own = held;
        if (held > most) {
            most = held;
            who = at - 1;
        }
    }
    view_close(&view);
    *largest = most && who == member->slot;
    return *own > 0;
}

/* --- pids ------------------------------------------------------------------------------------------------ */

/* Uses the system call, because on new systems libc's stat would make the library require GLIBC_2.33. */
static uint64_t namespace_at(const char *path)
{
    struct stat status;
    return syscall(SYS_newfstatat, AT_FDCWD, path, &status, 0) == 0 ? (uint64_t)status.st_ino : 0;
}

uint64_t ledger_pid_namespace(void)
{
    return namespace_at("/proc/self/ns/pid");
}

bool ledger_proc_is_ours(void)
{
    char text[24];
    ssize_t length = readlink("/proc/self", text, sizeof text - 1);
    text[length < 0 ? 0 : length] = 0;
    return strtol(text, NULL, 10) == (long)getpid();
}

/* Returns the last figure of the NSpid line: the process's pid in its own namespace. */
static uint32_t innermost_pid(uint32_t process)
{
    char path[40], line[256];
    uint32_t pid = 0;
    snprintf(path, sizeof path, "/proc/%u/status", process);
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof line, file))
        if (strncmp(line, "NSpid:", 6) == 0) {
            const char *last = strrchr(line, '\t');
            pid = last ? (uint32_t)strtoul(last, NULL, 10) : 0;
            break;
        }
    if (file)
        fclose(file);
    return pid;
}

/* Translates a pid of another pid namespace into this process's namespace. Returns 0 if the process is not visible in
 * this namespace. */
static uint32_t pid_from(uint64_t pid_namespace, uint32_t pid)
{
    uint32_t found = 0;
    DIR *processes = ledger_proc_is_ours() ? opendir("/proc") : NULL;
    for (struct dirent *entry; processes && !found && (entry = readdir(processes));) {
        char path[40];
        /* strtoul returns 0 for an entry of /proc that is not a process. */
        uint32_t process = (uint32_t)strtoul(entry->d_name, NULL, 10);
        snprintf(path, sizeof path, "/proc/%u/ns/pid", process);
        if (process && namespace_at(path) == pid_namespace && innermost_pid(process) == pid)
            found = process;
    }
    if (processes)
        closedir(processes);
    return found;
}

/* Adds the bytes to an entry with the same pid: a process with slots in two ledgers is listed once. Returns false if
 * the list has no such entry. */
static bool add_to(struct ledger_process *list, int count, uint32_t pid, uint64_t bytes)
{
    for (int i = 0; i < count; i++)
        if (list[i].pid == pid) {
            list[i].bytes += bytes;
            return true;
        }
    return false;
}

int ledger_processes(const char *uuid, struct ledger_process *list, int room)
{
    struct view view;
    uint64_t bytes, here = ledger_pid_namespace();
    int count = 0;
    for (unsigned share = 0; share < limits_shares(); share++) {
        if (!view_open(&view, share, uuid))
            return -1;
        const struct vgpu_ledger_slot *slot;
        for (uint32_t at = 0; (slot = view_next(&view, &at, &bytes));) {
            uint64_t there = slot->pid_namespace;
            uint32_t pid = there == 0 || there == here ? slot->pid : pid_from(there, slot->pid);
            if (!pid || (share && add_to(list, count < room ? count : room, pid, bytes)))
                continue;
            if (count < room)
                list[count] = (struct ledger_process){pid, bytes};
            count++;
        }
        view_close(&view);
    }
    return count;
}
