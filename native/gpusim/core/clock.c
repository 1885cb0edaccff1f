/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Implements the clock of the simulation. Real time is CLOCK_MONOTONIC, which all processes share. Virtual time is a
 * counter in the state, in one of two modes:
 *   `manual`  only sim_clock_advance() moves the time (gpusimctl clock advance), so a test decides every instant;
 *   `auto`    the time jumps to the next awaited instant as soon as every process with a context waits.
 * In mode `auto` a process counts as waiting while one of its threads waits in the simulated driver, even if another
 * thread computes. A sleep outside the driver does not count as waiting, so it stops the virtual time.
 */
#include "internal.h"

#include <errno.h>
#include <stdatomic.h>
#include <time.h>

#define RUNNING UINT64_MAX
#define RECHECK_NS 20000000ull

static uint64_t read_clock(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

uint64_t sim_now(void)
{
    struct sim_state *state = sim_self.state;
    if (atomic_load_explicit(&state->clock_mode, memory_order_relaxed) != SIM_CLOCK_REAL)
        return atomic_load(&state->clock_now);
    return read_clock(CLOCK_MONOTONIC);
}

uint64_t sim_wall_us(uint64_t now)
{
    const struct sim_state *state = sim_self.state;
    return now >= state->boot_now ? state->boot_wall_us + (now - state->boot_now) / 1000
                                  : state->boot_wall_us - (state->boot_now - now) / 1000;
}

static void move_to(struct sim_state *state, uint64_t when)
{
    if (when > atomic_load(&state->clock_now))
        atomic_store(&state->clock_now, when);
    atomic_fetch_add(&state->clock_seq, 1);
    sim_futex_wake(&state->clock_seq, INT32_MAX);
}

/* Returns the earliest instant for which a process waits, or RUNNING while a process with a context runs. The caller
 * must hold the lock. */
static uint64_t next_instant(struct sim_state *state)
{
    uint64_t next = RUNNING;
    for (uint32_t slot = 0; slot < state->proc_high; slot++) {
        const struct sim_proc *proc = &state->procs[slot];
        bool member = false;
        for (uint32_t gpu = 0; proc->role == SIM_ROLE_CUDA && gpu < state->gpu_count; gpu++)
            member = member || proc->use[gpu].contexts > 0;
        if (proc->role == SIM_ROLE_NONE || (proc->wait_target == RUNNING && !member))
            continue;
        if (proc->wait_target == RUNNING)
            return RUNNING;
        if (proc->wait_target < next)
            next = proc->wait_target;
    }
    return next;
}

static void virtual_sleep(struct sim_state *state, uint64_t when)
{
    struct sim_proc *self = &state->procs[sim_self.slot];
    while (sim_now() < when && atomic_load(&state->clock_mode) != SIM_CLOCK_REAL) {
        uint32_t seen = atomic_load(&state->clock_seq);
        sim_lock();
        if (self->wait_target == RUNNING || when < self->wait_target || self->wait_target <= sim_now())
            self->wait_target = when;
        if (atomic_load(&state->clock_mode) == SIM_CLOCK_AUTO) {
            uint64_t next = next_instant(state);
            if (next != RUNNING)
                move_to(state, next);
        }
        sim_unlock();
        if (sim_now() >= when)
            break;
        if (sim_futex_wait(&state->clock_seq, seen, RECHECK_NS) == ETIMEDOUT) {
            sim_lock();
            sim_reap(); /* A dead process must not stop virtual time. */
            sim_unlock();
        }
    }
    sim_lock();
    if (self->wait_target <= when)
        /* Another thread of this process may wait for a later instant. That thread's loop stores the instant again. */
        self->wait_target = RUNNING;
    sim_unlock();
}

void sim_sleep_until(uint64_t when)
{
    struct sim_state *state = sim_self.state;
    if (atomic_load(&state->clock_mode) != SIM_CLOCK_REAL) {
        virtual_sleep(state, when);
        return;
    }
    struct timespec target = {.tv_sec = (time_t)(when / 1000000000u), .tv_nsec = (long)(when % 1000000000u)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &target, NULL) == EINTR)
        ;
}

void sim_clock_set(enum sim_clock mode)
{
    struct sim_state *state = sim_self.state;
    sim_lock();
    uint64_t now = sim_now();
    if (mode == SIM_CLOCK_REAL)
        now = read_clock(CLOCK_MONOTONIC);
    /* Virtual time starts at the present real time. When the clock changes back to real time, GPUs may already be
     * simulated beyond the present, so their engines restart. */
    atomic_store(&state->clock_now, now);
    atomic_store(&state->clock_mode, mode);
    for (uint32_t gpu = 0; gpu < state->gpu_count; gpu++)
        if (state->gpus[gpu].simulated > now)
            sim_engine_reset((int)gpu, now, state->gpus[gpu].random);
    atomic_fetch_add(&state->clock_seq, 1);
    sim_unlock();
    sim_futex_wake(&state->clock_seq, INT32_MAX);
}

void sim_clock_advance(uint64_t ns)
{
    struct sim_state *state = sim_self.state;
    sim_lock();
    move_to(state, atomic_load(&state->clock_now) + ns);
    sim_unlock();
}
