/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs the thread that settles fences (timing events after groups of launches), that is, replaces predicted charges by
 * measured times. The thread visits all contexts, sleeps until the queued work should be finished, and wakes at most
 * about a hundred times a second.
 *
 * Threads of the program that have to wait anyway settle fences too, because they notice the end of the work sooner. If
 * the settling thread waits inside the driver for a context that another thread has locked, a further thread takes over
 * the other contexts. At process exit all these threads stop before the driver is torn down.
 */
#include "limiter.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Longest sleep while a fence is not settled. A fence that is added meanwhile may be due earlier, so the sleep must be
 * short. */
#define LONGEST_NS (20 * MS)
/* If the thread is inside the driver for longer than this, another thread takes over. */
#define STUCK_NS (50 * MS)
/* Longest wait at exit for a thread that is inside the driver, so that the exit does not hang if the driver hangs. */
#define EXIT_PATIENCE_NS (2000 * MS)

enum { AWAKE, IDLE };
static _Atomic uint32_t asleep;
/* Number of the thread that settles fences, the leader. A thread that finds another number here ends. */
static _Atomic uint32_t leader;
/* Start of the leader's current pass over the contexts; 0: the leader is between passes. */
static _Atomic uint64_t looking;
/* Time at which a thread of the program last settled fences while it waited. */
static _Atomic uint64_t helped;
static _Atomic unsigned fences_put;
static _Atomic enum { NOT_TRIED, RUNS, CANNOT } state;
static _Atomic bool at_exit_known;

static void futex(int operation, uint32_t value)
{
    syscall(SYS_futex, &asleep, operation, value, NULL, NULL, 0);
}

static bool leads(uint32_t number)
{
    return atomic_load_explicit(&leader, memory_order_acquire) == number;
}

/* Settles all contexts once. Returns the time of the next pass; UINT64_MAX: every fence is settled. */
static uint64_t look(uint32_t number, uint64_t now)
{
    uint64_t again = UINT64_MAX, mine = now;
    atomic_store_explicit(&looking, now, memory_order_relaxed);
    for (struct place *place = NULL; leads(number) && (place = fence_place_after(place));) {
        bool did;
        uint64_t next = fence_settle_place(place, now, &did);
        again = next < again ? next : again;
        if (did)
            fence_wake_waiters();
    }
    /* Sets `looking` to 0 only if no other thread has taken over and set it. */
    atomic_compare_exchange_strong_explicit(&looking, &mine, 0, memory_order_relaxed, memory_order_relaxed);
    return again;
}

static void sleep_until(uint64_t at)
{
    const struct timespec until = {.tv_sec = (time_t)(at / 1000000000u), .tv_nsec = (long)(at % 1000000000u)};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
}

static void sleep_idle(void)
{
    atomic_store_explicit(&asleep, IDLE, memory_order_seq_cst);
    if (!fence_open())
        futex(FUTEX_WAIT_PRIVATE, IDLE);
    atomic_store_explicit(&asleep, AWAKE, memory_order_seq_cst);
}

static void wake(void)
{
    uint32_t from = IDLE;
    if (atomic_compare_exchange_strong_explicit(&asleep, &from, AWAKE, memory_order_seq_cst, memory_order_relaxed))
        futex(FUTEX_WAKE_PRIVATE, INT32_MAX);
}

static void *control(void *data)
{
    uint32_t number = (uint32_t)(uintptr_t)data;
    struct wakes wakes = {0};
    unsigned seen = 0;
    prctl(PR_SET_NAME, "vgpu-limiter", 0, 0, 0);
    prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
    while (leads(number)) {
        uint64_t now = limiter_now(), again = look(number, now);
        if (!leads(number))
            break;
        unsigned put = atomic_load_explicit(&fences_put, memory_order_relaxed);
        if (again == UINT64_MAX && put == seen) {
            sleep_idle();
            now = limiter_now();
            again = now + SEGMENT_NS;
        } else if (again == UINT64_MAX) {
            /* A program that waits for each launch will soon launch again. So this thread sleeps only briefly and does
             * not yet become idle. */
            again = now + FENCE_LOOK_NS;
        }
        seen = put;
        sleep_until(wakes_take(&wakes, again < now + LONGEST_NS ? again : now + LONGEST_NS));
    }
    /* Another thread may have taken over while this thread slept. This thread may then have overwritten `asleep`, so
     * wake the new leader. */
    atomic_store_explicit(&asleep, AWAKE, memory_order_seq_cst);
    futex(FUTEX_WAKE_PRIVATE, INT32_MAX);
    return NULL;
}

static void at_exit(void)
{
    fence_park(EXIT_PATIENCE_NS);
}

static bool start(uint32_t number)
{
    uint64_t all = ~0ull, before;
    pthread_t thread;
    if (!vgpu_threads.create)
        return false;
    /* Exit handlers run in reverse order of registration. The driver's was registered earlier, so this one runs before
     * it. */
    if (!atomic_exchange_explicit(&at_exit_known, true, memory_order_relaxed))
        atexit(at_exit);
    /* Block all signals in the new thread, because the program's own threads must handle them. The system call is used
     * directly, because pthread_sigmask has a new symbol version in new C libraries. */
    syscall(SYS_rt_sigprocmask, SIG_SETMASK, &all, &before, sizeof all);
    bool started = vgpu_threads.create(&thread, NULL, control, (void *)(uintptr_t)number) == 0;
    syscall(SYS_rt_sigprocmask, SIG_SETMASK, &before, NULL, sizeof before);
    if (started && vgpu_threads.detach)
        vgpu_threads.detach(thread);
    return started;
}

static void start_first(void)
{
    if (start(atomic_load_explicit(&leader, memory_order_relaxed)))
        return;
    atomic_store_explicit(&state, CANNOT, memory_order_relaxed);
    vgpu_log(LOG_WARN, "no thread to settle compute time: launches stay charged as predicted until the program launches again or waits");
}

static void take_over(void)
{
    uint32_t stuck = atomic_load_explicit(&leader, memory_order_relaxed);
    if (!atomic_compare_exchange_strong_explicit(&leader, &stuck, stuck + 1, memory_order_acq_rel, memory_order_relaxed))
        return;
    atomic_store_explicit(&looking, 0, memory_order_relaxed);
    if (start(stuck + 1))
        return;
    /* No thread could be started. The former leader may have ended meanwhile, so from now on each launching thread also
     * settles its own context. */
    atomic_store_explicit(&leader, stuck, memory_order_release);
    atomic_store_explicit(&state, CANNOT, memory_order_relaxed);
}

void controller_tell(uint64_t now)
{
    unsigned before = atomic_fetch_add_explicit(&fences_put, 1, memory_order_relaxed);
    if (atomic_load_explicit(&state, memory_order_relaxed) == NOT_TRIED) {
        /* Start the thread with the second fence only, because some programs use the GPU once and then do something for
         * which they must be single-threaded. */
        if (before == 1) {
            atomic_store_explicit(&state, RUNS, memory_order_relaxed);
            start_first();
        }
        return;
    }
    if (atomic_load_explicit(&asleep, memory_order_seq_cst) == IDLE)
        wake();
    uint64_t since = atomic_load_explicit(&looking, memory_order_relaxed);
    if (since && now > since + STUCK_NS)
        take_over();
}

/* Settles fences only in the caller's own current context: a thread that has locked another context may itself wait for
 * the calling thread. */
void controller_help(bool waits)
{
    CUcontext context;
    if ((waits || atomic_load_explicit(&state, memory_order_relaxed) == CANNOT) && fence_open() &&
        REAL(cuCtxGetCurrent)(&context) == CUDA_SUCCESS && context)
        fence_settle_context(context, limiter_now());
}

void fence_waited(bool done)
{
    (void)done;
    if (!fence_open())
        return;
    uint64_t now = limiter_now();
    bool waits = now > atomic_load_explicit(&helped, memory_order_relaxed) + FENCE_HELP_NS;
    if (waits)
        atomic_store_explicit(&helped, now, memory_order_relaxed);
    controller_help(waits);
}

void controller_reset(void)
{
    atomic_store_explicit(&asleep, AWAKE, memory_order_relaxed);
    atomic_store_explicit(&leader, 0, memory_order_relaxed);
    atomic_store_explicit(&looking, 0, memory_order_relaxed);
    atomic_store_explicit(&fences_put, 0, memory_order_relaxed);
    atomic_store_explicit(&helped, 0, memory_order_relaxed);
    atomic_store_explicit(&state, NOT_TRIED, memory_order_relaxed);
}
