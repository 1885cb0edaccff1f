/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Records, as JSON, the memory limit that the driver enforces for an allocation (what one container was given). The
 * record is the file driver-limit in the allocation's folder, or <id>.driver-limit if the allocation has no folder. At
 * each poll the device plugin compares the record with the driver's state. The driver's limit belongs to one control
 * group. So a second container may not use the allocation while the first container's group contains a process.
 */
#include "hook.h"
#include "json.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static void file_of(const struct options *options, const char *id, char path[PATH_MAX])
{
    snprintf(path, PATH_MAX, "%s/%s/limits", options->allocations, id);
    bool folder = access(path, F_OK) == 0;
    snprintf(path, PATH_MAX, folder ? "%s/%s/driver-limit" : "%s/%s.driver-limit", options->allocations, id);
}

static char *text_of(const char *path)
{
    int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    char *text = descriptor < 0 ? NULL : json_read(descriptor, 65536);
    if (descriptor >= 0)
        close(descriptor);
    return text;
}

/* Returns whether the group exists and contains a process. */
static bool lives(const char *path, unsigned long long inode)
{
    char events[PATH_MAX + 32];
    struct stat status;
    if (syscall(SYS_newfstatat, AT_FDCWD, path, &status, 0) != 0 || (unsigned long long)status.st_ino != inode)
        return false;
    snprintf(events, sizeof events, "%s/cgroup.events", path);
    char *text = text_of(events);
    bool empty = text && strstr(text, "populated 0");
    free(text);
    return !empty;
}

bool active_free(const struct options *options, const struct grant *grant, const struct group *group)
{
    for (int i = 0; i < grant->id_count; i++) {
        char path[PATH_MAX], other[PATH_MAX] = "", name[PATH_MAX] = "", by[16] = "";
        unsigned long long inode = 0;
        file_of(options, grant->ids[i], path);
        char *text = text_of(path);
        bool known = text && json_whole(text) && json_number(json_member(text, "inode"), &inode) &&
                     json_string(json_member(text, "group"), name, sizeof name) &&
                     json_string(json_member(text, "enforcement"), by, sizeof by);
        free(text);
        if (!known || strcmp(by, "driver") != 0 || inode == group->inode ||
            snprintf(other, sizeof other, "%s%s", options->cgroup_root, name) >= (int)sizeof other || !lives(other, inode))
            continue;
        return fail("allocation %s is in use by the container of group %s, but the driver limits one group only; end that container first",
                    grant->ids[i], name);
    }
    return true;
}

static void print(FILE *file, const struct options *options, const struct container *container, const struct grant *grant, int id,
                  const struct group *group, const char *why_library)
{
    fprintf(file, "{\"version\": 1, \"allocation\": ");
    json_print(file, grant->ids[id]);
    fprintf(file, ", \"container\": ");
    json_print(file, container->id);
    fprintf(file, ", \"enforcement\": \"%s\", \"backend\": \"%s\", \"group\": ", why_library ? "library" : "driver", options->backend);
    json_print(file, group->name);
    fprintf(file, ", \"inode\": %llu, \"time\": %lld, \"shared_with\": %d, \"devices\": [", group->inode, (long long)time(NULL),
            grant->id_count - 1);
    for (int i = 0; i < grant->gpu_count; i++)
        fprintf(file, "%s{\"uuid\": \"%s\", \"soft\": 0, \"hard\": %llu}", i ? ", " : "", grant->gpus[i].uuid,
                (unsigned long long)grant->gpus[i].hard);
    fprintf(file, "], \"reason\": ");
    json_print(file, why_library ? why_library : "");
    fprintf(file, "}\n");
}

bool active_write(const struct options *options, const struct container *container, const struct grant *grant,
                  const struct group *group, const char *why_library)
{
    for (int i = 0; i < grant->id_count; i++) {
        char path[PATH_MAX], fresh[PATH_MAX + 8];
        file_of(options, grant->ids[i], path);
        snprintf(fresh, sizeof fresh, "%s.new", path);
        unlink(fresh);
        int descriptor = open(fresh, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        FILE *file = descriptor < 0 ? NULL : fdopen(descriptor, "w");
        if (!file)
            return fail("%s: %s", fresh, strerror(errno));
        print(file, options, container, grant, i, group, why_library);
        bool written = !ferror(file);
        written = fclose(file) == 0 && written;
        if (!written || rename(fresh, path) != 0)
            return fail("%s: %s", path, strerror(errno));
    }
    return true;
}
