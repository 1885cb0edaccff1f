/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Simulates the video memory limits that driver branch 615 enforces for control groups. The inode of a group's folder
 * identifies the group, because the inode is the same in every cgroup namespace and the path is not.
 *
 * The profile's key `memacct` selects the kernel's controller that counts the memory:
 *   `dmem`  all groups from the process's own up to the root are charged, and each group's limit applies;
 *   `misc`  only the nearest group with a limit is charged. Memory allocated before the first limit never counts.
 *
 * A move of a process to another group is not simulated: the process is charged to the group in which it opened the
 * driver.
 */
#include "internal.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#define ROOT_INODE 1
#define CGROUP2_MAGIC 0x63677270

/* ---- hierarchy of groups --------------------------------------------------------------------------------------- */

/* Stores the inodes of this folder and its parents up to the root of its file system. */
static void climb(int folder, uint64_t groups[SIM_DEPTH])
{
    struct stat here;
    int fd = fcntl(folder, F_DUPFD_CLOEXEC, 0), depth = 0;
    dev_t device = fd >= 0 && fstat(fd, &here) == 0 ? here.st_dev : 0;
    while (fd >= 0 && depth < SIM_DEPTH && here.st_dev == device) {
        if (depth && groups[depth - 1] == here.st_ino)
            break; /* The parent of "/" is "/", so the loop ends there. */
        groups[depth++] = here.st_ino;
        int above = openat(fd, "..", O_PATH | O_DIRECTORY | O_CLOEXEC);
        close(fd);
        fd = above;
        if (fd >= 0 && fstat(fd, &here) < 0)
            break;
    }
    if (fd >= 0)
        close(fd);
}

/* Finds the line of cgroup version 2 in /proc/self/cgroup. */
static bool own_path(char *path, size_t size)
{
    char line[4096];
    bool found = false;
    FILE *file = fopen("/proc/self/cgroup", "re");
    while (file && !found && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        found = !strncmp(line, "0::", 3) &&
                snprintf(path, size, "%s%s", sim_self.state->cgroup_root, line + 3) < (int)size;
    }
    if (file)
        fclose(file);
    return found;
}

void sim_groups_of_self(uint64_t groups[SIM_DEPTH])
{
    char path[4096];
    int fd = own_path(path, sizeof path) ? open(path, O_PATH | O_DIRECTORY | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    climb(fd, groups);
    close(fd);
}

/* Records which groups lie below the group whose limit is being set. A process in a cgroup namespace sees no group
 * above the namespace's root, so these recorded links are the only way to find the limits above that root. */
static void link_below(int folder, uint64_t parent, unsigned depth)
{
    DIR *list = fdopendir(folder);
    for (struct dirent *entry; list && depth < SIM_DEPTH && (entry = readdir(list)) != NULL;) {
        if (entry->d_type != DT_DIR || entry->d_name[0] == '.')
            continue;
        int below = openat(dirfd(list), entry->d_name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        struct stat info;
        if (below < 0)
            continue;
        if (fstat(below, &info) < 0) {
            close(below);
            continue;
        }
        struct sim_state *state = sim_self.state;
        sim_lock();
        state->links[state->link_count++ % SIM_LINKS] = (struct sim_link){.group = info.st_ino, .parent = parent};
        sim_unlock();
        link_below(below, info.st_ino, depth + 1);
    }
    if (list)
        closedir(list);
    else
        close(folder);
}

static uint64_t above(uint64_t group)
{
    const struct sim_state *state = sim_self.state;
    for (unsigned i = 0; i < SIM_LINKS && i < state->link_count; i++)
        if (state->links[i].group == group)
            return state->links[i].parent;
    return 0;
}

/* Returns the group at `place` of the list or, after the end of the list, the recorded parent of `last`; 0: there is
 * none. */
static uint64_t next_group(const uint64_t groups[SIM_DEPTH], unsigned place, uint64_t last)
{
    return place < SIM_DEPTH && groups[place] ? groups[place] : last ? above(last) : 0;
}

/* ---- limits (lock held) ------------------------------------------------------------------------------------------ */

static struct sim_limit *find(int gpu, uint64_t group)
{
    struct sim_limit *limits = sim_self.state->limits;
    for (unsigned i = 0; group && i < SIM_LIMITS; i++)
        if (limits[i].group == group && (int)limits[i].gpu == gpu)
            return &limits[i];
    return NULL;
}

static struct sim_limit *make(int gpu, uint64_t group)
{
    struct sim_limit *limits = sim_self.state->limits;
    for (unsigned i = 0; i < SIM_LIMITS; i++)
        if (!limits[i].group) {
            limits[i] = (struct sim_limit){.group = group, .gpu = (uint32_t)gpu, .hard = SIM_UNLIMITED};
            return &limits[i];
        }
    return NULL;
}

static bool contains(const uint64_t groups[SIM_DEPTH], uint64_t group)
{
    uint64_t at = 0;
    for (unsigned i = 0; i < 2 * SIM_DEPTH && (at = next_group(groups, i, at)) != 0; i++)
        if (at == group)
            return true;
    return false;
}

static struct sim_limit *nearest(int gpu, const uint64_t groups[SIM_DEPTH])
{
    uint64_t at = 0;
    for (unsigned i = 0; i < 2 * SIM_DEPTH && (at = next_group(groups, i, at)) != 0; i++) {
        struct sim_limit *limit = find(gpu, at);
        if (limit && !limit->idle)
            return limit;
    }
    return NULL;
}

static bool charges(const struct sim_limit *limit, const uint64_t groups[SIM_DEPTH])
{
    if (sim_self.state->memacct == SIM_MEMACCT_MISC)
        return nearest((int)limit->gpu, groups) == limit;
    return contains(groups, limit->group);
}

uint64_t sim_group_used(const struct sim_limit *limit)
{
    const struct sim_state *state = sim_self.state;
    uint64_t bytes = 0;
    for (uint32_t slot = 0; slot < state->proc_high; slot++) {
        const struct sim_proc *proc = &state->procs[slot];
        const struct sim_usage *use = &proc->use[limit->gpu];
        uint64_t outside = use->managed + use->uncounted, all = sim_usage_bytes(use);
        if (proc->role != SIM_ROLE_NONE && all > outside && charges(limit, proc->groups))
            bytes += all - outside;
    }
    for (unsigned i = 0; i < SIM_SHARED; i++) /* Add exported blocks for which no process is charged. */
        if (state->shared[i].used && !state->shared[i].serial && state->shared[i].gpu == (int)limit->gpu &&
            charges(limit, state->shared[i].groups))
            bytes += state->shared[i].bytes;
    return bytes;
}

static bool within(const struct sim_limit *limit, uint64_t bytes)
{
    uint64_t used = limit->hard == SIM_UNLIMITED ? 0 : sim_group_used(limit);
    return used <= limit->hard && bytes <= limit->hard - used;
}

static bool accounted(int gpu)
{
    return sim_self.state->memacct != SIM_MEMACCT_NONE && !sim_self.state->gpus[gpu].mig_mode;
}

static bool creator_is_dead(const struct sim_proc *proc)
{
    const struct sim_state *state = sim_self.state;
    for (uint32_t slot = 0; slot < state->proc_high; slot++)
        if (state->procs[slot].serial == proc->creator && state->procs[slot].role != SIM_ROLE_NONE)
            return !sim_slot_alive((int)slot);
    return true;
}

bool sim_group_skips(int gpu)
{
    const struct sim_proc *proc = &sim_self.state->procs[sim_self.slot];
    return accounted(gpu) && sim_self.state->dead_creators && creator_is_dead(proc);
}

bool sim_group_allows(int gpu, uint64_t bytes)
{
    const uint64_t *groups = sim_self.state->procs[sim_self.slot].groups;
    if (!accounted(gpu) || sim_group_skips(gpu))
        return true;
    if (sim_self.state->memacct == SIM_MEMACCT_MISC) {
        const struct sim_limit *limit = nearest(gpu, groups);
        return !limit || within(limit, bytes);
    }
    uint64_t at = 0;
    for (unsigned i = 0; i < 2 * SIM_DEPTH && (at = next_group(groups, i, at)) != 0; i++) {
        const struct sim_limit *limit = find(gpu, at);
        if (limit && !within(limit, bytes))
            return false;
    }
    return true;
}

uint64_t sim_group_cap(int gpu, uint64_t *used)
{
    const struct sim_limit *limit = accounted(gpu) ? find(gpu, sim_self.state->procs[sim_self.slot].groups[0]) : NULL;
    *used = 0;
    if (!limit || limit->idle || limit->hard == SIM_UNLIMITED)
        return SIM_UNLIMITED;
    *used = sim_group_used(limit);
    return limit->hard;
}

/* With `misc` the driver identifies a group by its address in the kernel, so a new group at the address of a removed
 * group inherits the removed group's limit. This function simulates that inheritance. */
void sim_group_joined(int slot)
{
    struct sim_state *state = sim_self.state;
    uint64_t group = state->procs[slot].groups[0];
    if (group == ROOT_INODE)
        return; /* the root group is never created, so it inherits nothing */
    for (uint32_t gpu = 0; gpu < state->gpu_count; gpu++) {
        if (!state->stale_limit[gpu] || state->memacct != SIM_MEMACCT_MISC || find((int)gpu, group))
            continue;
        struct sim_limit *limit = group ? make((int)gpu, group) : NULL;
        if (limit) {
            limit->hard = state->stale_limit[gpu];
            state->stale_limit[gpu] = 0;
        }
    }
}

void sim_group_forget(void)
{
    struct sim_state *state = sim_self.state;
    memset(state->limits, 0, sizeof state->limits);
    memset(state->links, 0, sizeof state->links);
    memset(state->stale_limit, 0, sizeof state->stale_limit);
    state->link_count = state->drop_next_limit = state->dead_creators = state->forked_children = state->anybody_limits = 0;
}

/* ---- calls from NVML --------------------------------------------------------------------------------------------- */

static bool controller_is_on(int folder)
{
    char text[512] = "";
    const char *name = sim_self.state->memacct == SIM_MEMACCT_MISC ? "misc" : "dmem";
    int fd = openat(folder, "cgroup.controllers", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    text[length > 0 ? length : 0] = 0;
    char *rest = text;
    for (char *word; (word = strtok_r(rest, " \n", &rest)) != NULL;)
        if (!strcmp(word, name))
            return true;
    return false;
}

struct named {
    int folder;
    bool idle;
    uint64_t groups[SIM_DEPTH];
};

/* Opens a group's path for a get or a set. The caller closes the folder. */
static enum sim_group_answer open_group(int gpu, const char *path, struct named *named)
{
    struct sim_state *state = sim_self.state;
    struct statfs kind;
    *named = (struct named){.folder = -1};
    if (!accounted(gpu))
        return SIM_GROUP_UNSUPPORTED;
    named->folder = path ? open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    if (named->folder < 0)
        return SIM_GROUP_PATH;
    if (fstatfs(named->folder, &kind) < 0 || kind.f_type != CGROUP2_MAGIC)
        return SIM_GROUP_REFUSED;
    climb(named->folder, named->groups);
    if (named->groups[0] == ROOT_INODE)
        return SIM_GROUP_UNSUPPORTED;
    named->idle = state->controllers_required && !controller_is_on(named->folder);
    return named->idle && state->memacct == SIM_MEMACCT_DMEM ? SIM_GROUP_NOT_FOUND : SIM_GROUP_OK;
}

/* Memory that a group's processes already use when the group gets its first limit is never charged to the group. */
static void leave_out_what_is_there(const struct sim_limit *limit)
{
    struct sim_state *state = sim_self.state;
    for (uint32_t slot = 0; slot < state->proc_high; slot++) {
        struct sim_proc *proc = &state->procs[slot];
        struct sim_usage *use = &proc->use[limit->gpu];
        if (proc->role != SIM_ROLE_NONE && nearest((int)limit->gpu, proc->groups) == limit)
            use->uncounted = sim_usage_bytes(use) - use->managed;
    }
}

static enum sim_group_answer apply(int gpu, const char *path, const struct named *named, uint64_t soft, uint64_t hard)
{
    struct sim_state *state = sim_self.state;
    if (state->drop_next_limit) {
        state->drop_next_limit = 0;
        return SIM_GROUP_OK;
    }
    struct sim_limit *limit = find(gpu, named->groups[0]);
    bool is_new = !limit && (limit = make(gpu, named->groups[0])) != NULL;
    if (!limit)
        return SIM_GROUP_REFUSED;
    if (is_new && state->memacct == SIM_MEMACCT_MISC)
        leave_out_what_is_there(limit);
    bool below = hard != SIM_UNLIMITED && sim_group_used(limit) > hard;
    if (below && state->memacct == SIM_MEMACCT_MISC)
        return SIM_GROUP_REFUSED;
    limit->idle = named->idle;
    snprintf(limit->path, sizeof limit->path, "%s", path);
    limit->soft = soft;
    /* If the new limit is below the current usage, the kernel's page counter may keep the old limit and report no
     * error. */
    if (!below || state->lowers_below_use)
        limit->hard = hard;
    return SIM_GROUP_OK;
}

enum sim_group_answer sim_group_set(int gpu, const char *path, uint64_t soft, uint64_t hard)
{
    const uint64_t total = sim_self.state->gpus[gpu].total;
    struct named named;
    if (soft > hard || (hard != SIM_UNLIMITED && hard > total) || soft > total)
        return SIM_GROUP_ARGUMENT;
    enum sim_group_answer answer = open_group(gpu, path, &named);
    if (answer == SIM_GROUP_OK) {
        sim_lock();
        sim_reap();
        answer = apply(gpu, path, &named, soft, hard);
        sim_unlock();
        link_below(named.folder, named.groups[0], 0); /* link_below() also closes the folder. */
    } else if (named.folder >= 0) {
        close(named.folder);
    }
    return answer;
}

enum sim_group_answer sim_group_get(int gpu, const char *path, struct sim_limit *limit, uint64_t *used)
{
    struct named named;
    enum sim_group_answer answer = open_group(gpu, path, &named);
    if (named.folder >= 0)
        close(named.folder);
    if (answer != SIM_GROUP_OK)
        return answer;
    bool misc = sim_self.state->memacct == SIM_MEMACCT_MISC;
    sim_lock();
    sim_reap();
    const struct sim_limit *found = misc ? nearest(gpu, named.groups) : find(gpu, named.groups[0]);
    *limit = found ? *found : (struct sim_limit){.group = named.groups[0], .gpu = (uint32_t)gpu, .hard = SIM_UNLIMITED};
    *used = sim_group_used(found ? found : limit);
    sim_unlock();
    return misc && !found ? SIM_GROUP_UNSUPPORTED : SIM_GROUP_OK;
}
