/* SPDX-License-Identifier: Apache-2.0 */
/* The allocations of a node, as the arbiter sees them: their folders and files, and the GPUs that they share. An
 * allocation is what one container was given; the container is then a tenant of these GPUs. */
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
    uint64_t since; /* since: the time at which the folder was first seen. */
    /* folder: descriptor of the allocation's folder. It stays valid when the folder is renamed. */
    int folder;
    /* tenant: descriptor of the tenant page (rw/tenant), which the tenant writes. The page is read by pread(), because
     * the tenant may truncate the file and an access to a mapping would then crash the arbiter. */
    int tenant;
    struct vgpu_limits limits;
    bool limits_good;
    struct {
        struct vgpu_gpu_page *page;
        ino_t inode;
        /* UUID of the page's GPU. */
        char uuid[VGPU_UUID_SIZE];
        int gpu, slot; /* slot: the tenant's seat (entry) in the GPU's schedule; -1 if it has none. */
    } device[VGPU_MAX_DEVICES];
};

struct gpu {
    char uuid[VGPU_UUID_SIZE]; /* uuid: an empty text marks an unused entry. */
    struct schedule schedule;
    struct allocation *tenant[SCHEDULE_TENANTS];
    int index[SCHEDULE_TENANTS]; /* Index of the GPU among the tenant's devices. */
    uint64_t next;
};

struct node {
    char root[512]; /* The folder of all allocations, /run/vgpu/allocations. */
    struct allocation allocation[ALLOCATIONS];
    struct gpu gpu[GPUS];
    uint64_t now; /* now: the time of the last look at files. */
    bool quiet; /* quiet: true for --json-status; pages are opened read-only and no errors are reported. */
};

/* Finds new and removed allocations, and files that were created again. Returns false if the folder of all allocations
 * does not exist. */
bool tenants_scan(struct node *node, uint64_t now);
/* Reads each limits file again, because limits change while containers run, and gives seats to tenants that have
 * started to work. */
void tenants_limits(struct node *node, uint64_t now);
/* Reads the tenant's page. Returns false if it cannot be read. */
bool tenants_page(const struct allocation *allocation, struct vgpu_tenant_page *page);
unsigned tenants_count(const struct node *node);

/* Defined in seats.c: */

/* Gives a seat in the GPU's schedule to a tenant without a seat. If all seats are taken, an active tenant gets the seat
 * of an idle tenant. An idle tenant needs no seat, so the function then returns true without a change. Returns false if
 * an active tenant gets no seat. */
bool seat_take(struct node *node, struct allocation *allocation, int device, uint64_t now);
void seat_leave(struct node *node, struct allocation *allocation, int device);
/* Reads the tenant pages of one GPU's tenants, decides who may run, and writes their gpu pages. Returns the time of the
 * next pass. */
uint64_t tenants_look(struct gpu *gpu, uint64_t now);
/* Called before the arbiter ends, so that from then on each tenant keeps its own share. */
void tenants_release(struct node *node);

/* Defined in status.c: */
int status_print(struct node *node);

/* notify.c: reports the state to systemd. Does nothing if systemd did not request reports. */
void notify(const char *state);
/* Returns the nanoseconds between watchdog messages to systemd, or 0 if systemd requests none. */
uint64_t notify_interval(void);

#endif
