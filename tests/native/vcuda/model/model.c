/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A discrete-event model of tenants (containers) that share one GPU. In each tenant, the library counts (charges) the
 * GPU time of launches and delays launches. The arbiter, a service of the node, gives tenants turns on the GPU.
 *
 * Parts of the model are the real object code of the library and the arbiter: the limiter's arithmetic, the arbiter's
 * schedule, and the wake-up rate of the controller thread. This thread of the library reads fences: pairs of timing
 * events that measure how long a series of launches (a segment) really took. Other parts are simulated here: the GPU
 * (gpu.c), the launching threads, the times at which the controller thread checks fences, and the delays of wake-ups.
 *
 * The program prints one JSON object. Its shares come from the GPU's log. Its key "charged" is the least and the
 * largest ratio of charged time to busy GPU time in any window after the first --warm seconds. A window is one second
 * or, if that is longer, 20 times the longest kernel.
 *
 *   model [--seconds S] [--warm S] [--seed N] [--slice US] [--switch US] [--jitter PERCENT] [--no-arbiter] TENANT...
 *
 *   TENANT   key=value,...   share=PERCENT (100: no limit)  policy=default|force|disable  priority=0|1
 *                            kernels=US[:US...] (durations)  onekey=1 (all kernels have the same handle)
 *                            streak=N (N launches of each kernel in rotation; 0: a random kernel for each launch)
 *                            copy=US (a copy in the stream after each kernel, which uses no GPU time)
 *                            blocks=N[:N...] (grid sizes; a random size for each launch)
 *                            gap=US (host time after each kernel)  burst=N,rest=US (N kernels, then a pause)
 *                            change=SECOND:PERCENT (a live change of the limit)  start=SECOND  stop=SECOND
 *                            copies=N (N tenants of this kind)
 */
#include "gpu.h"
#include "compute/pace.h"
#include "schedule.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LAUNCH_NS 3000ull  /* Host time of a kernel launch call. */
#define MARK_NS 1500ull    /* Host time of a call that records an event. */
#define GAP_NS 20000ull
#define FENCES 4096u
#define NEVER UINT64_MAX
#define STEP_NS (50 * MS) /* Distance between the starts of consecutive measured windows. */

struct fence {
    struct segment segment;
    bool shared; /* True if the begin event is also the end event of the previous fence. */
    uint64_t begin, end; /* Times at which the GPU passed the two events; 0 if it has not passed them yet. */
};

struct tenant {
    /* Settings from the TENANT argument. */
    uint32_t share_ppm, change_ppm;
    bool force, disable;
    int priority, kernel_count;
    unsigned blocks[32], block_count;
    uint64_t kernels[32], gap, start, stop, change_at;
    unsigned burst;
    uint64_t rest, copy;
    bool one_key;
    unsigned streak;
    /* State of the library in the tenant's process. */
    struct vgpu_tenant_device page;
    struct schedule_output gpu_page;
    struct costs costs;
    struct settler settler;
    struct segment open;
    uint64_t busy_until, queued, looked, began;
    bool free; /* True if nothing throttled the tenant at the last launch that took the limiter's slow path. */
    uint64_t segment_ns; /* predicted work after which a segment (the launches between two events) ends */
    struct fence fences[FENCES];
    uint64_t fence_head, fence_tail;
    struct wakes wakes; /* Wake-ups of the controller thread. */
    uint64_t soon, helped;
    /* State of the tenant's launching thread. */
    uint64_t next, wants_since, poll, unlimited_wait;
    bool at_gate, waits, syncs;
    int kernel;
    unsigned grid, in_burst, segments;
    /* Results of the simulation. */
    uint64_t *charged; /* Total charged time in ns at the end of each STEP_NS. */
    uint64_t launches, longest_hold, hold_sum;
};

static struct gpu gpu;
static struct tenant *tenants;
static int tenant_count;
static struct schedule schedule;
static bool arbiter = true;
static unsigned jitter = 10;
static uint64_t seed = 1, end_ns = 12000 * MS, warm_ns = 2000 * MS, look_at;

static double chance(void)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return (double)(seed >> 11) / (double)(1ull << 53);
}

static uint64_t wake_delay(void)
{
    double tail = chance();
    return (uint64_t)((20 + 60 * chance() + (tail > 0.99 ? 300 : 0)) * 1000);
}

static uint32_t share_now(const struct tenant *t, uint64_t now)
{
    return t->change_at && now >= t->change_at ? t->change_ppm : t->share_ppm;
}

static bool unlimited(const struct tenant *t, uint64_t now)
{
    return t->disable || share_now(t, now) >= PPM;
}

/* --- the slow path of a launch, as in limiter.c -------------------------------------------------------------- */

static void close_segment(struct tenant *t, int index, uint64_t now)
{
    if (!t->open.count)
        return;
    struct fence *fence = &t->fences[t->fence_tail % FENCES];
    if (t->fence_tail - t->fence_head >= FENCES) {
        fprintf(stderr, "model: too many open fences\n");
        exit(2);
    }
    bucket_charge(&t->page, t->open.predicted);
    t->busy_until = (t->busy_until > now ? t->busy_until : now) + t->open.predicted;
    t->page.busy_until_ns[0] = t->busy_until;
    t->queued += t->open.predicted;
    fence->segment = t->open;
    fence->segment.host_ns = now - t->began;
    fence->end = 0;
    gpu_put(&gpu, index, 0, &fence->end);
    if (t->poll == NEVER)
        t->poll = wakes_take(&t->wakes, now + SEGMENT_NS);
    t->fence_tail++;
    segment_start(&t->open);
}

/* Returns the time at which the library's settle.c would next check the open fences. */
static uint64_t look_again(struct tenant *t, uint64_t now, bool finished)
{
    const struct fence *first = &t->fences[t->fence_head % FENCES];
    uint64_t due = (first->begin ? first->begin : now) + first->segment.predicted;
    uint64_t all = now + (t->queued < FENCE_LOOK_NS ? t->queued : FENCE_LOOK_NS);
    if (finished)
        t->soon = FENCE_SOON_NS;
    else if (now >= due && t->soon < FENCE_POLL_NS)
        t->soon *= 2;
    uint64_t again = now >= due ? now + t->soon : all > due ? all : due;
    return again > now + FENCE_SOON_NS ? again : now + FENCE_SOON_NS;
}

static bool settle_open(struct tenant *t, uint64_t now)
{
    bool finished = false;
    while (t->fence_head != t->fence_tail) {
        struct fence *fence = &t->fences[t->fence_head % FENCES];
        if (!fence->end)
            break;
        uint64_t real = segment_settle(&t->costs, &t->settler, &fence->segment, fence->begin, fence->end);
        bucket_correct(&t->page, fence->segment.predicted, real);
        t->queued -= fence->segment.predicted;
        t->fence_head++;
        if (t->fences[t->fence_head % FENCES].shared)
            t->fences[t->fence_head % FENCES].begin = fence->end;
        finished = true;
    }
    if (t->fence_head == t->fence_tail) {
        t->busy_until = now;
        t->page.busy_until_ns[0] = 0;
        return finished;
    }
    const struct fence *first = &t->fences[t->fence_head % FENCES];
    uint64_t since = first->begin ? first->begin : now;
    /* Even if the first fence is overdue, the work after it still takes its predicted time. */
    uint64_t least = now + 50 * US + t->queued - first->segment.predicted;
    uint64_t until = since + t->queued > least ? since + t->queued : least;
    t->busy_until = t->page.busy_until_ns[0] = until;
    return finished;
}

static void controller(struct tenant *t, uint64_t now)
{
    bool finished = settle_open(t, now);
    t->poll = t->fence_head == t->fence_tail ? NEVER : wakes_take(&t->wakes, look_again(t, now, finished)) + wake_delay() / 4;
}

/* Tries one launch. Returns false if it must wait until t->next, or until the arbiter permits it (opens the gate). */
static bool launch(struct tenant *t, int index, uint64_t now)
{
    /* Base address of the kernels' handles. As with a real driver, the handles are 0x240 bytes apart. */
    const char *functions = NULL;
    uint64_t cost, until;
    uint32_t key = cost_key(functions + 0x55d1c0a01000 + 0x240 * (t->one_key ? 0 : t->kernel), t->blocks[t->grid], 1, 1, 256);
    double factor = 1.0 + jitter / 100.0 * (2.0 * chance() - 1.0);
    uint64_t real = (uint64_t)((double)t->kernels[t->kernel] * factor);
    if (unlimited(t, now)) {
        close_segment(t, index, now);
        gpu_put(&gpu, index, real, NULL);
        t->looked = now;
        return true;
    }
    uint64_t gap_ns = GAP_NS * (t->free ? SEGMENT_OPEN : 1);
    bool known, gap = now > t->looked + gap_ns;
    unsigned item = cost_find(&t->costs, key, &cost, &known);
    bool looks = segment_looks(t->open.count, cost);
    if (t->open.count && known && !looks)
        /* The library does not read the clock here, but adds gap_ns to its last reading. */
        t->looked += gap_ns;
    else
        t->looked = now;
    if (t->open.count && known && (!looks || (!gap && t->open.count < SEGMENT_LAUNCHES && t->open.predicted + cost < t->segment_ns))) {
        segment_add(&t->open, item, cost);
        gpu_put(&gpu, index, real, NULL);
        return true;
    }
    bool alone = !known, shares = t->open.count > 0;
    close_segment(t, index, now);
    if (t->waits)
        settle_open(t, now);
    bool speaks = arbiter && t->gpu_page.gate != VGPU_GATE_NONE;
    uint32_t share = share_now(t, now);
    struct vgpu_gpu_page page = {.gate = t->gpu_page.gate, .rate_ppm = t->gpu_page.rate_ppm};
    uint32_t rate = pace_rate(share, t->force, false, speaks, &page);
    bucket_accrue(&t->page, now, rate, t->busy_until > now || t->waits);
    struct pace_view view = {
        .now = now, .waited = now - t->wants_since, .gate = speaks ? t->gpu_page.gate : VGPU_GATE_NONE, .rate_ppm = rate,
        .turn_start = t->gpu_page.turn_start_ns, .turn_end = t->gpu_page.turn_end_ns,
        .outstanding_max = t->gpu_page.outstanding_max_us && speaks ? t->gpu_page.outstanding_max_us * US : PACE_OUTSTANDING_NS,
        .busy_until = t->busy_until, .watches = true, .balance = bucket_balance(&t->page)};
    enum pace pace = pace_decide(&view, cost, &until);
    t->page.active_ns = now;
    t->free = view.gate == VGPU_GATE_OPEN && rate == PPM;
    t->segment_ns = segment_longest(t->free, view.outstanding_max);
    t->at_gate = pace == PACE_WAIT_GATE;
    t->waits = pace != PACE_GO;
    if (pace != PACE_GO) {
        if (pace == PACE_WAIT_GATE)
            t->page.waiting_ns = now;
        t->next = until + wake_delay();
        return false;
    }
    t->page.waiting_ns = 0;
    segment_start(&t->open);
    t->open.known = known;
    t->open.exclusive_ns = pace_exclusive(&view, t->gpu_page.flags);
    t->began = now;
    alone = alone || ++t->segments % 8 == 0;
    struct fence *fence = &t->fences[t->fence_tail % FENCES];
    fence->shared = shares;
    fence->begin = 0;
    if (!shares)
        gpu_put(&gpu, index, 0, &fence->begin);
    segment_add(&t->open, item, cost);
    gpu_advance(&gpu, now + LAUNCH_NS); /* An idle GPU passes the begin event before the kernel is queued. */
    gpu_put(&gpu, index, real, NULL);
    if (alone || cost >= SEGMENT_NS)
        close_segment(t, index, now + LAUNCH_NS);
    return true;
}

static void thread(struct tenant *t, int index, uint64_t now)
{
    if (now >= t->stop) {
        close_segment(t, index, now);
        t->next = NEVER;
        return;
    }
    if (gpu_depth(&gpu, index) > 1024) { /* The driver's queue is full, so the launch call blocks. */
        t->next = now + 20 * US;
        return;
    }
    if (t->syncs) {
        if (gpu_depth(&gpu, index)) {
            t->next = now + 10 * US;
            return;
        }
        t->syncs = false;
        /* When the program has waited for its kernels, the library's fence_waited() corrects the charges. */
        if (now > t->helped + FENCE_HELP_NS) {
            t->helped = now;
            settle_open(t, now);
        }
        t->next = now + (uint64_t)((double)t->rest * (0.5 + chance()));
        return;
    }
    if (!t->wants_since)
        t->wants_since = now;
    if (!launch(t, index, now))
        return;
    uint64_t held = now - t->wants_since;
    if (now > warm_ns && held > t->longest_hold)
        t->longest_hold = held;
    t->hold_sum += held;
    t->wants_since = 0;
    t->launches++;
    if (t->copy)
        gpu_put_aside(&gpu, index, t->copy);
    t->kernel = t->streak ? (int)(t->launches / t->streak % (unsigned)t->kernel_count) : (int)(chance() * t->kernel_count);
    if (t->block_count > 1)
        t->grid = (unsigned)(chance() * t->block_count);
    t->next = now + LAUNCH_NS + (t->gap ? (uint64_t)((double)t->gap * (0.5 + chance())) : 0);
    if (t->burst && ++t->in_burst >= t->burst) {
        t->in_burst = 0;
        close_segment(t, index, now);
        t->syncs = true; /* The program waits for the results of its kernels, then pauses. */
    }
}

static void look(uint64_t now)
{
    for (int i = 0; i < tenant_count; i++) {
        struct schedule_tenant *s = &schedule.tenant[i];
        struct tenant *t = &tenants[i];
        s->present = true;
        s->in = (struct schedule_input){
            .share_ppm = share_now(t, now), .force = t->force, .high = t->priority == 0, .unlimited = unlimited(t, now),
            .active_ns = t->page.active_ns, .waiting_ns = t->page.waiting_ns,
            .busy_until_ns = bucket_busy_until(&t->page), .used_ns = t->page.used_ns};
    }
    look_at = schedule_step(&schedule, now) + wake_delay() / 2;
    for (int i = 0; i < tenant_count; i++) {
        struct tenant *t = &tenants[i];
        struct schedule_output *out = &schedule.tenant[i].out;
        bool changed = memcmp(out, &t->gpu_page, sizeof *out) != 0;
        t->gpu_page = *out;
        if (changed && t->at_gate && out->gate != VGPU_GATE_CLOSED) {
            uint64_t wake = now + wake_delay();
            t->next = wake < t->next ? wake : t->next;
        }
    }
}

static int parse(char *text)
{
    struct tenant given = {.share_ppm = PPM, .priority = 1, .kernels = {50 * US}, .kernel_count = 1,
                          .blocks = {132}, .block_count = 1, .stop = NEVER, .poll = NEVER};
    int copies = 1;
    for (char *save, *word = strtok_r(text, ",", &save); word; word = strtok_r(NULL, ",", &save)) {
        char *value = strchr(word, '=');
        if (!value)
            return 0;
        *value++ = 0;
        if (!strcmp(word, "share"))
            given.share_ppm = (uint32_t)(atof(value) * 10000 + 0.5);
        else if (!strcmp(word, "policy")) {
            given.force = !strcmp(value, "force");
            given.disable = !strcmp(value, "disable");
        } else if (!strcmp(word, "priority"))
            given.priority = atoi(value);
        else if (!strcmp(word, "blocks")) {
            given.block_count = 0;
            for (char *rest, *one = strtok_r(value, ":", &rest); one && given.block_count < 32; one = strtok_r(NULL, ":", &rest))
                given.blocks[given.block_count++] = (unsigned)atof(one);
        } else if (!strcmp(word, "gap"))
            given.gap = (uint64_t)(atof(value) * 1000);
        else if (!strcmp(word, "copy"))
            given.copy = (uint64_t)(atof(value) * 1000);
        else if (!strcmp(word, "onekey"))
            given.one_key = atoi(value) != 0;
        else if (!strcmp(word, "streak"))
            given.streak = (unsigned)atoi(value);
        else if (!strcmp(word, "burst"))
            given.burst = (unsigned)atoi(value);
        else if (!strcmp(word, "rest"))
            given.rest = (uint64_t)(atof(value) * 1000);
        else if (!strcmp(word, "start"))
            given.start = (uint64_t)(atof(value) * 1e9);
        else if (!strcmp(word, "stop"))
            given.stop = (uint64_t)(atof(value) * 1e9);
        else if (!strcmp(word, "copies"))
            copies = atoi(value);
        else if (!strcmp(word, "change")) {
            given.change_at = (uint64_t)(atof(value) * 1e9);
            given.change_ppm = (uint32_t)(atof(strchr(value, ':') + 1) * 10000 + 0.5);
        } else if (!strcmp(word, "kernels")) {
            given.kernel_count = 0;
            for (char *s, *k = strtok_r(value, ":", &s); k && given.kernel_count < 32; k = strtok_r(NULL, ":", &s))
                given.kernels[given.kernel_count++] = (uint64_t)(atof(k) * 1000);
        } else
            return 0;
    }
    for (; copies > 0 && tenant_count < CONTEXTS; copies--) {
        given.next = given.start + 1 * MS + (uint64_t)tenant_count * 137 * US;
        segment_start(&given.open);
        tenants[tenant_count++] = given;
    }
    return 1;
}

/* Returns the window in ns: max(1 s, 20 times the longest kernel), rounded up to STEP_NS. */
static uint64_t window_of(const struct tenant *t)
{
    uint64_t window = 1000 * MS;
    for (int i = 0; i < t->kernel_count; i++)
        window = 20 * t->kernels[i] > window ? 20 * t->kernels[i] : window;
    return (window + STEP_NS - 1) / STEP_NS * STEP_NS;
}

static void report_windows(const struct tenant *t, int index)
{
    uint64_t window = window_of(t);
    double low = 1e9, high = -1, charged_low = 1e9, charged_high = -1;
    for (uint64_t from = warm_ns; from + window <= end_ns; from += STEP_NS) {
        double share = gpu_share(&gpu, index, from, window), ran = share / 100 * (double)window;
        low = share < low ? share : low;
        high = share > high ? share : high;
        if (ran < 5e6) /* The kernels ran less than 5 ms: most of the charge in the window is for earlier kernels. */
            continue;
        double charged = (double)(t->charged[(from + window) / STEP_NS] - t->charged[from / STEP_NS]) / (ran > 1 ? ran : 1);
        charged_low = charged < charged_low ? charged : charged_low;
        charged_high = charged > charged_high ? charged : charged_high;
    }
    printf("\"window_s\": %.2f, \"low\": %.3f, \"high\": %.3f, \"charged\": [%.3f, %.3f], ", (double)window / 1e9, low, high,
           charged_low, charged_high);
}

static void report(void)
{
    double total = 0;
    printf("{\"seconds\": %.3f, \"tenants\": [", (double)(end_ns - warm_ns) / 1e9);
    for (int i = 0; i < tenant_count; i++) {
        const struct tenant *t = &tenants[i];
        double mean = gpu_share(&gpu, i, warm_ns, end_ns - warm_ns);
        total += mean;
        printf("%s\n {", i ? "," : "");
        report_windows(t, i);
        printf("\"share\": %.2f, \"mean\": %.3f, \"launches\": %llu, \"longest_hold_ms\": %.3f,"
               " \"mean_hold_us\": %.3f, \"turns\": %u, \"used_ms\": %.3f, \"series\": [",
               share_now(t, end_ns) / 10000.0, mean, (unsigned long long)t->launches, (double)t->longest_hold / 1e6,
               t->launches ? (double)t->hold_sum / 1e3 / (double)t->launches : 0, t->gpu_page.turns, (double)t->page.used_ns / 1e6);
        for (uint64_t from = 0; from + 100 * MS <= end_ns; from += 100 * MS)
            printf("%s%.2f", from ? ", " : "", gpu_share(&gpu, i, from, 100 * MS));
        printf("]}");
    }
    printf("], \"total\": %.3f, \"switching\": %.3f}\n", total, 100.0 * (double)gpu.switching / (double)end_ns);
}

int main(int argc, char **argv)
{
    uint64_t slice = 1024 * US, change = 50 * US;
    tenants = calloc(CONTEXTS, sizeof *tenants);
    for (int i = 1; i < argc; i++) {
        bool more = i + 1 < argc;
        if (!strcmp(argv[i], "--seconds") && more)
            end_ns = (uint64_t)(atof(argv[++i]) * 1e9);
        else if (!strcmp(argv[i], "--warm") && more)
            warm_ns = (uint64_t)(atof(argv[++i]) * 1e9);
        else if (!strcmp(argv[i], "--seed") && more)
            seed = (uint64_t)atoll(argv[++i]) * 88172645463325252ull | 1;
        else if (!strcmp(argv[i], "--slice") && more)
            slice = (uint64_t)(atof(argv[++i]) * 1000);
        else if (!strcmp(argv[i], "--switch") && more)
            change = (uint64_t)(atof(argv[++i]) * 1000);
        else if (!strcmp(argv[i], "--jitter") && more)
            jitter = (unsigned)atoi(argv[++i]);
        else if (!strcmp(argv[i], "--no-arbiter"))
            arbiter = false;
        else if (!parse(argv[i])) {
            fprintf(stderr, "model: unknown argument \"%s\"; see the head of model.c\n", argv[i]);
            return 2;
        }
    }
    if (!tenant_count) {
        fprintf(stderr, "model: no tenant given\n");
        return 2;
    }
    gpu_start(&gpu, tenant_count, slice, change, end_ns);
    for (int i = 0; i < tenant_count; i++)
        tenants[i].charged = calloc(end_ns / STEP_NS + 2, sizeof *tenants[i].charged);
    for (uint64_t now = 0, step = 0; now < end_ns;) {
        uint64_t next = arbiter ? look_at : end_ns;
        int who = -1;
        bool poll = false;
        for (int i = 0; i < tenant_count; i++) {
            if (tenants[i].next < next) {
                next = tenants[i].next;
                who = i;
                poll = false;
            }
            if (tenants[i].poll < next) {
                next = tenants[i].poll;
                who = i;
                poll = true;
            }
        }
        now = next > now ? next : now + (who < 0);
        for (; step * STEP_NS <= now; step++)
            for (int i = 0; i < tenant_count; i++)
                tenants[i].charged[step] = tenants[i].page.used_ns;
        if (now >= end_ns)
            break;
        gpu_advance(&gpu, now);
        if (who < 0)
            look(now);
        else if (poll)
            controller(&tenants[who], now);
        else
            thread(&tenants[who], who, now);
    }
    gpu_advance(&gpu, end_ns);
    report();
    return 0;
}
