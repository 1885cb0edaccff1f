/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The thread that settles what launches took. It goes from context to context, sleeps until what is open should be done, and
 * wakes no more than about a hundred times a second: where the moment matters, a thread that waits anyway looks. Inside the
 * driver it may have to wait for a context that another thread keeps locked: a further thread then takes over, and leaves
 * that context to it. Before the process's exit reaches the driver, none of them calls it any more.
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

#define LONGEST_NS (20 * MS)      /* a sleep while something is open: what was put meanwhile may be shorter */
#define STUCK_NS (50 * MS)        /* inside the driver */
#define EXIT_PATIENCE_NS (2000 * MS) /* for a thread inside the driver: an exit must not hang where the driver does */

enum { AWAKE, IDLE };
static _Atomic uint32_t asleep;
static _Atomic uint32_t leader;    /* number of the thread that looks */
static _Atomic uint64_t looking;   /* since when; 0: it does not */
static _Atomic uint64_t helped;    /* when the program last settled after a wait of its own */
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

/* Once through all contexts. Answers when to look again; UINT64_MAX: nothing is open. */
static uint64_t look(uint32_t number, uint64_t now)
{
    uint64_t again = UINT64_MAX, mine = now;
    atomic_store_explicit(&looking, now, memory_order_relaxed);
    for (unsigned i = 0; i < FENCE_PLACES && leads(number); i++) {
        bool did;
        uint64_t next = fence_settle_place(i, now, &did);
        again = next < again ? next : again;
        if (did)
            fence_wake_waiters();
    }
    /* Not over the word of one that has taken over. */
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
            again = now + FENCE_LOOK_NS; /* a program that waits for each of its launches is soon back */
        }
        seen = put;
        sleep_until(wakes_take(&wakes, again < now + LONGEST_NS ? again : now + LONGEST_NS));
    }
    /* It may have slept while another thread took over, and written over that one's word. */
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
    /* What was registered later runs earlier: the driver's own part at exit is older than this. */
    if (!atomic_exchange_explicit(&at_exit_known, true, memory_order_relaxed))
        atexit(at_exit);
    /* The program's signals are not for this thread. By number: pthread_sigmask has a new version in new libraries. */
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
    vgpu_log(LOG_WARN, "no thread to settle compute time: it counts as predicted until the program launches again or waits");
}

static void take_over(void)
{
    uint32_t stuck = atomic_load_explicit(&leader, memory_order_relaxed);
    if (!atomic_compare_exchange_strong_explicit(&leader, &stuck, stuck + 1, memory_order_acq_rel, memory_order_relaxed))
        return;
    atomic_store_explicit(&looking, 0, memory_order_relaxed);
    if (start(stuck + 1))
        return;
    /* The former one may have ended meanwhile: from now on each thread looks after its own context too. */
    atomic_store_explicit(&leader, stuck, memory_order_release);
    atomic_store_explicit(&state, CANNOT, memory_order_relaxed);
}

void controller_tell(uint64_t now)
{
    unsigned before = atomic_fetch_add_explicit(&fences_put, 1, memory_order_relaxed);
    if (atomic_load_explicit(&state, memory_order_relaxed) == NOT_TRIED) {
        /* Only with the second fence: some programs must have one thread for what they do after a first look at the GPU. */
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

/* In no other context than its own: who keeps that one locked may be waiting for this very thread. */
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
