/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The library's life in a process: it begins with the first hook, and begins anew in a forked child.
 *
 * A child has none of its parent's device memory, no mapping of the ledger (it is not passed on) and perhaps locks that
 * another thread held. fork() is met by a handler; a child made by a raw clone() is known by a page that the kernel
 * hands over empty.
 */
#include "vgpu.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif

static struct lock start_lock;
static _Atomic(_Atomic uint32_t *) witness; /* points to 1 in the process that started the library */
static _Atomic uint32_t plain_witness;      /* where the kernel cannot empty a page: only fork() is noticed */

static void reset(void)
{
    atomic_store_explicit(&start_lock.word, 0, memory_order_relaxed);
    driver_reset();
    blocks_reset();
    devices_reset();
    ledger_reset();
    limits_reset();
    context_reset();
    measure_reset();
    pools_reset();
    graph_memory_reset();
    vmm_reset();
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

static void after_fork_child(void)
{
    _Atomic uint32_t *mark = atomic_load_explicit(&witness, memory_order_relaxed);
    reset();
    if (mark)
        atomic_store_explicit(mark, 1, memory_order_relaxed);
}

static __attribute__((noinline)) void start(void)
{
    lock_take(&start_lock);
    _Atomic uint32_t *mark = atomic_load_explicit(&witness, memory_order_relaxed);
    if (!mark) {
        void *page = mmap(NULL, (size_t)sysconf(_SC_PAGESIZE), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        mark = &plain_witness;
        if (page != MAP_FAILED && madvise(page, 1, MADV_WIPEONFORK) == 0)
            mark = page;
        pthread_atfork(before_fork, after_fork_parent, after_fork_child);
    } else if (atomic_load_explicit(mark, memory_order_relaxed) == 0) {
        reset(); /* also drops start_lock: nobody else can be here in a child of clone() */
        lock_take(&start_lock);
    }
    atomic_store_explicit(mark, 1, memory_order_relaxed);
    atomic_store_explicit(&witness, mark, memory_order_release);
    lock_drop(&start_lock);
}

static enum control enter(bool (*ready)(void))
{
    _Atomic uint32_t *mark = atomic_load_explicit(&witness, memory_order_acquire);
    if (!mark || !atomic_load_explicit(mark, memory_order_relaxed))
        start();
    ready();
    return limits_control();
}

enum control vgpu_enter(void)
{
    return enter(driver_ready);
}

enum control vgpu_enter_nvml(void)
{
    return enter(nvml_ready);
}
