/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The simulated host: one file in shared memory that every process of the host maps (containers too).
 * libcuda.so.1, libnvidia-ml.so.1 and gpusimctl are each linked with these objects; a process that has both
 * libraries therefore has two registrations ("slots"). This is harmless: only libcuda charges memory.
 *
 * Rules for callers:
 *   1. Call sim_attach() first in every entry point that a program may call first. It is cheap when attached, and it
 *      registers a slot for a forked child.
 *   2. Everything in struct sim_state below the line "guarded by lock" is read and written between sim_lock() and
 *      sim_unlock(). The lock is not recursive. If its holder dies, the next process repairs the state.
 *   3. Never sleep, call back into user code, or return with the lock held.
 *   4. Read time only by sim_now() (ns) or sim_wall_us(). Wait only by sim_sleep_until(). No other code reads a clock.
 *   5. Before reading memory figures call sim_reap(). Before reading utilisation or the run log call sim_advance(). The
 *      caller of both must hold the lock.
 */
#ifndef GPUSIM_SIM_H
#define GPUSIM_SIM_H

#include "layout.h"

enum sim_status {
    SIM_OK = 0,
    /* Neither a state file nor a profile exists: this host has no simulated driver. */
    SIM_ERR_NO_PROFILE,
    /* The profile has an error. sim_error() names file, line, expected and found value. */
    SIM_ERR_PROFILE,
    /* The state file has another version or is damaged. */
    SIM_ERR_STATE,
    SIM_ERR_IO,
    /* No slot or channel (queue of a context) is free. */
    SIM_ERR_FULL,
    /* The GPU has not enough free memory. */
    SIM_ERR_MEMORY,
    /* The GPU has fallen off the bus. */
    SIM_ERR_LOST,
    SIM_ERR_ARGUMENT,
};

/* ---- opening (state.c) ------------------------------------------------------------------------------------- */

/* Maps the state (created from the profile by the first process of the host) and registers this process. Thread-safe
 * and idempotent. In a forked child it registers the child. */
enum sim_status sim_attach(enum sim_role role);
/* Frees this process's memory, contexts and slot; the mapping stays. A process that dies needs no detach. */
void sim_detach(void);
/* Returns NULL before sim_attach(). */
struct sim_state *sim_state(void);
/* Returns this process's slot, or -1 before sim_attach() and in a forked child. */
int sim_slot(void);
/* Returns the number of forks between the process that attached first and this process. */
unsigned sim_forks(void);
/* Returns the last failure of this thread as one sentence. */
const char *sim_error(void);
void sim_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Return the paths in GPUSIM_STATE and GPUSIM_PROFILE, or their defaults. */
const char *sim_state_path(void);
const char *sim_profile_path(void);

/* Rereads the profile into the mapped state; keeps live processes. Used by gpusimctl reset. */
enum sim_status sim_reset(bool force);

/* True if this process may use GPU i (with `device_nodes = require`: /dev/nvidia<minor> exists). Needs no lock. */
bool sim_gpu_visible(int gpu);

/* ---- lock and processes (lock.c, process.c) ---------------------------------------------------------------- */

void sim_lock(void);
void sim_unlock(void);
/* Frees the slots and the memory of dead processes. Costs one system call for each other registered process. The caller
 * must hold the lock. */
void sim_reap(void);
/* Returns a process's id in the caller's PID namespace, or 0 if the process is not visible there. Lists omit such a
 * process, as the driver's lists do. The caller must hold the lock. */
pid_t sim_proc_pid(int slot);
/* Returns all bytes of a process on a GPU. */
uint64_t sim_usage_bytes(const struct sim_usage *use);

/* ---- memory (memory.c) -------------------------------------------------------------------------------------- */

enum sim_kind { SIM_MEMORY, SIM_CONTEXT, SIM_MODULE, SIM_MANAGED };
/* sim_charge() and sim_uncharge() take the lock themselves. sim_charge() returns SIM_OK, SIM_ERR_MEMORY or
 * SIM_ERR_LOST. */
enum sim_status sim_charge(int gpu, enum sim_kind kind, uint64_t bytes);
void sim_uncharge(int gpu, enum sim_kind kind, uint64_t bytes);
/* Reads the memory of the GPU, or of the MIG instance in use, after dead processes' memory is freed. */
void sim_memory_info(int gpu, uint64_t *free_bytes, uint64_t *total_bytes);
/* MIG: from now on this process allocates within the given instance and is limited to the instance's memory. */
void sim_use_instance(int gpu, int gi, int ci);
/* Return the used and the total bytes of a GPU instance. The caller must hold the lock. */
uint64_t sim_instance_used(int gpu, int gi);
uint64_t sim_instance_total(int gpu, int gi);

/* ---- memory limits of control groups (groups.c) ------------------------------------------------------------------ */

/* The profile selects one of the kernel's controllers `misc` and `dmem` (groups.c). What follows these names below
 * applies only to that controller. */
enum sim_group_answer {
    SIM_GROUP_OK = 0,
    /* The soft limit is above the hard limit, or a limit is above the GPU's memory. */
    SIM_GROUP_ARGUMENT,
    /* The group is the root group, or the GPU uses MIG or counts no memory for groups. `misc`: sim_group_get() found no
     * limit of the group or of a group above it. */
    SIM_GROUP_UNSUPPORTED,
    /* `dmem`: the controller is not enabled for the group. */
    SIM_GROUP_NOT_FOUND,
    /* The path cannot be opened. */
    SIM_GROUP_PATH,
    /* The path is no control group, or the table of limits is full. `misc`: the new limit is below the current
     * usage. */
    SIM_GROUP_REFUSED,
};
/* Set and get a group's limit. `path` is the path of the group's folder as the caller sees it. Both functions take the
 * lock themselves. */
enum sim_group_answer sim_group_set(int gpu, const char *path, uint64_t soft, uint64_t hard);
enum sim_group_answer sim_group_get(int gpu, const char *path, struct sim_limit *limit, uint64_t *used);
/* Returns the bytes that the group is charged for. The caller must hold the lock. */
uint64_t sim_group_used(const struct sim_limit *limit);
void sim_group_forget(void); /* Removes all limits, as a reload of the driver does. The caller must hold the lock. */

/* ---- memory with a shareable handle (shared.c) --------------------------------------------------------------- */

/* Adds a block of this process. Returns its index, or -1 if there is no room. */
int sim_shared_new(const struct sim_shared *what);
/* Sets the size of a pool that has grown or shrunk. */
void sim_shared_resize(int index, uint64_t bytes);
/* Returns a descriptor for the block, or -1. */
int sim_shared_handle(int index);
/* Finds the block of a descriptor and returns its index, or -1 for another descriptor. */
int sim_shared_find(int handle, struct sim_shared *what);
/* Keeps a block alive until sim_shared_drop() or the end of this process; a forked child does not keep it. Returns NULL
 * on failure. */
void *sim_shared_import(int index);
void sim_shared_drop(void *hold);
/* Ends the exporting process's use of a block. Returns true if other processes still use the block: its memory stays in
 * use, and the exporting process is no longer charged for it. */
bool sim_shared_release(int index);
/* Returns the bytes of a GPU that no process is charged for. If reap is true, first frees the blocks that no process
 * uses. The caller must hold the lock. */
uint64_t sim_shared_orphans(int gpu, bool reap);

/* ---- time (clock.c) ------------------------------------------------------------------------------------------ */

uint64_t sim_now(void);
uint64_t sim_wall_us(uint64_t now); /* converts sim_now() to microseconds since 1970 */
void sim_sleep_until(uint64_t when);
void sim_clock_set(enum sim_clock mode);
void sim_clock_advance(uint64_t ns);

/* ---- the engine (engine.c) ------------------------------------------------------------------------------------ */

/* Simulates the GPU up to `now`. The caller must hold the lock. */
void sim_advance(int gpu, uint64_t now);
uint64_t sim_slice_ns(int gpu);
/* Opens a channel and returns its number, or -1 with sim_error(). This and the functions below take the lock. */
int sim_channel_open(int gpu);
void sim_channel_close(int gpu, int channel);
/* Queues a copy of *work as an item; blocks while the queue is full. The new item overwrites an old item in the
 * channel's ring. If overwritten is not NULL, *overwritten receives the old item. Returns the sequence number, or 0 if
 * the GPU is lost. */
uint64_t sim_submit(int gpu, int channel, const struct sim_work *work, struct sim_work *overwritten);
/* True if the item is done. If finish is not NULL, *finish receives the time of the end; 0: the item is not done or was
 * overwritten. */
bool sim_work_done(int gpu, int channel, uint64_t seq, uint64_t *finish);
/* True if all earlier items of the item's stream are done. */
bool sim_work_reached(int gpu, int channel, uint64_t seq);
/* Ends a SIM_WORK_HOST item. */
void sim_work_release(int gpu, int channel, uint64_t seq);
/* Blocks until the item is done. Returns false if the GPU is lost meanwhile. */
bool sim_work_wait(int gpu, int channel, uint64_t seq, uint64_t *finish);
/* Blocks until the queue is empty. */
bool sim_channel_wait(int gpu, int channel);
bool sim_channel_idle(int gpu, int channel);

/* ---- faults (faults.c) ----------------------------------------------------------------------------------------- */

/* Adds an event. The caller must hold the lock, as for the next two functions. */
void sim_event_add(int gpu, enum sim_event_kind kind, uint64_t data);
/* Takes a GPU off the bus: its contexts are broken for good. */
void sim_gpu_lose(int gpu);
/* Makes the GPU available again, for new contexts. */
void sim_gpu_recover(int gpu);
/* The caller must not hold the lock. Waits until event_seq differs from seen or timeout_ms has passed. */
void sim_event_wait(uint32_t seen, unsigned timeout_ms);

#endif
