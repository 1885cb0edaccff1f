/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Registers processes on the simulated host. A process has a slot, its record in the shared state, as long as it has an
 * OFD lock (of an open file description) on one byte of the state file. The kernel drops this lock when the process
 * ends, so a process is alive if its lock is held; no stored flag is needed.
 *
 * A second, classic POSIX lock on another byte gives the process's pid: F_GETLK returns the holder's pid in the
 * caller's namespace (an OFD lock has no pid), so host and container each see their own numbers. The POSIX lock cannot
 * show that the process lives, because closing any descriptor of the file drops the lock.
 */
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#define LIVE_BYTES ((off_t)0x4000000000)
#define PID_BYTES ((off_t)0x5000000000)

static struct flock byte_lock(short type, off_t base, int slot)
{
    return (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_start = base + slot, .l_len = 1};
}

bool sim_slot_alive(int slot)
{
    if (slot == sim_slot())
        return true;
    struct flock probe = byte_lock(F_WRLCK, LIVE_BYTES, slot);
    if (fcntl(sim_self.fd, F_OFD_GETLK, &probe) < 0)
        return true; /* The lock cannot be read: assume a living process, so that no memory in use is freed. */
    return probe.l_type != F_UNLCK;
}

bool sim_anyone_alive(int fd)
{
    struct flock probe = byte_lock(F_WRLCK, LIVE_BYTES, 0);
    probe.l_len = SIM_MAX_PROCS;
    return fcntl(fd, F_OFD_GETLK, &probe) < 0 || probe.l_type != F_UNLCK;
}

pid_t sim_proc_pid(int slot)
{
    const struct sim_proc *proc = &sim_self.state->procs[slot];
    if (slot == sim_slot())
        return getpid();
    struct flock probe = byte_lock(F_WRLCK, PID_BYTES, slot);
    if (fcntl(sim_self.fd, F_GETLK, &probe) < 0)
        return proc->pid;
    /* F_GETLK does not report the caller's own POSIX locks. So a slot that seems unlocked may be held by this same
     * process through the other simulated library (CUDA or NVML). */
    if (probe.l_type == F_UNLCK)
        return proc->pid == getpid() ? proc->pid : 0;
    return probe.l_pid > 0 ? probe.l_pid : 0;
}

static void remember(struct sim_state *state, const struct sim_proc *proc, int gpu)
{
    const struct sim_usage *use = &proc->use[gpu];
    if (!use->peak && !use->busy_ns && !use->kernels)
        return;
    struct sim_past *past = &state->past[state->past_count++ % SIM_PAST];
    *past = (struct sim_past){.serial = proc->serial, .pid = proc->pid, .gpu = gpu, .use = *use, .end = sim_now()};
    past->use.memory = past->use.context = past->use.module = 0;
}

void sim_proc_free(int slot)
{
    struct sim_state *state = sim_self.state;
    struct sim_proc *proc = &state->procs[slot];
    for (uint32_t gpu = 0; gpu < state->gpu_count; gpu++) {
        struct sim_gpu *g = &state->gpus[gpu];
        for (uint32_t channel = 0; channel < g->channel_count; channel++)
            if (g->channels[channel].used && g->channels[channel].slot == slot)
                sim_channel_free((int)gpu, (int)channel);
        uint64_t bytes = sim_usage_bytes(&proc->use[gpu]), kept = sim_shared_leave(proc->serial, (int)gpu);
        bytes -= kept < bytes ? kept : bytes;
        remember(state, proc, (int)gpu);
        g->used -= bytes < g->used ? bytes : g->used;
        memset(&proc->use[gpu], 0, sizeof proc->use[gpu]);
    }
    proc->wait_target = UINT64_MAX;
    proc->role = SIM_ROLE_NONE;
}

void sim_reap(void)
{
    struct sim_state *state = sim_self.state;
    for (uint32_t slot = 0; slot < state->proc_high; slot++)
        if (state->procs[slot].role != SIM_ROLE_NONE && !sim_slot_alive((int)slot))
            sim_proc_free((int)slot);
    for (uint32_t gpu = 0; gpu < state->gpu_count; gpu++)
        sim_shared_orphans((int)gpu, true);
    state->last_reap = sim_now();
}

static bool take_slot(int slot, enum sim_role role)
{
    struct sim_state *state = sim_self.state;
    struct sim_proc *proc = &state->procs[slot];
    struct flock live = byte_lock(F_WRLCK, LIVE_BYTES, slot), pid = byte_lock(F_WRLCK, PID_BYTES, slot);
    uint64_t groups[SIM_DEPTH] = {0};
    if (fcntl(sim_self.fd, F_OFD_SETLK, &live) < 0)
        return false;
    if (state->memacct != SIM_MEMACCT_NONE)
        sim_groups_of_self(groups);
    fcntl(sim_self.fd, F_SETLK, &pid);
    /* From here the slot belongs to this process. The generation (how often the slot was taken) is raised first: if the
     * slot's last user died while it held the host's lock, waiters see the changed generation and take the lock
     * over. */
    proc->generation++;
    sim_self.role = role;
    sim_self.word = sim_lock_word(slot, proc->generation);
    sim_lock();
    if (proc->role != SIM_ROLE_NONE)
        sim_proc_free(slot);
    memset(proc->use, 0, sizeof proc->use);
    proc->serial = state->next_serial++;
    proc->start_wall_us = sim_wall_us(sim_now());
    proc->pid = getpid();
    proc->wait_target = UINT64_MAX;
    if (!sim_self.creator)
        sim_self.creator = proc->serial;
    proc->creator = sim_self.creator;
    memcpy(proc->groups, groups, sizeof groups);
    memset(proc->comm, 0, sizeof proc->comm);
    prctl(PR_GET_NAME, proc->comm);
    if ((uint32_t)slot >= state->proc_high)
        state->proc_high = (uint32_t)slot + 1;
    proc->role = role;
    sim_group_joined(slot);
    sim_unlock();
    /* The slot number is stored last, because it shows other threads of this process that the registration is
     * complete. */
    atomic_store_explicit(&sim_self.slot, slot, memory_order_release);
    return true;
}

enum sim_status sim_register(enum sim_role role)
{
    struct sim_state *state = sim_self.state;
    for (int pass = 0; pass < 2; pass++)
        for (int slot = 0; slot < SIM_MAX_PROCS; slot++)
            if ((state->procs[slot].role == SIM_ROLE_NONE || pass == 1) && take_slot(slot, role))
                return SIM_OK;
    sim_fail("%s: all %d slots of the simulated host are held by live processes", sim_state_path(), SIM_MAX_PROCS);
    return SIM_ERR_FULL;
}

void sim_detach(void)
{
    int slot = sim_slot();
    if (slot < 0)
        return;
    sim_lock();
    sim_proc_free(slot);
    sim_unlock();
    atomic_store(&sim_self.slot, -1);
    struct flock live = byte_lock(F_UNLCK, LIVE_BYTES, slot), pid = byte_lock(F_UNLCK, PID_BYTES, slot);
    fcntl(sim_self.fd, F_SETLK, &pid);
    fcntl(sim_self.fd, F_OFD_SETLK, &live);
    /* The descriptor stays open: closing it would drop the POSIX lock of this process's other simulated library. */
}
