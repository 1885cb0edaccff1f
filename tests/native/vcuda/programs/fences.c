/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tests the library's fence.c on the failing driver of fence_driver.h. Usage: fences CASE.
 *
 * The library measures launches in groups, called segments. A fence is a pair of timing events, one before and one
 * after a segment. To settle a fence is to read its events and to replace the predicted charge of the segment by the
 * measured time. Until then the fence is open. A flow is the launches of one thread into one stream. The time base of a
 * context is one event; the times of the context's other events are measured from it.
 *
 *   record     the driver records no event, as in a destroyed stream: each launch is charged its prediction, and no
 *              event leaks
 *   sticky     the context has a permanent error while fences are open
 *   destroyed  contexts are destroyed with open fences
 *   vanished   contexts are destroyed with open fences by a call that bypasses the library
 *   many       40 contexts exist at once: the launches of each are measured
 *   refused    the driver refuses every request to destroy the context
 *   captured   a stream is being captured: the library records no event in the stream
 *   strict     the thread's capture mode cannot be relaxed: the library queries no event and waits for none
 *   marks      segments begin but get no fence, because the context or the capture changed: no event leaks
 *   launched   another thread launches while the context is being destroyed
 *   times      event times are unreadable for a while; then launches are charged the measured time again
 *   shared     consecutive segments share the event between them, and each is charged its measured time
 *   gaps       like shared, but some events' times are unreadable: the segments after them are charged the measured
 *              time
 *   streams    like shared, in 300 streams whose handles differ by 256
 *   left       the context ends while a flow owns a shared event
 *   late       a segment begins 2000 s before the context gets its time base: it is charged as predicted
 *   renewed    a flow begins a segment, and ends it in another context with the same handle: it is charged as predicted
 */
#include "fence_driver.h"

static struct device device;
static uint64_t lane;
static struct limited limited = {.device = &device, .busy_lane = &lane};

/* Settles all fences as the controller thread does. */
static void fence_settle(void)
{
    bool did;
    for (struct place *place = NULL; (place = fence_place_after(place));)
        fence_settle_place(place, clock_ns, &did);
}

/* Launches a kernel as limiter.c does; its predicted cost is 100 us. If `goes_on` is true, the end event of this launch
 * is also the begin event of the flow's next launch. Returns false if no fence was recorded. */
static bool launch_in(struct flow *flow, CUcontext context, double really_us, bool goes_on)
{
    uint64_t known = 100 * US;
    segment_start(&flow->segment);
    flow->segment.exclusive_ns = UINT64_MAX;
    if (!flow->begin)
        flow->begin = fence_mark(context, NULL, false);
    segment_add(&flow->segment, 1, known);
    gpu_ms += really_us / 1000;
    clock_ns += known;
    charged += (int64_t)known;
    atomic_store(&limited.busy_until, clock_ns + 50 * MS);
    lane = clock_ns + 50 * MS;
    struct mark *end = fence_mark(context, NULL, false);
    fence_put(&limited, flow, end, goes_on);
    CHECK(flow->begin == (goes_on ? end : NULL));
    return end != NULL;
}

static bool launch(CUcontext context, double really_us)
{
    static struct flow flow = {.chain = 7};
    return launch_in(&flow, context, really_us, false);
}

/* Asserts that no fence is open, and that the container is idle as seen by the arbiter, the node's service that gives
 * containers turns on the GPU. */
static void at_rest(uint32_t passed)
{
    CHECK(atomic_load(&limited.queued) == 0);
    CHECK(atomic_load(&limited.passed) == passed);
    CHECK(atomic_load(&limited.busy_until) <= clock_ns);
    CHECK(lane == 0);
}

/* Asserts that after ten launches of 130 us the next launch is charged 130 us, not the predicted 100 us. */
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
    for (int i = 0; i < 1200; i++)
        CHECK(launch(context, 100));
    fence_settle();
    CHECK(atomic_load(&limited.queued) == 1200 * 100 * US);
    int held = live_events;
    CHECK(held >= 2400);
    context->broken = (CUresult)214; /* CUDA_ERROR_ECC_UNCORRECTABLE */
    fence_settle();
    at_rest(passed + 1200);
    /* The remaining live events are the events in the pool of unused events, and the time base. */
    CHECK(live_events <= POOL + 1);
    for (int i = 0; i < 100; i++)
        CHECK(!launch(context, 100));
    CHECK(live_events <= POOL + 1);
    fence_context_leaving(&(struct leaving){.context = context});
    end_context(context);
    done_ms = 1e9;
    works(begin_context());
}

static void destroys(bool seen)
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

static void does_destroyed(void)
{
    destroys(true);
}

static void does_vanished(void)
{
    destroys(false);
}

static void does_many(void)
{
    for (int i = 0; i < 40; i++)
        works(begin_context());
}

/* Replaces free(). It simulates another thread that launches: while `launches_into` is set, up to two of the library's
 * calls of free() launch a kernel. */
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
        CUcontext next = begin_context(); /* The destroyed context's fences are not settled yet. */
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
        /* cuCtxDestroy has failed, so the context stays. */
        fence_context_leaving(&(struct leaving){.context = context});
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
        /* Event times are unreadable now, so each launch is charged the predicted cost. */
        CHECK(charged - before == (int64_t)(100 * US));
    }
    CHECK(live_events <= POOL + 1);
    time_answer = CUDA_SUCCESS;
    works(context);
}

/* Launches `count` consecutive segments that share the events between them, and settles their fences. Returns the
 * charged time in us. */
static double shared(struct flow *flow, CUcontext context, int count)
{
    int64_t before = charged;
    for (int i = 0; i < count; i++)
        CHECK(launch_in(flow, context, 130, true));
    fence_settle();
    return (double)(charged - before) / 1000;
}

static void does_shared(void)
{
    struct flow flow = {.chain = 9};
    CUcontext context = begin_context();
    works(context);
    int events = live_events, before = queries;
    double us = shared(&flow, context, 1000);
    CHECK(queries - before <= 1001); /* Each event was read once. */
    CHECK(us > 129000 && us < 131000);
    CHECK(live_events - events <= 1001);
    us = shared(&flow, context, 1000);
    CHECK(us > 129000 && us < 131000);
    CHECK(live_events - events <= 1002); /* The flow holds one of these events, and one is the time base. */
    fence_drop_mark(flow.begin);
    works(context);
}

static void does_gaps(void)
{
    struct flow flow = {.chain = 9};
    CUcontext context = begin_context();
    works(context);
    CHECK(shared(&flow, context, 1) > 129);
    for (int round = 0; round < 20; round++) {
        time_answer = CUDA_ERROR_INVALID_VALUE;
        CHECK(shared(&flow, context, 10) == 1000); /* The launches are charged as predicted. */
        /* The segment's begin event was unreadable so far, but can be read now. */
        time_answer = CUDA_SUCCESS;
        double us = shared(&flow, context, 1);
        CHECK(us > 129 && us < 131);
        relaxes = false;
        CHECK(shared(&flow, context, 10) == 1000);
        relaxes = true;
        us = shared(&flow, context, 1);
        CHECK(us > 129 && us < 131);
    }
    CHECK(live_events <= POOL + 2);
    fence_drop_mark(flow.begin);
    works(context);
}

static void does_streams(void)
{
    enum { STREAMS = 300 };
    static struct flow flow[STREAMS];
    CUcontext context = begin_context();
    works(context);
    double us = 0;
    for (int round = 0; round < 10; round++)
        for (unsigned i = 0; i < STREAMS; i++) {
            flow[i].chain = 256 * (i + 1);
            us += shared(&flow[i], context, 1);
            /* Other streams launch in between, so the next segment begins with a new event. */
            fence_drop_mark(flow[i].begin);
            flow[i].begin = NULL;
            us += shared(&flow[i], context, 2);
            fence_drop_mark(flow[i].begin);
            flow[i].begin = NULL;
        }
    CHECK(us > 129.0 * 3 * 10 * STREAMS && us < 131.0 * 3 * 10 * STREAMS);
    CHECK(live_events <= POOL + 1);
}

static void does_left(void)
{
    for (int round = 0; round < 50; round++) {
        struct flow flow = {.chain = 9};
        CUcontext context = begin_context();
        CHECK(shared(&flow, context, round % 3 + 1) > 100);
        struct flow first = {.chain = 10};
        CHECK(launch_in(&first, context, 130, true)); /* At this moment an open fence and a flow hold this end event. */
        fence_context_leaving(&(struct leaving){.context = context});
        end_context(context);
        CUcontext next = begin_context();
        fence_drop_mark(flow.begin);
        fence_drop_mark(first.begin);
        CHECK(!fence_open());
        works(next);
        fence_context_leaving(&(struct leaving){.context = next});
        end_context(next);
    }
    CHECK(live_events == 0);
}

static void does_late(void)
{
    struct flow flow = {.chain = 9};
    CUcontext context = begin_context();
    flow.begin = fence_mark(context, NULL, false);
    gpu_ms += 2e6;
    works(context); /* An event of these launches becomes the time base. */
    int64_t before = charged;
    CHECK(launch_in(&flow, context, 130, false));
    fence_settle();
    CHECK(charged - before == (int64_t)(100 * US));
    works(context);
}

static void does_renewed(void)
{
    struct flow flow = {.chain = 9};
    CUcontext context = begin_context();
    works(context);
    double us = shared(&flow, context, 1);
    CHECK(us > 129 && us < 131);
    fence_context_leaving(&(struct leaving){.context = context});
    while (context->events)
        destroy(context->events);
    int64_t before = charged;
    CHECK(launch_in(&flow, context, 130, false));
    fence_settle();
    CHECK(charged - before == (int64_t)(100 * US));
    works(context);
    fence_context_leaving(&(struct leaving){.context = context});
    CHECK(live_events == 0);
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
    CHECK(live_events <= POOL + 1);
}

static void does_marks(void)
{
    CUcontext context = begin_context(), other = begin_context();
    for (int i = 0; i < 1000; i++) {
        current = i % 2 ? context : other;
        fence_drop_mark(fence_mark(current, NULL, false));
    }
    CHECK(live_events <= 2);
    struct mark *held = fence_mark(context, NULL, false); /* A flow holds this event when the context is destroyed. */
    fence_context_leaving(&(struct leaving){.context = context});
    end_context(context);
    begin_context(); /* The new context replaces the destroyed context. */
    fence_drop_mark(held);
    works(current);
    current = other;
    works(other);
}

static const struct {
    const char *name;
    void (*does)(void);
} cases[] = {
    {"record", does_record}, {"sticky", does_sticky}, {"destroyed", does_destroyed}, {"vanished", does_vanished},
    {"launched", does_launched}, {"refused", does_refused}, {"captured", does_captured}, {"strict", does_strict},
    {"marks", does_marks}, {"times", does_times}, {"shared", does_shared}, {"gaps", does_gaps},
    {"streams", does_streams}, {"left", does_left}, {"late", does_late}, {"renewed", does_renewed},
    {"many", does_many},
};

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
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++)
        if (!strcmp(what, cases[i].name)) {
            cases[i].does();
            puts("ok");
            return 0;
        }
    return 2;
}
