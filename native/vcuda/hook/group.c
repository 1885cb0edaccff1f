/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Finds the container's control group of version 2: the line 0:: in the cgroup file of the container's first process
 * names this group. The driver charges memory by a controller, dmem or misc, which must be enabled in every parent
 * group. runc enables all controllers, but crun does not, so the hook enables the driver's controller.
 */
#include "hook.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/stat.h>
#include <unistd.h>

/* Returns 1 if a file of a group names the controller, 0 if it does not, and -1 if the file cannot be read. */
static int names(const char *folder, const char *file, const char *controller)
{
    char path[2 * PATH_MAX + 32], text[1024];
    snprintf(path, sizeof path, "%s/%s", folder, file);
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = descriptor < 0 ? -1 : read(descriptor, text, sizeof text - 1);
    if (descriptor >= 0)
        close(descriptor);
    if (length < 0)
        return -1;
    text[length] = 0;
    char *rest = text;
    for (char *word; (word = strtok_r(rest, " \n", &rest)) != NULL;)
        if (strcmp(word, controller) == 0)
            return 1;
    return 0;
}

static bool turn_on(const char *folder, const char *controller)
{
    char path[2 * PATH_MAX + 32], word[32];
    if (names(folder, "cgroup.subtree_control", controller) == 1)
        return true;
    snprintf(path, sizeof path, "%s/cgroup.subtree_control", folder);
    int length = snprintf(word, sizeof word, "+%s", controller), descriptor = open(path, O_WRONLY | O_CLOEXEC);
    bool done = descriptor >= 0 && write(descriptor, word, (size_t)length) == length;
    int error = errno;
    if (descriptor >= 0)
        close(descriptor);
    return done || fail("the controller %s cannot be enabled below %s: %s; without it the container's group is not charged separately",
                        controller, folder, strerror(error));
}

/* Enables the controller from the root of the hierarchy down to the parent of the container's group. */
static bool turn_on_down(const char *root, struct group *group, const char *controller)
{
    if (names(root, "cgroup.controllers", controller) != 1)
        /* This kernel has no controller of that name, so there is nothing to enable. Whether limits work was tested on
         * the host before (plugins/module_utils/gpu/memory_limits.py). */
        return true;
    size_t start = strlen(root);
    for (size_t at = start; group->path[at]; at++) {
        if (group->path[at] != '/')
            continue;
        group->path[at] = 0;
        bool done = turn_on(group->path, controller);
        group->path[at] = '/';
        if (!done)
            return false;
    }
    return names(group->path, "cgroup.controllers", controller) == 1 ||
           fail("the controller %s is not enabled in %s", controller, group->path);
}

/* Uses the system call, because on new systems libc's stat would make the hook require GLIBC_2.33. */
static bool inode_of(const char *path, unsigned long long *inode)
{
    struct stat status;
    if (syscall(SYS_newfstatat, AT_FDCWD, path, &status, 0) != 0)
        return false;
    *inode = (unsigned long long)status.st_ino;
    return S_ISDIR(status.st_mode);
}

bool group_find(const struct options *options, const struct container *container, struct group *group)
{
    char path[64], line[PATH_MAX + 8];
    bool found = false;
    snprintf(path, sizeof path, "/proc/%llu/cgroup", container->pid);
    FILE *file = fopen(path, "re");
    while (file && !found && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        found = strncmp(line, "0::/", 4) == 0;
    }
    if (file)
        fclose(file);
    if (!found)
        return fail("%s has no line 0::, so process %llu is in no control group of version 2", path, container->pid);
    if (!line[4] || strstr(line, "/../") || strstr(line, " (deleted)"))
        return fail("process %llu is in the group %s, which is not the group of a container", container->pid, line + 3);
    snprintf(group->name, sizeof group->name, "%s", line + 3);
    if (snprintf(group->path, sizeof group->path, "%s%s", options->cgroup_root, group->name) >= (int)sizeof group->path)
        return fail("the path of group %s is too long", group->name);
    if (!inode_of(group->path, &group->inode))
        return fail("%s: %s; is version 2 of control groups mounted at %s?", group->path, strerror(errno), options->cgroup_root);
    return turn_on_down(options->cgroup_root, group, options->backend);
}
