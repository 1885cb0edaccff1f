/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Starts the library in a process: at the first hook (replacement of a driver function), and again in a forked child.
 *
 * A child has none of its parent's device memory and no mapping of the ledger (the file in which the charges are
 * recorded). It may have inherited locks that another thread of the parent held. So all state of the library is reset
 * in a child. A handler detects fork(). A child of a raw clone() is detected by a page that the kernel clears in a
 * child.
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
/* The state before the library was started. It stays in use if the kernel cannot clear a page at fork; then only fork()
 * is detected, not clone(). */
static struct process_state plain_state;
_Atomic(struct process_state *) vgpu_process = &plain_state;

static void reset(void)
{
    atomic_store_explicit(&start_lock.word, 0, memory_order_relaxed);
    EVENT(reset);
}

static void before_fork(void)
{
    /* Take the lock for joining the ledger. Otherwise a child could inherit the descriptor through which its parent is
     * claiming a slot (an entry) in the ledger. */
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
    static bool everywhere; /* True after the library was started in this process or in one of its ancestors. */
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
        reset(); /* This also clears start_lock, because a child of clone() has only this thread. */
        lock_take(&start_lock);
    } else {
        lock_drop(&start_lock); /* Another thread has started the library meanwhile. */
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
    /* In a container with several shares (allocations of GPUs) every call reaches this line. `known` is true if the
     * limits have not changed, so that they need not be checked again. */
    bool known = cached && atomic_load_explicit(&here->limits, memory_order_acquire) == cached;
    bool over = ready && !known && control == CONTROL_ON && limits_oom_killer() && oom_check();
    /* From now on the hooks use the fast path in vgpu_enter() until the limits change. */
    if (driver && ready && !over && driver_settled())
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
