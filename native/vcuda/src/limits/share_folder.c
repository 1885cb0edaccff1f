/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whether the limits of a container are those that its node mounted. A tenant may write in the folders around the mounts,
 * and may be root there; a file under the right name says nothing. What only a mount has does: the node mounts the share as
 * a folder, read-only, which cannot be renamed nor written, and nothing on the files in it.
 *
 * A tenant with a user namespace mounts what it likes and passes here: that is found by the node's watcher.
 */
#include "limits_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#define MOUNT_ROOT 0x2000u /* STATX_ATTR_MOUNT_ROOT, which older headers lack */

/* By number: libc's own fstat carries GLIBC_2.33 in the symbol tables of new systems. */
static bool device_of(int descriptor, dev_t *device)
{
    struct stat status;
    bool known = syscall(SYS_fstat, descriptor, &status) == 0;
    *device = known ? status.st_dev : 0;
    return known;
}

/*
 * Whether something is mounted on a file. A file of another device is; one of the same device may be too (a host folder below
 * /run, say), and only a kernel since 5.8 tells. An older one, and a profile that refuses the call, says no.
 */
static bool is_covered(int file, dev_t device, dev_t around)
{
    struct statx found;
    memset(&found, 0, sizeof found);
    if (device != around)
        return true;
    return syscall(SYS_statx, file, "", AT_EMPTY_PATH, 0, &found) == 0 && (found.stx_attributes & MOUNT_ROOT);
}

static int fail(char *reason, size_t room, const char *what)
{
    snprintf(reason, room, "%s: %s; expected the node's own; start the container again", what, strerror(errno));
    return -1;
}

static int differ(char *reason, size_t room, const char *what)
{
    snprintf(reason, room, "%s; start the container again, without volumes below " VGPU_PATH_ROOT, what);
    return -1;
}

/* Whether the node mounted the root: what lies in it read-only cannot be renamed either. */
static bool root_is_mounted(int root)
{
    struct statfs mount;
    dev_t above, here;
    int around = openat(root, "..", O_PATH | O_DIRECTORY | O_CLOEXEC);
    bool mounted = around >= 0 && device_of(around, &above) && device_of(root, &here) && above != here &&
                   fstatfs(root, &mount) == 0 && (mount.f_flags & ST_RDONLY);
    if (around >= 0)
        close(around);
    return mounted;
}

/* A descriptor of the limits in an open folder, which lies in `root`. */
static int limits_in(int root, int folder, char *reason, size_t room)
{
    struct statfs mount;
    dev_t here, inside;
    if (!root_is_mounted(root))
        return differ(reason, room, "its folder " VGPU_PATH_ROOT " is a plain folder, expected the node's mount, read-only");
    if (!device_of(folder, &here) || fstatfs(folder, &mount) != 0)
        return fail(reason, room, "its folder " VGPU_PATH_SHARE " cannot be asked about");
    if (!(mount.f_flags & ST_RDONLY))
        return differ(reason, room, "its folder " VGPU_PATH_SHARE " is mounted writable, expected read-only");
    int limits = openat(folder, "limits", O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NOCTTY | O_NONBLOCK);
    if (limits < 0)
        return fail(reason, room, "it cannot be opened");
    if (device_of(limits, &inside) && !is_covered(limits, inside, here))
        return limits;
    close(limits);
    return differ(reason, room, "another file is mounted on it, expected the one in the node's folder");
}

int share_limits_open(char *reason, size_t room)
{
    const int flags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
    int root = open(VGPU_PATH_ROOT, flags);
    if (root < 0)
        return fail(reason, room, "the folder " VGPU_PATH_ROOT " cannot be opened");
    int folder = openat(root, VGPU_SHARE, flags);
    int limits = folder < 0 ? fail(reason, room, "its folder " VGPU_PATH_SHARE " cannot be opened")
                            : limits_in(root, folder, reason, room);
    if (folder >= 0)
        close(folder);
    close(root);
    return limits;
}
