/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fence.c on a driver that fails: fences WHAT. The driver here knows each event's context and whether it lives, so that a
 * handle used after its context is gone ends the program, and one that is forgotten is counted.
 *
 *   record     no event can be recorded (a stream that is destroyed): the launch counts as predicted, nothing grows
 *   sticky     the context is in error for good, with fences open
 *   destroyed  contexts are destroyed with fences open, more of them than the library has places for
 *   vanished   the same by a way that the library does not see
 *   refused    the driver refuses to destroy the context, again and again
 *   captured   a stream is being captured, begun by whatever function: no event of ours is recorded in it
 *   strict     the thread's capture mode cannot be relaxed: no event is looked at, and nobody waits for one
 *   marks      segments that were begun and are never put, because the context or the capture changed: no event is lost
 *   launched   another thread launches while the context is being ended
 *   times      for a while no time can be read: the next ones are charged as they were again
 */
#include "compute/limiter.h"
#include "context/context.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
            exit(1); \
        } \
    } while (0)

/* --- the driver ---------------------------------------------------------------------------------------------- */

struct CUctx_st {
    bool alive;
    CUresult broken;
    struct CUevent_st *events;
};
struct CUevent_st {
    struct CUevent_st *next;
    CUcontext context;
    double ms; /* below 0: not recorded */
};

static bool capturing, relaxes = true;
static int relaxed; /* 1: this thread's mode is RELAXED */
static CUcontext current;
static CUresult record_answer, time_answer;
static double gpu_ms = 1, done_ms = 1e9; /* what is recorded after done_ms is not passed yet */
static int live_events;

static CUresult use(CUevent event)
{
    CHECK(event->context->alive);
    return event->context->broken;
}

static CUresult create(CUevent *event, unsigned flags)
{
    (void)flags;
    CHECK(current && current->alive);
    if (current->broken)
        return current->broken;
    *event = malloc(sizeof **event);
    **event = (struct CUevent_st){.next = current->events, .context = current, .ms = -1};
    current->events = *event;
    live_events++;
    return CUDA_SUCCESS;
}

static CUresult destroy(CUevent event)
{
    CHECK(event->context->alive);
    struct CUevent_st **link = &event->context->events;
    while (*link && *link != event)
        link = &(*link)->next;
    CHECK(*link == event);
    *link = event->next;
    free(event);
    live_events--;
    return CUDA_SUCCESS;
}

static CUresult record(CUevent event, CUstream stream)
{
    (void)stream;
    CHECK(!capturing); /* it would be a node of the program's graph */
    CUresult status = use(event);
    if (status == CUDA_SUCCESS && (status = record_answer) == CUDA_SUCCESS)
        event->ms = gpu_ms;
    return status;
}

static int queries; /* events that were looked at */

static CUresult query(CUevent event)
{
    CUresult status = use(event);
    CHECK(relaxed == 1 && event->ms >= 0);
    queries++;
    return status ? status : event->ms <= done_ms ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

static CUresult elapsed(float *ms, CUevent from, CUevent to)
{
    CUresult status = use(from) ? use(from) : use(to);
    CHECK(relaxed == 1 && to->ms >= 0);
    queries++;
    if (status || (status = time_answer))
        return status;
    if (from->ms > done_ms || to->ms > done_ms)
        return CUDA_ERROR_NOT_READY;
    *ms = (float)(to->ms - from->ms);
    return CUDA_SUCCESS;
}

static CUcontext pushed;
static CUresult push(CUcontext context)
{
    if (!context || !context->alive)
        return CUDA_ERROR_INVALID_CONTEXT;
    pushed = current;
    current = context;
    return CUDA_SUCCESS;
}

static CUresult pop(CUcontext *context)
{
    *context = current;
    current = pushed;
    return CUDA_SUCCESS;
}

static CUcontext begin_context(void)
{
    CUcontext context = calloc(1, sizeof *context);
    context->alive = true;
    return current = context;
}

/* The driver's part: events go with their context. */
static void end_context(CUcontext context)
{
    while (context->events)
        destroy(context->events);
    context->alive = false;
}

/* --- the rest of the library -------------------------------------------------------------------------------- */

void *vgpu_real[FUNCTION_COUNT];
struct costs vgpu_costs;
static uint64_t clock_ns = 1000 * MS;
static int64_t charged; /* device time, of which part was corrected */

uint64_t limiter_now(void)
{
    return clock_ns;
}
void limiter_forget_all(void)
{
}
CUcontext green_enters(CUcontext context)
{
    return context; /* none is green */
}

/* The driver's answers about captures: asked before each event of ours, and no event is looked at while RELAXED fails. */
bool capture_of(CUstream stream, bool per_thread)
{
    (void)stream;
    (void)per_thread;
    return capturing;
}
bool capture_relax(int *mode)
{
    relaxed += relaxes;
    *mode = relaxes ? 0 : -1;
    return relaxes;
}
void capture_restore(int mode)
{
    relaxed -= mode >= 0;
}
void controller_tell(uint64_t now)
{
    (void)now; /* no thread: the program settles */
}
void controller_reset(void)
{
}
void tenant_correct(struct limited *limited, uint64_t predicted, uint64_t real)
{
    (void)limited;
    charged += (int64_t)(real - predicted);
}
struct thread_calls vgpu_threads; /* no thread: the program settles */
_Atomic int vgpu_log_level = LOG_ERROR;
void vgpu_log_line(enum log_level level, const char *format, ...)
{
    (void)level;
    (void)format;
}
void lock_wait(struct lock *lock)
{
    (void)lock;
    CHECK(!"a lock is taken twice");
}
void lock_wake(struct lock *lock)
{
    (void)lock;
}

static struct device device;
static uint64_t lane;
static struct limited limited = {.device = &device, .busy_lane = &lane};

/* As the controller does it. */
static void fence_settle(void)
{
    for (unsigned i = 0; i < FENCE_PLACES; i++) {
        bool did;
        fence_settle_place(i, clock_ns, &did);
    }
}

/* What limiter.c does of one launch of a kernel that is known to take 100 us; false: no fence could be recorded. */
static bool launch(CUcontext context, double really_us)
{
    static struct flow flow;
    uint64_t known = 100 * US;
    segment_start(&flow.segment);
    flow.chain = 7;
    flow.segment.exclusive_ns = UINT64_MAX;
    flow.begin = fence_mark(context, NULL, false);
    flow.segment.begun = flow.begin != NULL;
    segment_add(&flow.segment, 1, known);
    gpu_ms += really_us / 1000;
    clock_ns += known;
    charged += (int64_t)known;
    atomic_store(&limited.busy_until, clock_ns + 50 * MS);
    lane = clock_ns + 50 * MS;
    struct mark *end = fence_mark(context, NULL, false);
    fence_put(&limited, &flow, end);
    CHECK(!flow.begin);
    return end != NULL;
}

/* Nothing is waited for, and the arbiter learns so. */
static void at_rest(uint32_t passed)
{
    CHECK(atomic_load(&limited.queued) == 0);
    CHECK(atomic_load(&limited.passed) == passed);
    CHECK(atomic_load(&limited.busy_until) <= clock_ns);
    CHECK(lane == 0);
}

/* The last of ten launches of 130 us each is charged so. */
static void works(CUcontext context)
{
    for (int i = 0; i < 10; i++) {
        CHECK(launch(context, 130));
        fence_settle();
    }
    int64_t before = charged;
    CHECK(launch(context, 130));
    fence_settle();
    CHECK(charged - before > 125000 && charged - before < 135000);
}

static void does_record(void)
{
    CUcontext context = begin_context();
    record_answer = CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i < 1000; i++)
        CHECK(!launch(context, 100));
    CHECK(atomic_load(&limited.queued) == 0 && live_events <= 2);
    CHECK(charged == (int64_t)(1000 * 100 * US));
    record_answer = CUDA_SUCCESS;
    works(context);
}

static void does_sticky(void)
{
    CUcontext context = begin_context();
    works(context);
    uint32_t passed = atomic_load(&limited.passed);
    done_ms = gpu_ms;
    for (int i = 0; i < 300; i++)
        CHECK(launch(context, 100));
    fence_settle();
    CHECK(atomic_load(&limited.queued) == 300 * 100 * US);
    int held = live_events;
    CHECK(held >= 600);
    context->broken = (CUresult)214; /* uncorrectable ECC error */
    fence_settle();
    at_rest(passed + 300);
    CHECK(live_events <= 64 + 1); /* the pool, and the base of time */
    for (int i = 0; i < 100; i++)
        CHECK(!launch(context, 100));
    CHECK(live_events <= 64 + 1);
    fence_context_leaving(&(struct leaving){.context = context});
    end_context(context);
    done_ms = 1e9;
    works(begin_context());
}

static void does_destroyed(bool seen)
{
    for (int round = 0; round < 50; round++) {
        CUcontext context = begin_context();
        uint32_t passed = atomic_load(&limited.passed);
        done_ms = gpu_ms;
        for (int i = 0; i < 20; i++)
            CHECK(launch(context, 100));
        if (seen)
            fence_context_leaving(&(struct leaving){.context = context});
        end_context(context);
        current = NULL;
        fence_settle();
        at_rest(passed + 20);
        done_ms = 1e9;
    }
    works(begin_context());
}

/* Stands between two steps of the library: whenever it has given memory back, another thread may have its turn. */
static CUcontext launches_into;
static int frees_before, launched;
void __real_free(void *pointer);
void __wrap_free(void *pointer)
{
    __real_free(pointer);
    if (!launches_into || frees_before-- > 0 || launched == 2)
        return;
    CUcontext context = launches_into, before = current;
    launches_into = NULL;
    current = context;
    launched += launch(context, 100);
    current = before;
    launches_into = context;
}

static void does_launched(void)
{
    for (int round = 0; round < 60; round++) {
        CUcontext context = begin_context();
        uint32_t passed = atomic_load(&limited.passed);
        done_ms = gpu_ms;
        for (int i = 0; i < 10; i++)
            CHECK(launch(context, 100));
        launched = 0;
        frees_before = round;
        launches_into = context;
        fence_context_leaving(&(struct leaving){.context = context});
        launches_into = NULL;
        end_context(context);
        CUcontext next = begin_context(); /* before anybody looks */
        done_ms = 1e9;
        CHECK(launch(next, 100));
        fence_settle();
        CHECK(!fence_open());
        at_rest(passed + 11 + (uint32_t)launched);
        fence_context_leaving(&(struct leaving){.context = next});
        end_context(next);
    }
    works(begin_context());
}

static void does_refused(void)
{
    CUcontext context = begin_context();
    for (int round = 0; round < 200; round++) {
        done_ms = gpu_ms;
        for (int i = 0; i < 20; i++)
            CHECK(launch(context, 100));
        fence_context_leaving(&(struct leaving){.context = context}); /* and cuCtxDestroy answers that it is in use */
        CHECK(atomic_load(&limited.queued) == 0);
        CHECK(live_events == 0);
        done_ms = 1e9;
    }
    works(context);
}

static void does_times(void)
{
    CUcontext context = begin_context();
    works(context);
    time_answer = CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i < 300; i++) {
        int64_t before = charged;
        CHECK(launch(context, 130));
        fence_settle();
        CHECK(charged - before == (int64_t)(100 * US)); /* as predicted */
    }
    CHECK(live_events <= 64 + 1);
    time_answer = CUDA_SUCCESS;
    works(context);
}

static void does_captured(void)
{
    CUcontext context = begin_context();
    works(context);
    int events = live_events;
    capturing = true;
    for (int i = 0; i < 100; i++)
        CHECK(!launch(context, 100));
    capturing = false;
    CHECK(!fence_open() && live_events == events);
    works(context);
}

static void does_strict(void)
{
    CUcontext context = begin_context();
    works(context);
    uint32_t passed = atomic_load(&limited.passed);
    int before = queries;
    int64_t paid = charged;
    relaxes = false;
    for (int i = 0; i < 100; i++) {
        CHECK(launch(context, 500));
        fence_settle();
    }
    CHECK(queries == before && charged == paid + (int64_t)(100 * 100 * US));
    at_rest(passed + 100);
    relaxes = true;
    works(context);
    CHECK(live_events <= 64 + 1);
}

static void does_marks(void)
{
    CUcontext context = begin_context(), other = begin_context();
    for (int i = 0; i < 1000; i++) {
        current = i % 2 ? context : other;
        fence_drop_mark(fence_mark(current, NULL, false));
    }
    CHECK(live_events <= 2);
    struct mark *held = fence_mark(context, NULL, false); /* a flow's, when its context ends */
    fence_context_leaving(&(struct leaving){.context = context});
    end_context(context);
    begin_context(); /* in its place */
    fence_drop_mark(held);
    works(current);
    current = other;
    works(other);
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "";
    vgpu_real[F_cuEventCreate] = (void *)create;
    vgpu_real[F_cuEventDestroy_v2] = (void *)destroy;
    vgpu_real[F_cuEventRecord] = (void *)record;
    vgpu_real[F_cuEventQuery] = (void *)query;
    vgpu_real[F_cuEventElapsedTime] = (void *)elapsed;
    vgpu_real[F_cuCtxPushCurrent_v2] = (void *)push;
    vgpu_real[F_cuCtxPopCurrent_v2] = (void *)pop;
    if (!strcmp(what, "record"))
        does_record();
    else if (!strcmp(what, "sticky"))
        does_sticky();
    else if (!strcmp(what, "destroyed") || !strcmp(what, "vanished"))
        does_destroyed(what[0] == 'd');
    else if (!strcmp(what, "launched"))
        does_launched();
    else if (!strcmp(what, "refused"))
        does_refused();
    else if (!strcmp(what, "captured"))
        does_captured();
    else if (!strcmp(what, "strict"))
        does_strict();
    else if (!strcmp(what, "marks"))
        does_marks();
    else if (!strcmp(what, "times"))
        does_times();
    else
        return 2;
    puts("ok");
    return 0;
}
