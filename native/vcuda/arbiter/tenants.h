/* SPDX-License-Identifier: Apache-2.0 */
/* The allocations of a node as the arbiter sees them: folders, their files, and the GPUs that they share. */
#ifndef VGPU_TENANTS_H
#define VGPU_TENANTS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "schedule.h"
#include "vgpu_abi.h"

#define ALLOCATIONS 512
#define GPUS 64
#define MS 1000000ull

struct allocation {
    char id[VGPU_ALLOCATION_SIZE];
    bool used, seen, complained;
    int folder;       /* descriptor; it stays the same folder whatever happens to its name */
    int tenant;       /* descriptor of rw/tenant: read by pread(), for its tenant may cut the file short under a mapping */
    struct vgpu_limits limits;
    bool limits_good;
    struct {
        struct vgpu_gpu_page *page;
        ino_t inode;
        char uuid[VGPU_UUID_SIZE]; /* of the page */
        int gpu, slot;             /* -1: no seat in the schedule of its GPU */
    } device[VGPU_MAX_DEVICES];
};

struct gpu {
    char uuid[VGPU_UUID_SIZE]; /* empty: free */
    struct schedule schedule;
    struct allocation *tenant[SCHEDULE_TENANTS];
    int index[SCHEDULE_TENANTS]; /* of the GPU among the tenant's devices */
    uint64_t next;
};

struct node {
    char root[512]; /* /run/vgpu/allocations */
    struct allocation allocation[ALLOCATIONS];
    struct gpu gpu[GPUS];
    bool quiet; /* --json-status: opens pages for reading only and complains of nothing */
};

/* Looks at the folders again: new and gone allocations, files that were made again. false: the folder is not there. */
bool tenants_scan(struct node *node, uint64_t now);
/* Reads each limits file again, for limits change while containers run; and seats who has begun to work. */
void tenants_limits(struct node *node, uint64_t now);
/* The tenant's own page; false: it cannot be read. */
bool tenants_page(const struct allocation *allocation, struct vgpu_tenant_page *page);
unsigned tenants_count(const struct node *node);

/* seats.c */
/* A seat for who has none; false: it is at work and there is none. true without a seat: it rests, and may ask again. */
bool seat_take(struct node *node, struct allocation *allocation, int device, uint64_t now);
void seat_leave(struct node *node, struct allocation *allocation, int device);
/* Looks at one GPU, decides, writes the pages. Answers when to look again. */
uint64_t tenants_look(struct gpu *gpu, uint64_t now);
/* Before the arbiter ends: from now on each tenant keeps its own share. */
void tenants_release(struct node *node);

/* status.c */
int status_print(struct node *node);

/* notify.c: reports to systemd; nothing where it did not ask */
void notify(const char *state);
uint64_t notify_interval(void); /* ns between signs of life; 0: none are wanted */

#endif
