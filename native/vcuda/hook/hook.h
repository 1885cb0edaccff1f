/* SPDX-License-Identifier: Apache-2.0 */
/* Declarations for the files of vgpu-limit-hook, which makes the driver limit a container's GPU memory. A function that
 * fails returns false and stores the reason as one sentence in `hook_reason`. */
#ifndef VGPU_HOOK_H
#define VGPU_HOOK_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "vgpu_abi.h"

#define UNLIMITED UINT64_MAX
#define ALLOCATIONS 64
#define GPUS 64

struct options {
    const char *allocations, *cgroup_root, *nvml, *backend;
    /* driver: if true, a container does not start without the driver's limit. If false, the library alone may enforce
     * the limit. */
    bool driver;
};

/* The runtime's data about the container that is being created. */
struct container {
    char id[256], bundle[PATH_MAX];
    unsigned long long pid;
};

struct gpu {
    char uuid[VGPU_UUID_SIZE];
    /* hard: the limit in bytes, summed over all allocations of the container. UNLIMITED means no limit. */
    uint64_t hard;
};

/* The allocations (parts of GPUs) whose files are mounted into the container, and the limits in these files. */
struct grant {
    char ids[ALLOCATIONS][256];
    int id_count;
    struct gpu gpus[GPUS];
    int gpu_count;
};

struct group {
    /* Path of the group's folder. */
    char path[2 * PATH_MAX];
    /* The kernel's name of the group: the path relative to the root of the hierarchy. */
    char name[PATH_MAX + 8];
    unsigned long long inode;
};

extern char hook_reason[1024];
bool fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* bundle.c: reads the container's state from standard input, and config.json of the container's OCI bundle. */
bool bundle_state(struct container *container);
bool bundle_allocations(const struct options *options, const struct container *container, struct grant *grant);
/* grant.c: reads the limits of each allocation from the node's own file. */
bool grant_read(const struct options *options, struct grant *grant);
/* group.c: finds the control group of the container's first process and enables the controller in it. */
bool group_find(const struct options *options, const struct container *container, struct group *group);
/* enforce.c: sets the limits and reads them back. */
bool enforce(const struct options *options, struct grant *grant, const struct group *group);
/* active.c: reads and writes the record driver-limit, next to the limits of each allocation. */
bool active_free(const struct options *options, const struct grant *grant, const struct group *group);
bool active_write(const struct options *options, const struct container *container, const struct grant *grant,
                  const struct group *group, const char *why_library);

#endif
