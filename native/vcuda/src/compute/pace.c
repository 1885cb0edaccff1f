/* SPDX-License-Identifier: Apache-2.0 */
/* The bucket of a container (the GPU time that it may still use), and the rule that decides whether a launch starts or
 * waits. The arbiter, the node's service that divides a GPU's time, has a gate for each container. The gate is closed,
 * open, or open for a turn (a time slice). The functions here read no clock and call no driver (pace.h). */
#include "pace.h"

/* A throttled container launches again only when it has this balance. So it runs kernels in bursts instead of one by
 * one. Bursts reduce errors of measurement, because such errors arise only at the begin and end of a burst.
 * BURST_WAIT_NS keeps a container with a small share from waiting long. */
#define BURST_NS (2 * MS)
#define BURST_WAIT_NS (40 * MS)

/* WOKEN_NS: time from the begin of a turn (the arbiter's time slice) to its first launch on a busy machine. */
#define WOKEN_NS (500 * US)
/* DRAINED_NS: shortest time between two checks whether the GPU has finished the work that was launched before the gate
 * closed. */
#define DRAINED_NS (100 * US)
#define LOOK_AGAIN_NS (10 * MS) /* Longest wait before limits and gate are read again. */

static int64_t load(const int64_t *word)
{
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}

void bucket_accrue(struct vgpu_tenant_device *device, uint64_t now, uint32_t rate_ppm, bool busy)
{
    uint64_t last = __atomic_load_n(&device->accrued_ns, __ATOMIC_RELAXED);
    /* Several processes may call this function at once. The process that succeeds in advancing the time adds the
     * accrued GPU time. If that process dies between the two steps, this GPU time is lost. */
    if (now <= last && last - now < 1000 * MS)
        return;
    if (!__atomic_compare_exchange_n(&device->accrued_ns, &last, now, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        return;
    int64_t balance = load(&device->balance_ns), cap = (int64_t)(busy ? BUCKET_BUSY_CAP_NS : BUCKET_CAP_NS);
    uint64_t passed = now > last ? now - last : 0;
    if (last == 0 || passed > 10000 * MS)
        passed = passed && last ? 10000 * MS : 0;
    int64_t due = (int64_t)((double)passed * rate_ppm / PPM + 0.5), room = cap - balance;
    if (due > room)
        /* Accrual stops at the cap, the largest balance. But a balance that exceeds the cap because a charge was
         * corrected stays as it is. */
        due = room > 0 ? room : 0;
    if (due)
        __atomic_fetch_add(&device->balance_ns, due, __ATOMIC_RELAXED);
}

void bucket_charge(struct vgpu_tenant_device *device, uint64_t ns)
{
    __atomic_fetch_sub(&device->balance_ns, (int64_t)ns, __ATOMIC_RELAXED);
    __atomic_fetch_add(&device->used_ns, ns, __ATOMIC_RELAXED);
}

void bucket_correct(struct vgpu_tenant_device *device, uint64_t predicted, uint64_t real)
{
    __atomic_fetch_add(&device->balance_ns, (int64_t)(predicted - real), __ATOMIC_RELAXED);
    __atomic_fetch_add(&device->used_ns, real - predicted, __ATOMIC_RELAXED);
}

int64_t bucket_balance(const struct vgpu_tenant_device *device)
{
    return load(&device->balance_ns);
}

uint64_t bucket_busy_until(const struct vgpu_tenant_device *device)
{
    uint64_t latest = 0;
    for (unsigned i = 0; i < VGPU_TENANT_LANES; i++) {
        uint64_t until = __atomic_load_n(&device->busy_until_ns[i], __ATOMIC_RELAXED);
        if (until > latest)
            latest = until;
    }
    return latest;
}

uint32_t pace_rate(uint32_t share_ppm, bool force, bool lowered, bool arbiter, const struct vgpu_gpu_page *page)
{
    if (!arbiter || page->gate == VGPU_GATE_NONE || force || (lowered && page->gate != VGPU_GATE_OPEN))
        return share_ppm;
    return page->rate_ppm > share_ppm ? page->rate_ppm : share_ppm;
}

static enum pace later(const struct pace_view *view, uint64_t when, enum pace answer, uint64_t *until)
{
    *until = when > view->now + LOOK_AGAIN_NS || when <= view->now ? view->now + LOOK_AGAIN_NS : when;
    return answer;
}

/* Called if the arbiter does not let this container launch. The arbiter begins the next turn (time slice) when this
 * process reports that its work is finished. So one thread checks after half of the remaining predicted time whether
 * the work is finished. */
static enum pace at_gate(const struct pace_view *view, uint64_t *until)
{
    uint64_t left = view->watches && view->busy_until > view->now ? view->busy_until - view->now : 0;
    return later(view, left ? view->now + (left / 2 > DRAINED_NS ? left / 2 : DRAINED_NS) : 0, PACE_WAIT_GATE, until);
}

uint64_t pace_exclusive(const struct pace_view *view, uint32_t flags)
{
    uint64_t start = view->busy_until > view->now ? view->busy_until : view->now, end = view->turn_end + VGPU_ARBITER_DRAIN_NS;
    if (view->gate == VGPU_GATE_NONE)
        return UINT64_MAX;
    if (!(flags & VGPU_GPU_EXCLUSIVE))
        return 0;
    return view->gate != VGPU_GATE_TURN ? UINT64_MAX : end > start ? end - start : 0;
}

enum pace pace_decide(const struct pace_view *view, uint64_t cost, uint64_t *until)
{
    uint64_t start = view->busy_until > view->now ? view->busy_until : view->now;
    if (view->gate == VGPU_GATE_CLOSED)
        return at_gate(view, until);
    if (view->gate == VGPU_GATE_TURN) {
        if (view->now < view->turn_start)
            return later(view, view->turn_start, PACE_WAIT, until);
        if (start >= view->turn_end)
            return at_gate(view, until);
        /* Some launches do not fit into the rest of the turn. Such a launch may start if more than half of it fits, or
         * if it is the first of its turn, because otherwise a long kernel could never start. A launch whose thread was
         * woken late still counts as first, so that it does not miss a short turn. */
        uint64_t first = (view->turn_end - view->turn_start) / 8;
        if (start + cost > view->turn_end + cost / 2 && start > view->turn_start + (first > WOKEN_NS ? first : WOKEN_NS))
            return at_gate(view, until);
    }
    if (start - view->now > view->outstanding_max)
        return later(view, start - view->outstanding_max, PACE_WAIT, until);
    if (view->rate_ppm < PPM && view->balance <= 0) {
        uint64_t rate = view->rate_ppm ? view->rate_ppm : 1;
        uint64_t burst = BURST_WAIT_NS * rate / PPM < BURST_NS ? BURST_WAIT_NS * rate / PPM : BURST_NS;
        /* A single long kernel counts as a burst, and a launch that has waited for BURST_WAIT_NS has waited long enough.
         * Both start as soon as the balance is positive. */
        burst = cost < burst && view->waited < BURST_WAIT_NS ? burst : 0;
        /* Wait until the balance is above 0, rounded up to the next nanosecond. With a balance of exactly 0 the launch
         * would have to wait again. */
        uint64_t owed = (uint64_t)-view->balance + 1 + burst;
        return later(view, view->now + (uint64_t)((double)owed * PPM / (double)rate) + 1, PACE_WAIT, until);
    }
    return PACE_GO;
}
