/* SPDX-License-Identifier: Apache-2.0 */
/* Declarations that only the files of core (the state and the engine of the simulated host) may use. */
#ifndef GPUSIM_INTERNAL_H
#define GPUSIM_INTERNAL_H

#include "sim.h"

/* State of this process's registration on the simulated host. libcuda, libnvidia-ml and gpusimctl have a copy each. */
struct sim_self {
    struct sim_state *state;
    /* This process's slot in the state, -1 if not registered. */
    _Atomic int slot;
    int fd;
    /* Value that this process stores in the host's lock when it takes the lock: see lock.c. */
    uint32_t word;
    enum sim_role role;
    /* sim_proc.serial of this process's first registration. A forked child keeps the value of its parent. */
    uint64_t creator;
    _Atomic unsigned forks;
};
extern struct sim_self sim_self;

/* The content of a profile before it is applied to the state (profile.c). */
struct sim_gpu_config {
    const struct sim_model *model;
    char name[SIM_NAME], uuid[SIM_UUID];
    uint32_t pci_domain, pci_bus, pci_device;
    bool has_pci;
    /* Number of /dev/nvidia<minor>. -1: the profile does not set the number, so it follows from the GPU's index. */
    int minor;
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
/* Writes the profile's configuration into the state. Data of processes stay unchanged. */
void sim_profile_apply(const struct sim_config *config, struct sim_state *state);

/* Defined in process.c: */
enum sim_status sim_register(enum sim_role role);
bool sim_slot_alive(int slot);
/* True if a living process uses a slot of this state file. */
bool sim_anyone_alive(int fd);
/* Frees a slot. The caller must hold the lock. */
void sim_proc_free(int slot);

/* Defined in lock.c: */
uint32_t sim_lock_word(int slot, uint32_t generation);
/* Repairs the counters after a process died while it held the lock (memory.c). The caller must hold the lock. */
void sim_repair(void);
int sim_futex_wait(const _Atomic uint32_t *word, uint32_t expected, uint64_t timeout_ns);
void sim_futex_wake(const _Atomic uint32_t *word, int count);

/* Defined in groups.c: */

/* Stores in `groups` the control groups of this process. Reads files, so the caller must not hold the lock. */
void sim_groups_of_self(uint64_t groups[SIM_DEPTH]);
/* Gives a new group the limit of a removed group, if `gpusimctl memacct-stale` requests this fault of a driver. The
 * caller must hold the lock. */
void sim_group_joined(int slot);
/* True if the limits of this process's control groups allow `bytes` more bytes. The caller must hold the lock. */
bool sim_group_allows(int gpu, uint64_t bytes);
/* True if no group is charged for this process's allocations. The caller must hold the lock. */
bool sim_group_skips(int gpu);
/* Returns the limit of this process's own group, or SIM_UNLIMITED; *used receives the group's usage. The caller must
 * hold the lock. */
uint64_t sim_group_cap(int gpu, uint64_t *used);

/* Defined in shared.c: returns the bytes on a GPU that a dying process exported and other processes still use.
 * `serial`: the process's sim_proc.serial. The caller must hold the lock. */
uint64_t sim_shared_leave(uint64_t serial, int gpu);

/* Defined in engine.c: */
void sim_engine_reset(int gpu, uint64_t now, uint64_t seed);
/* Frees a channel (the engine's record of a context on a GPU). The caller must hold the lock. */
void sim_channel_free(int gpu, int channel);

#endif
