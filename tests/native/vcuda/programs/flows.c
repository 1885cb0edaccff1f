/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tests limiter.c without a driver. Usage: flows WHAT.
 *
 * A segment is a series of launches into one stream. The library records an event before and after each segment; the
 * pair is called a fence. Each segment takes a begin event from a pool. However the segment ends, this event must
 * become part of a fence or be returned to the pool.
 *
 * The arbiter, a service of the node, gives containers turns on the GPU. In a page (a mapped file) it tells a container
 * whether the container may launch now (then its gate is open) and how much work it may queue. Unless a case says
 * otherwise, kernels have a known cost of 10 us, so that one launch does not fill a segment and the segment stays open.
 *
 *   context    the thread switches between contexts with an open segment
 *   capture    a capture of the segment's stream begins
 *   streams    the thread alternates between more streams than the library keeps open segments for
 *   failed     the driver refuses the launch
 *   threads    threads exit with open segments
 *   alone      640 launches with pauses of 40 us while the arbiter's gate is open; prints the number of recorded events
 *   share      like alone, but the container has a share of the GPU time
 *   spread     like share, but each launch goes into another of 32 streams
 *   waits      like share, and each launch has to wait
 *   low        like alone, but the page has a maximum of queued work (1 ms), as if a container of high priority were
 *              present
 *   mid        64 launches of 100 us without pauses while the gate is open; prints the number of recorded events
 *   midlow     like mid, but the page has a maximum of queued work (1 ms)
 *   midtiny    like midlow, but the maximum is 100 us
 *   long       like mid, with kernels of 500 us
 *   crowded    like long, and after eight fences too many are open, until the last launch; all launches must be charged
 *              once, and be in a fence
 *   full       one launch waits for 20 ms of queued work while the gate is open; prints the throttled time in us
 *   fulllow    like full, but the page has a maximum of queued work (1 ms)
 */
#include "check.h"
#include "compute/limiter.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- stubs of the rest of the library -------------------------------------------------------------------------------- */

/* Number of begin events that are in use by flows. A flow is the launches of one thread into one stream. */
static int out;
static int recorded; /* Number of recorded events. */
static bool alone; /* True if the page shows an open gate at full rate. */
static uint32_t most_us; /* The page's maximum of queued work, or 0 for none. */
/* If `waits` is set, the budget of GPU time is empty at the first try of each launch and full at the second. `waited`
 * is set between these tries. */
static bool waits, waited;
static bool capturing;
static bool crowded; /* If set, fence_crowded() returns true from eight fences on. */
static int fences;
/* GPU time that was charged, and predicted GPU time of all fences. */
static uint64_t charged, fenced;
static CUcontext context = (CUcontext)0x1000;
static uint64_t lane;
static uint32_t sequence;
static struct device device = {.uuid = "GPU-0"};
static struct vgpu_tenant_device tenant = {.balance_ns = BUCKET_CAP_NS};
static struct limited limited = {.device = &device, .tenant = &tenant, .busy_lane = &lane};
static struct cached_limits limits = {.control = CONTROL_ON, .sequence_at = &sequence};
static struct process_state state = {.started = true, .limits = &limits};
_Atomic(struct process_state *) vgpu_process = &state;
void *vgpu_real[FUNCTION_COUNT];
const uint32_t *vgpu_limits_sequence = &sequence;
struct thread_calls vgpu_threads = {.key_create = pthread_key_create, .set = pthread_setspecific};
_Atomic int vgpu_log_level = LOG_ERROR;

enum control vgpu_enter_again(void) { return CONTROL_ON; }
enum control limits_control(void) { return CONTROL_ON; }
unsigned limits_sm_percent(const char *uuid, int nvml_index) { (void)uuid; (void)nvml_index; return 50; }
bool limits_sm_lowered(const char *uuid, int nvml_index) { (void)uuid; (void)nvml_index; return false; }
enum vgpu_core_policy limits_core_policy(void) { return alone ? VGPU_CORE_DEFAULT : VGPU_CORE_FORCE; }
int limits_priority(void) { return 0; }
unsigned limits_shares(void) { return 1; }
void vgpu_log_line(enum log_level level, const char *format, ...) { (void)level; (void)format; }
void lock_wait(struct lock *lock) { (void)lock; CHECK(!"a lock is taken twice"); }
void lock_wake(struct lock *lock) { (void)lock; }
const struct device *device_current(CUcontext *current, CUresult *status)
{
    *current = context;
    *status = CUDA_SUCCESS;
    return &device;
}
struct limited *tenant_limited(const struct device *one) { (void)one; return &limited; }
void tenant_look_again(struct limited *one, uint64_t now) { (void)one; (void)now; }
bool tenant_page(const struct limited *one, uint64_t now, struct vgpu_gpu_page *page)
{
    (void)one;
    (void)now;
    if (alone)
        *page = (struct vgpu_gpu_page){.gate = VGPU_GATE_OPEN, .flags = VGPU_GPU_EXCLUSIVE, .rate_ppm = PPM, .outstanding_max_us = most_us};
    return alone;
}
void tenant_charge(struct limited *one, uint64_t ns) { (void)one; charged += ns; }
int64_t tenant_balance(struct limited *one, uint64_t now, uint32_t rate, bool busy)
{
    (void)one;
    (void)now;
    (void)rate;
    (void)busy;
    waited = waits && !waited;
    return waited ? -(int64_t)MS : (int64_t)BUCKET_CAP_NS;
}
bool capture_of(CUstream stream, bool per_thread) { (void)stream; (void)per_thread; return capturing; }
void controller_help(bool waits) { (void)waits; }
uint32_t fence_settled(void) { return 0; }
void fence_wait(uint32_t seen, uint64_t now, uint64_t until) { (void)seen; (void)now; (void)until; }
struct mark *fence_mark(CUcontext of, CUstream stream, bool per_thread)
{
    (void)of;
    (void)stream;
    (void)per_thread;
    out++;
    recorded++;
    return malloc(1);
}
void fence_drop_mark(struct mark *mark)
{
    out -= mark != NULL;
    free(mark);
}
bool fence_crowded(void) { return crowded && fences >= 8; }
void fence_put(struct limited *one, struct flow *flow, struct mark *end, bool goes_on)
{
    (void)one;
    fences++;
    fenced += flow->segment.predicted;
    atomic_store(&limited.busy_until, 0);
    fence_drop_mark(flow->begin);
    flow->begin = goes_on ? end : NULL;
    if (!goes_on)
        fence_drop_mark(end);
}

/* --- the program ------------------------------------------------------------------------------------------------- */

#define KERNEL cost_key((const void *)0x55d1c0a01000, 1, 1, 1, 256)

static void launch(uintptr_t stream, CUresult answer)
{
    struct ticket ticket;
    limiter_before(&ticket, KERNEL, (CUstream)stream, false);
    limiter_after(&ticket, answer);
}

/* Simulates measurements of the kernel until the library knows its cost. Each launch of a kernel of unknown cost would
 * get a segment of its own. */
static void learn(uint64_t took)
{
    struct settler settler = {0};
    uint64_t at = 10 * MS, ns;
    for (int i = 0; i < 20; i++, at += MS) {
        struct segment segment;
        segment_start(&segment);
        segment_add(&segment, cost_find(&vgpu_costs, KERNEL, &ns, &segment.known), ns);
        segment.exclusive_ns = UINT64_MAX;
        segment_settle(&vgpu_costs, &settler, &segment, at, at + took);
    }
}

static void *ends(void *unused)
{
    for (uintptr_t stream = 1; stream <= FLOWS; stream++)
        launch(stream, CUDA_SUCCESS);
    return unused;
}

static void pauses(int streams)
{
    for (int i = 0; i < 640; i++) {
        for (uint64_t from = limiter_now(); limiter_now() < from + 40 * US;)
            continue;
        launch(1 + (uintptr_t)(i % streams), CUDA_SUCCESS);
    }
    printf("%d\n", recorded);
}

/* Returns false if `what` is not one of the cases that print a number. */
static bool prints(const char *what)
{
    bool full = !strncmp(what, "full", 4);
    crowded = !strcmp(what, "crowded");
    bool lengthy = crowded || !strcmp(what, "long") || !strncmp(what, "mid", 3);
    most_us = strstr(what, "low") ? 1000 : strstr(what, "tiny") ? 100 : 0;
    alone = full || lengthy || most_us || !strcmp(what, "alone");
    waits = !strcmp(what, "waits");
    bool spread = !strcmp(what, "spread");
    if (!alone && !waits && !spread && strcmp(what, "share"))
        return false;
    if (!full && !lengthy) {
        pauses(spread ? 32 : 1);
        return true;
    }
    for (int i = 0; i < (full ? 1 : 64); i++) {
        atomic_store(&limited.busy_until, full ? limiter_now() + 20 * MS : 0);
        launch(1, CUDA_SUCCESS);
    }
    if (crowded) {
        crowded = false;
        launch(1, CUDA_SUCCESS);
        CHECK(charged == 65 * 500 * US && fenced == charged);
    }
    printf("%llu\n", full ? (unsigned long long)tenant.throttled_ns / 1000 : (unsigned long long)recorded);
    return true;
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "";
    bool seen = false; /* True if a segment was open after a launch in at least one round. */
    learn(!strcmp(what, "long") || !strcmp(what, "crowded") ? 500 * US : !strncmp(what, "mid", 3) ? 100 * US : 10 * US);
    if (prints(what))
        return 0;
    for (int i = 0; i < 400; i++) {
        uintptr_t stream = !strcmp(what, "streams") ? 1 + (uintptr_t)i % 32 : 1;
        pthread_t thread;
        if (!strcmp(what, "threads")) {
            CHECK(pthread_create(&thread, NULL, ends, NULL) == 0 && pthread_join(thread, NULL) == 0);
            seen = true;
            continue;
        }
        launch(stream, CUDA_SUCCESS);
        seen = seen || out > 0;
        if (!strcmp(what, "context")) {
            context = (CUcontext)(uintptr_t)(0x1000 + i % 7);
            limiter_forget_thread();
        } else if (!strcmp(what, "capture")) {
            capturing = true;
            limiter_forget_all();
            launch(stream, CUDA_SUCCESS);
            CHECK(out == 0);
            capturing = false;
        } else if (!strcmp(what, "failed")) {
            launch(stream, CUDA_ERROR_INVALID_VALUE);
            CHECK(out == 0);
        } else if (strcmp(what, "streams")) {
            return 2;
        }
    }
    CHECK(seen && out <= (int)FLOWS);
    puts("ok");
    return 0;
}
