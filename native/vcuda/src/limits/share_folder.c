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
 * Whether something is mounted there: 1 or 0, -1 where it is not known. A kernel since 5.8 tells; an older one does not, nor a
 * profile that refuses the call. Two devices differ at a mount too, but those of one host folder need not.
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
    snprintf(reason, room, "%s: %s; expected the node's own; create the pod or container again", what, strerror(errno));
    return -1;
}

static int differ(char *reason, size_t room, const char *what)
{
    snprintf(reason, room, "%s; create the pod or container again, without volumes below " VGPU_PATH_ROOT, what);
    return -1;
}

/* Whether the node mounted the root: what lies in it, read-only, cannot be renamed either. */
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

/* A descriptor of the limits in an open folder, which lies in `root`. */
static int limits_in(int root, int folder, char *reason, size_t room)
{
    dev_t here, inside;
    if (!root_is_mounted(root))
        return differ(reason, room, "its folder " VGPU_PATH_ROOT " is none that the node mounted, expected a read-only mount");
    /* In a read-only volume at the root, into which another container writes, somebody may move it. */
    if (is_mount(folder) == 0)
        return differ(reason, room, "its folder " VGPU_PATH_SHARE " is a plain folder, expected the node's mount");
    if (!is_read_only(folder))
        return differ(reason, room, "its folder " VGPU_PATH_SHARE " is mounted writable, expected read-only");
    int limits = openat(folder, "limits", O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NOCTTY | O_NONBLOCK);
    if (limits < 0)
        return fail(reason, room, "it cannot be opened");
    if (device_of(folder, &here) && device_of(limits, &inside) && inside == here && is_mount(limits) <= 0)
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
