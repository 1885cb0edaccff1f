/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Finds the allocations (parts of GPUs) that a container was given, by its mounts: an allocation belongs to the
 * container if the source of a mount lies in the allocation's folder. The mounts are trusted, because the runtime
 * creates them as the node requested. Environment and annotations come from the tenant and are not read.
 */
#include "hook.h"
#include "json.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LARGEST (32u << 20)

bool bundle_state(struct container *container)
{
    char *text = json_read(STDIN_FILENO, LARGEST);
    bool read = text && json_whole(text) && json_number(json_member(text, "pid"), &container->pid) && container->pid &&
                json_string(json_member(text, "bundle"), container->bundle, sizeof container->bundle) &&
                json_string(json_member(text, "id"), container->id, sizeof container->id);
    free(text);
    return read || fail("standard input is not the state of a container with id, pid and bundle; run the hook at stage createRuntime");
}

/* Resolves links and `..` in a source's path, as the runtime does. A path that does not exist stays unchanged. */
static void resolve(const char *source, char out[PATH_MAX])
{
    if (!realpath(source, out))
        snprintf(out, PATH_MAX, "%s", source);
}

static bool add(struct grant *grant, const char *id)
{
    for (int i = 0; i < grant->id_count; i++)
        if (strcmp(grant->ids[i], id) == 0)
            return true;
    if (grant->id_count == ALLOCATIONS)
        return fail("more than %d allocations are mounted into the container", ALLOCATIONS);
    snprintf(grant->ids[grant->id_count++], sizeof grant->ids[0], "%s", id);
    return true;
}

/* Adds the allocation to which the source of one mount belongs. The allocation's name is the first path component below
 * the folder of allocations. An allocation without a folder has a file <name>.record there. */
static bool take(struct grant *grant, const char *folder, const char *source)
{
    char path[PATH_MAX], id[256];
    size_t length = strlen(folder);
    resolve(source, path);
    if (strncmp(path, folder, length) != 0 || (path[length] && path[length] != '/'))
        return true;
    const char *name = path + length + strspn(path + length, "/");
    size_t end = strcspn(name, "/");
    const char ending[] = ".record";
    if (!name[end] && end > sizeof ending - 1 && memcmp(name + end - (sizeof ending - 1), ending, sizeof ending - 1) == 0)
        end -= sizeof ending - 1;
    if (end == 0 || end >= sizeof id || name[0] == '.')
        return fail("the container mounts %s, which is no allocation of %s", source, folder);
    memcpy(id, name, end);
    id[end] = 0;
    return add(grant, id);
}

bool bundle_allocations(const struct options *options, const struct container *container, struct grant *grant)
{
    char path[PATH_MAX + 16], folder[PATH_MAX], source[PATH_MAX];
    snprintf(path, sizeof path, "%s/config.json", container->bundle);
    if (!realpath(options->allocations, folder))
        return fail("%s: %s; expected the folder of allocations", options->allocations, strerror(errno));
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    char *text = descriptor >= 0 ? json_read(descriptor, LARGEST) : NULL;
    int error = errno;
    if (descriptor >= 0)
        close(descriptor);
    if (!text)
        return fail("%s: %s", path, strerror(error));
    bool fine = json_whole(text) || fail("%s is no JSON", path);
    for (const char *one = json_first(json_member(text, "mounts")); fine && one; one = json_next(one)) {
        const char *value = json_member(one, "source");
        if (value && !json_string(value, source, sizeof source))
            fine = fail("%s: the source of a mount is not a path", path);
        else if (value)
            fine = take(grant, folder, source);
    }
    free(text);
    return fine;
}
