/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of core share among themselves and nobody else may call. */
#ifndef GPUSIM_INTERNAL_H
#define GPUSIM_INTERNAL_H

#include "sim.h"

/* One per process and library. */
struct sim_self {
    struct sim_state *state;
    _Atomic int slot; /* -1: not registered */
    int fd;
    uint32_t word; /* owner word of this process: lock.c */
    enum sim_role role;
    uint64_t creator; /* serial of the first registration; a forked child keeps it */
    _Atomic unsigned forks;
};
extern struct sim_self sim_self;

/* profile.c: what a profile says, before it is laid over the state. */
struct sim_gpu_config {
    const struct sim_model *model;
    char name[SIM_NAME], uuid[SIM_UUID];
    uint32_t pci_domain, pci_bus, pci_device;
    bool has_pci;
    int minor; /* -1: derived */
    uint32_t memory_mib, sm_count, cc_major, cc_minor, context_mib, reserved_mib, numa_node;
    bool has_cc, has_context;
};

struct sim_config {
    char driver_version[32];
    uint32_t cuda_version;
    bool device_nodes_required;
    uint32_t jitter_permille, hostile;
    uint64_t slice_ns, switch_ns, granularity, copy_bytes_per_ms, seed;
    bool has_seed;
    uint32_t memacct, controllers_required, lowers_below_use;
    char cgroup_root[SIM_NAME];
    enum sim_clock clock;
    unsigned gpu_count;
    struct sim_gpu_config gpus[SIM_MAX_GPUS];
};

enum sim_status sim_profile_read(const char *path, struct sim_config *config);
/* Lays the configuration over the state; per-process data is left alone. */
void sim_profile_apply(const struct sim_config *config, struct sim_state *state);

/* process.c */
enum sim_status sim_register(enum sim_role role);
bool sim_slot_alive(int slot);
bool sim_anyone_alive(int fd); /* does any process hold a slot of this state file? */
void sim_proc_free(int slot); /* lock held */

/* lock.c */
uint32_t sim_lock_word(int slot, uint32_t generation);
void sim_repair(void); /* memory.c: lock held, its last holder died inside */
int sim_futex_wait(const _Atomic uint32_t *word, uint32_t expected, uint64_t timeout_ns);
void sim_futex_wake(const _Atomic uint32_t *word, int count);

/* groups.c */
void sim_groups_of_self(uint64_t groups[SIM_DEPTH]); /* lock not held: it reads files */
void sim_group_joined(int slot); /* lock held: what a new group inherits */
bool sim_group_allows(int gpu, uint64_t bytes); /* lock held: more bytes for this process */
bool sim_group_skips(int gpu); /* lock held: nothing that this process takes is charged to a group */
uint64_t sim_group_cap(int gpu, uint64_t *used); /* lock held: limit of this process's own group, else SIM_UNLIMITED */

/* shared.c: a dying process's shared bytes on a GPU that others keep; lock held */
uint64_t sim_shared_leave(uint64_t serial, int gpu);

/* engine.c */
void sim_engine_reset(int gpu, uint64_t now, uint64_t seed);
void sim_channel_free(int gpu, int channel); /* lock held */

#endif
