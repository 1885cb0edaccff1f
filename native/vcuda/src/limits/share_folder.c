/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checks that the limits of a container are those that its node mounted. A tenant (the container's user) may write in
 * the folders around the mounts and may be root, so the right file name proves nothing. The mounts prove the origin.
 * The node mounts the folder of the share (an allocation of GPUs) read-only, so that it can be neither renamed nor
 * written, and mounts nothing on its files. A tenant that creates a user namespace can mount anything there and pass
 * this check. A service on the node, the watcher, detects that.
 */
#include "limits_file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#define FOLDER (O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)
#define MOUNT_ROOT 0x2000u /* Value of STATX_ATTR_MOUNT_ROOT, which older headers do not define. */

/* Uses the system call, because on new systems libc's fstat would make the library require GLIBC_2.33. */
static bool device_of(int descriptor, dev_t *device)
{
    struct stat status;
    bool known = syscall(SYS_fstat, descriptor, &status) == 0;
    *device = known ? status.st_dev : 0;
    return known;
}

/*
 * Returns 1 if the descriptor is a mount point, 0 if not, -1 if unknown. Kernels since 5.8 report this by statx, unless
 * a seccomp profile refuses the call. Comparing device numbers is not enough, because a mount of a folder of the same
 * host file system has the same device.
 */
static int is_mount(int descriptor)
{
#ifdef STATX_TYPE
    struct statx found;
    memset(&found, 0, sizeof found);
    if (syscall(SYS_statx, descriptor, "", AT_EMPTY_PATH, 0, &found) == 0 && (found.stx_attributes_mask & MOUNT_ROOT))
        return (found.stx_attributes & MOUNT_ROOT) != 0;
#else
    (void)descriptor;
#endif
    return -1;
}

static bool is_read_only(int descriptor)
{
    struct statfs mount;
    return fstatfs(descriptor, &mount) == 0 && (mount.f_flags & ST_RDONLY);
}

static int fail(char *reason, size_t room, const char *what)
{
    snprintf(reason, room, "%s: %s; expected the one that the node mounts; create the pod or container again", what, strerror(errno));
    return -1;
}

static int differ(char *reason, size_t room, const char *what)
{
    snprintf(reason, room, "%s; create the pod or container again, without volumes below " VGPU_PATH_ROOT, what);
    return -1;
}

static int differ_in(char *reason, size_t room, int number, const char *what)
{
    char all[120];
    snprintf(all, sizeof all, "its folder " VGPU_PATH_ROOT "/%d %s", number, what);
    return differ(reason, room, all);
}

/* Returns true if the root folder is a read-only mount, which only the node can have made. With such a mount no process
 * in the container can rename the folder's entries. */
static bool root_is_mounted(int root)
{
    dev_t above, here;
    int around = openat(root, "..", O_PATH | O_DIRECTORY | O_CLOEXEC), mount = is_mount(root);
    bool mounted = around >= 0 && device_of(around, &above) && device_of(root, &here) &&
                   (mount < 0 ? above != here : mount != 0);
    if (around >= 0)
        close(around);
    return mounted && is_read_only(root);
}

/* Opens the limits in `folder`, an open share folder in `root`. Returns a descriptor, or -1 if the folder or the file
 * was not mounted by the node. */
static int limits_in(int root, int folder, int number, char *reason, size_t room)
{
    dev_t here, inside;
    if (!root_is_mounted(root))
        return differ(reason, room, "its folder " VGPU_PATH_ROOT " is none that the node mounted, expected a read-only mount");
    /* Check the share's own folder too. The volume that is mounted read-only here may be writable in another container,
     * which could then move the folders in it. */
    if (is_mount(folder) == 0)
        return differ_in(reason, room, number, "is a plain folder, expected the node's mount");
    if (!is_read_only(folder))
        return differ_in(reason, room, number, "is mounted writable, expected read-only");
    int limits = openat(folder, "limits", O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NOCTTY | O_NONBLOCK);
    if (limits < 0)
        return fail(reason, room, "it cannot be opened");
    if (device_of(folder, &here) && device_of(limits, &inside) && inside == here && is_mount(limits) <= 0)
        return limits;
    close(limits);
    return differ(reason, room, "another file is mounted on it, expected the one in the node's folder");
}

int share_limits_open(int number, char *reason, size_t room)
{
    char name[16], what[64];
    int root = open(VGPU_PATH_ROOT, FOLDER);
    if (root < 0)
        return fail(reason, room, "the folder " VGPU_PATH_ROOT " cannot be opened");
    snprintf(name, sizeof name, "%d", number);
    snprintf(what, sizeof what, "its folder " VGPU_PATH_ROOT "/%d cannot be opened", number);
    int folder = openat(root, name, FOLDER);
    int limits = folder < 0 ? fail(reason, room, what) : limits_in(root, folder, number, reason, room);
    if (folder >= 0)
        close(folder);
    close(root);
    return limits;
}

/* Returns the number in a folder's name; -1: the name is not a number. */
static int number_of(const char *name)
{
    size_t digits = strspn(name, "0123456789");
    return digits && digits <= 4 && !name[digits] && (name[0] != '0' || digits == 1) ? atoi(name) : -1;
}

/* Returns true if the node mounted a share on this folder. Otherwise it is an empty folder. */
static bool is_share(int root, const char *name)
{
    int folder = openat(root, name, FOLDER);
    int mounted = folder < 0 ? 0 : is_mount(folder);
    /* If the kernel does not report mounts, the presence of the file `limits` decides. */
    int limits = mounted < 0 ? openat(folder, "limits", O_PATH | O_NOFOLLOW | O_CLOEXEC) : -1;
    if (folder >= 0)
        close(folder);
    if (limits >= 0)
        close(limits);
    return mounted > 0 || limits >= 0;
}

int shares_find(int numbers[VGPU_MAX_SHARES], char *reason, size_t room)
{
    int count = 0;
    DIR *root = opendir(VGPU_PATH_ROOT);
    for (struct dirent *entry; root && count >= 0 && (entry = readdir(root));) {
        int number = number_of(entry->d_name), at = count;
        if (number < 0 || !is_share(dirfd(root), entry->d_name))
            continue;
        if (count == VGPU_MAX_SHARES) {
            snprintf(reason, room, "it is one of more than %d shares in " VGPU_PATH_ROOT, VGPU_MAX_SHARES);
            count = -1;
            continue;
        }
        for (; at > 0 && numbers[at - 1] > number; at--)
            numbers[at] = numbers[at - 1];
        numbers[at] = number;
        count++;
    }
    if (root)
        closedir(root);
    if (count == 0) /* There is no share. Opening the first one will fail and report what is missing. */
        numbers[count++] = number_of(VGPU_SHARE);
    return count;
}
