/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The library's life in a process: it begins with the first hook, and again in a forked child.
 *
 * A child has none of its parent's device memory, no mapping of the ledger (it is not passed on) and perhaps locks that
 * another thread held. fork() is met by a handler; a child made by a raw clone() is known by a page that the kernel
 * hands over empty.
 */
#include "process.h"

#include "account/account.h"
#include "events.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif

static struct lock start_lock;
static struct process_state plain_state; /* before the start, and where the kernel cannot empty a page: only fork() is noticed */
_Atomic(struct process_state *) vgpu_process = &plain_state;

static void reset(void)
{
    atomic_store_explicit(&start_lock.word, 0, memory_order_relaxed);
    EVENT(reset);
}

static void before_fork(void)
{
    /* No child may get the descriptor through which the parent takes its slot. */
    ledger_hold();
}

static void after_fork_parent(void)
{
    ledger_release();
}

static void begin(struct process_state *here)
{
    atomic_store_explicit(&here->limits, NULL, memory_order_relaxed);
    atomic_store_explicit(&here->started, true, memory_order_release);
}

static void after_fork_child(void)
{
    reset();
    begin(atomic_load_explicit(&vgpu_process, memory_order_relaxed));
}

static __attribute__((noinline)) void start(void)
{
    static bool everywhere; /* started in this process or one that it was forked from */
    lock_take(&start_lock);
    struct process_state *here = atomic_load_explicit(&vgpu_process, memory_order_relaxed);
    if (!everywhere) {
        log_begin();
        void *page = mmap(NULL, (size_t)sysconf(_SC_PAGESIZE), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (page != MAP_FAILED && madvise(page, 1, MADV_WIPEONFORK) == 0)
            here = page;
        pthread_atfork(before_fork, after_fork_parent, after_fork_child);
        everywhere = true;
    } else if (!atomic_load_explicit(&here->started, memory_order_relaxed)) {
        reset(); /* also drops start_lock: nobody else can be here in a child of clone() */
        lock_take(&start_lock);
    } else {
        lock_drop(&start_lock); /* another thread was first */
        return;
    }
    begin(here);
    atomic_store_explicit(&vgpu_process, here, memory_order_release);
    lock_drop(&start_lock);
}

static enum control enter(bool driver)
{
    struct process_state *here = atomic_load_explicit(&vgpu_process, memory_order_acquire);
    if (!atomic_load_explicit(&here->started, memory_order_acquire)) {
        start();
        here = atomic_load_explicit(&vgpu_process, memory_order_acquire);
    }
    bool ready = driver ? driver_ready() : nvml_ready();
    enum control control = limits_control();
    struct cached_limits *cached = atomic_load_explicit(&vgpu_cached_limits, memory_order_acquire);
    /* A container with several shares comes here with each call: nothing is over limits that it was not over before. */
    bool known = cached && atomic_load_explicit(&here->limits, memory_order_acquire) == cached;
    bool over = ready && !known && control == CONTROL_ON && limits_oom_killer() && oom_check();
    if (driver && ready && !over && driver_settled()) /* from now on the short way in, until the limits change */
        atomic_store_explicit(&here->limits, cached, memory_order_release);
    return control;
}

enum control vgpu_enter_again(void)
{
    return enter(true);
}

enum control vgpu_enter_nvml(void)
{
    return enter(false);
}
