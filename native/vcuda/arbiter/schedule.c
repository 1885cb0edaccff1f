/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The scheduler of one GPU: decides which tenant (container) has the turn to use it. The tenant that has the turn is
 * the holder. A tenant's share is its part of the GPU's time. Its credit is the device time that it may still claim,
 * and negative credit is debt. A gate is the permission to run, which the tenant reads from its gpu page, a file that
 * the arbiter writes. A burst is the device time that a tenant needs at once before it pauses.
 */
#include "schedule.h"

#include "vgpu_abi.h"

#define PPM 1000000
#define US 1000ull
#define MS 1000000ull

/* A tenant counts as busy for this time after its last launch. */
#define ACTIVE_NS (60 * MS)
/* A waiting tenant writes its tenant page, the file with its own state, every 10 ms. If that page is not written for
 * this time, the tenant counts as killed. */
#define WAITING_NS (25 * MS)
/* Every busy tenant has one turn in about this time. */
#define CYCLE_NS (50 * MS)
#define TURN_MIN_NS (2 * MS)
#define TURN_MAX_NS (30 * MS)
/* A turn ends early if its tenant has had no work on the GPU for this time. */
#define IDLE_NS (300 * US)
/* During a turn the holder's tenant page is read at this interval. */
#define LOOK_NS (250 * US)
/* If a tenant's work takes longer than predicted, the tenant updates its tenant page within this time. Otherwise the
 * tenant counts as killed. */
#define LATE_NS (400 * US)
#define DRAIN_NS VGPU_ARBITER_DRAIN_NS
/* Maximum predicted work that a tenant of low priority may queue while a tenant of high priority shares the GPU. */
#define LOW_OUTSTANDING_US 1000u
/* Largest credit of a tenant, given as elapsed time: the time in which the tenant's share adds up to that credit. */
#define CREDIT_NS (250 * (int64_t)MS)
/* Largest debt of device time of a tenant. If a kernel takes longer, the rest is not charged. */
#define DEBT_NS (2000 * (int64_t)MS)
/* A tenant that has waited for this time gets the next turn. */
#define HELD_NS (65 * MS)
/* A tenant that has waited for this time cuts the current turn short. */
#define HELD_MOST_NS (78 * MS)
/* The two times above (HELD_NS, HELD_MOST_NS) apply only to a tenant whose debt of device time is below this. */
#define OVERDUE_DEBT_NS (30 * (int64_t)MS)
/* A tenant is called sparse if it gives up its turns early and its bursts of work are at least this long. */
#define SPARSE_LEAST_NS (150 * US)
/* A sparse tenant goes first only if its last turn ended at least this time ago. */
#define SPARSE_REST_NS (4 * MS)
/* A sparse tenant whose credit covers its burst cuts a turn short once the turn has lasted this long. */
#define SPARSE_NS (1 * MS)
/* Maximum predicted work that other tenants may queue while a sparse tenant is active. */
#define SPARSE_OUTSTANDING_US 1000u
/* The turn of a sparse tenant ends early if the tenant has had no work on the GPU for this time. */
#define SPARSE_IDLE_NS (200 * US)
/* Lag is the time by which a tenant is behind its share. A waiting tenant cuts the turn short if its lag exceeds the
 * holder's by more than this and CYCLE_NS together. */
#define PREEMPT_NS (30 * (int64_t)MS)

bool schedule_unlimited(const struct schedule_input *tenant, unsigned busy_others, bool all_high, bool unknown_others)
{
    if (tenant->unlimited)
        return true;
    if (tenant->force || unknown_others)
        return false;
    return busy_others == 0 || all_high;
}

struct sum {
    unsigned present, active, unlimited;
    bool all_high, any_high;
    /* Sum of the shares of active tenants. */
    double shares;
    /* Sum of the credits of active tenants. A tenant's claim is its credit minus its part of this sum: if all tenants
     * are equally far behind, each claim is 0. If the shares do not fill the GPU, this is 0 (claim = credit). */
    double credits;
};

/* Returns true if the active tenants' shares fill the GPU. If they do not, some time stays free, and the shares are
 * limits that a tenant may not exceed. */
static bool fills(const struct sum *sum)
{
    return sum->shares >= 0.9999;
}

static uint64_t past(uint64_t when, uint64_t now)
{
    return when <= now ? when : when - now < WAITING_NS ? now : 0;
}

/* Updates the credit of a tenant that is idle or is the only active one. Such a tenant saves up no credit. Its debt
 * decreases at the rate of its share, so that a pause is never cheaper than waiting for a turn. */
static void rest(struct schedule_tenant *tenant, uint64_t passed)
{
    int64_t credit = tenant->credit + (int64_t)((double)passed * tenant->in.share_ppm / PPM);
    tenant->credit = credit < 0 ? credit : 0;
}

static struct sum look(struct schedule *schedule, uint64_t now, uint64_t passed)
{
    struct sum sum = {.all_high = true};
    for (int i = 0; i < SCHEDULE_TENANTS; i++) {
        struct schedule_tenant *tenant = &schedule->tenant[i];
        struct schedule_input *in = &tenant->in;
        if (!tenant->present)
            continue;
        sum.present++;
        sum.all_high = sum.all_high && in->high;
        sum.any_high = sum.any_high || in->high;
        sum.unlimited += in->unlimited;
        /* The tenant writes these times. A time far in the future is ignored, because it would keep the tenant busy for
         * ever. A time slightly in the future is normal, because the clock is read before the page. */
        in->active_ns = past(in->active_ns, now);
        in->waiting_ns = past(in->waiting_ns, now);
        if (in->busy_until_ns > now + 1000 * MS)
            in->busy_until_ns = now + 1000 * MS;
        bool active = !in->unlimited && ((in->active_ns && now - in->active_ns < ACTIVE_NS) || in->busy_until_ns > now ||
                                         (in->waiting_ns && now - in->waiting_ns < WAITING_NS));
        if (!active)
            rest(tenant, passed);
        tenant->active = active;
        bool waits = active && in->waiting_ns && now - in->waiting_ns < WAITING_NS;
        tenant->waits_since = !waits ? 0 : tenant->waits_since ? tenant->waits_since : now;
        sum.active += active;
        if (active) {
            sum.shares += (double)in->share_ppm / PPM;
            sum.credits += (double)tenant->credit;
        }
    }
    if (!fills(&sum))
        sum.credits = 0;
    return sum;
}

static bool waiting(const struct schedule_tenant *tenant)
{
    return tenant->waits_since != 0;
}

static double rate(const struct schedule_tenant *tenant, const struct sum *sum)
{
    double share = (double)tenant->in.share_ppm / PPM;
    share = sum->shares > 1.0 ? share / sum->shares : share;
    return share > 0.001 ? share : 0.001;
}

static double claim_of(const struct schedule_tenant *tenant, const struct sum *sum)
{
    return (double)tenant->credit - rate(tenant, sum) * sum->credits;
}

/* Returns the tenant's lag, the time by which it is behind its share: in this time its share adds up to its credit, the
 * device time that it is still owed. */
static double lag(const struct schedule_tenant *tenant, const struct sum *sum)
{
    return (double)tenant->credit / rate(tenant, sum);
}

/* Returns true if the tenant has waited for `after` ns and has little debt. It then precedes tenants with more lag. */
static bool overdue(const struct schedule_tenant *tenant, const struct sum *sum, uint64_t now, uint64_t after)
{
    return waiting(tenant) && now - tenant->waits_since >= after && claim_of(tenant, sum) > -(double)OVERDUE_DEBT_NS;
}

static void add_credit(struct schedule_tenant *tenant, double ns, const struct sum *sum)
{
    double bound = (double)CREDIT_NS * rate(tenant, sum), credit = (double)tenant->credit + ns;
    tenant->credit = (int64_t)(credit > bound ? bound : credit < -(double)DEBT_NS ? -(double)DEBT_NS : credit);
}

static void open_gate(struct schedule_tenant *tenant, bool limited, bool exclusive, bool low)
{
    tenant->out.gate = VGPU_GATE_OPEN;
    tenant->out.flags = exclusive ? VGPU_GPU_EXCLUSIVE : 0;
    tenant->out.rate_ppm = limited ? tenant->in.share_ppm : PPM;
    tenant->out.outstanding_max_us = low ? LOW_OUTSTANDING_US : 0;
    tenant->out.turn_start_ns = tenant->out.turn_end_ns = 0;
}

static void close_gate(struct schedule_tenant *tenant, bool by_priority)
{
    tenant->out.gate = VGPU_GATE_CLOSED;
    tenant->out.flags = by_priority ? VGPU_GPU_PRIORITY : 0;
    tenant->out.rate_ppm = PPM;
    tenant->out.turn_start_ns = tenant->out.turn_end_ns = 0;
}

/* Sets the gates while tenants do not compete for the GPU. If one tenant is active, the gates of the others are closed,
 * so that another tenant that starts to work must report that it waits; otherwise the arbiter would notice its first
 * launch too late. */
static uint64_t all_free(struct schedule *schedule, const struct sum *sum, uint64_t now, uint64_t passed)
{
    schedule->state = SCHEDULE_FREE;
    schedule->holder = -1;
    schedule->alone = 0;
    for (int i = 0; i < SCHEDULE_TENANTS; i++) {
        struct schedule_tenant *tenant = &schedule->tenant[i];
        if (!tenant->present)
            continue;
        if (tenant->active) {
            rest(tenant, passed);
            schedule->alone = sum->active == 1 ? (unsigned)i + 1 : 0;
        }
        unsigned others = sum->active - tenant->active;
        bool all_high = sum->all_high && sum->present > 1;
        if (others && !all_high) {
            close_gate(tenant, false);
            continue;
        }
        bool unlimited = schedule_unlimited(&tenant->in, others, all_high, sum->unlimited > 0);
        open_gate(tenant, !unlimited, sum->active <= 1 && !sum->unlimited, sum->any_high && !tenant->in.high);
    }
    return now + (sum->active ? 1 * MS : 20 * MS);
}

static bool within_share(const struct schedule_tenant *tenant, const struct sum *sum)
{
    return claim_of(tenant, sum) >= 0;
}

static bool bursts(const struct schedule_tenant *tenant)
{
    return tenant->gave_up >= 3 && tenant->burst >= SPARSE_LEAST_NS;
}

/* Returns true if the tenant is sparse, has rested and its credit covers its burst. If such a tenant goes first, one
 * more change of turns costs the other tenants a little time, but their shares stay the same. */
static bool sparse(const struct schedule_tenant *tenant, const struct sum *sum, uint64_t now)
{
    return bursts(tenant) && now - tenant->served >= SPARSE_REST_NS && claim_of(tenant, sum) >= (double)tenant->burst;
}

/* Returns the rank of a tenant; the highest goes first. */
static double order(const struct schedule_tenant *tenant, const struct sum *sum, uint64_t now)
{
    double ahead = lag(tenant, sum);
    if (tenant->in.high && within_share(tenant, sum))
        return ahead + 1e15;
    if (overdue(tenant, sum, now, HELD_NS))
        return 1e14 + (double)(now - tenant->waits_since);
    return sparse(tenant, sum, now) ? 1e13 + ahead : ahead;
}

static int choose(const struct schedule *schedule, const struct sum *sum, uint64_t now)
{
    int best = -1;
    for (int i = 0; i < SCHEDULE_TENANTS; i++) {
        const struct schedule_tenant *tenant = &schedule->tenant[i];
        if (!tenant->present || !waiting(tenant))
            continue;
        /* If the shares do not fill the GPU, they are limits: a tenant must first save up credit for a turn. */
        if (!fills(sum) && tenant->credit < (int64_t)(rate(tenant, sum) * 15 * MS) && !sparse(tenant, sum, now) &&
            !overdue(tenant, sum, now, HELD_NS))
            continue;
        double mine = order(tenant, sum, now), first = best < 0 ? 0 : order(&schedule->tenant[best], sum, now);
        if (best < 0 || mine > first || (mine == first && tenant->served < schedule->tenant[best].served))
            best = i;
    }
    return best;
}

/* Charges a tenant for `ns` of device time and credits this time to all active tenants by their shares. If one of them
 * would exceed CREDIT_NS, all get less, so that every lag grows by the same time and the order stays. */
static void take(struct schedule *schedule, const struct sum *sum, struct schedule_tenant *taker, double ns)
{
    double given = fills(sum) ? ns : 0;
    add_credit(taker, -ns, sum);
    for (int i = 0; i < SCHEDULE_TENANTS; i++) {
        double room = (double)CREDIT_NS - lag(&schedule->tenant[i], sum);
        if (schedule->tenant[i].present && schedule->tenant[i].active && given > room)
            given = room > 0 ? room : 0;
    }
    for (int i = 0; i < SCHEDULE_TENANTS; i++)
        if (schedule->tenant[i].present && schedule->tenant[i].active)
            add_credit(&schedule->tenant[i], given * rate(&schedule->tenant[i], sum), sum);
}

/* Charges the holder for its turn. If its work still runs after the turn, next to the next tenant's work, `late` is the
 * predicted end of this work, and the time until then is charged too. Otherwise `late` is 0. */
static void charge(struct schedule *schedule, const struct sum *sum, uint64_t now, uint64_t late)
{
    if (schedule->holder < 0 || !schedule->tenant[schedule->holder].present)
        return;
    struct schedule_tenant *holder = &schedule->tenant[schedule->holder];
    double held = (double)(now - schedule->turn_start), used = (double)(holder->in.used_ns - holder->used_at);
    /* The time that the tenant reports is used, but at least 80 and at most 100 % of the turn. So the gaps between
     * turns are charged to no tenant, and a false report gains little. */
    used = used > held ? held : used < 0.8 * held ? 0.8 * held : used;
    holder->used_at = holder->in.used_ns;
    holder->late = late > now;
    holder->beyond = late > now ? (int64_t)(late - now) : 0;
    used += (double)holder->beyond;
    schedule->turn_start = now;
    take(schedule, sum, holder, used);
    holder->served = now;
}

/* Work that still ran after its tenant's turn was charged as predicted. Corrects the charge to the time that the tenant
 * reports later. The report may be false, so at most the charge for this work is refunded. */
static void settle_late(struct schedule *schedule, const struct sum *sum)
{
    for (int i = 0; i < SCHEDULE_TENANTS; i++) {
        struct schedule_tenant *tenant = &schedule->tenant[i];
        if (!tenant->present || !tenant->late || tenant->in.used_ns == tenant->used_at)
            continue;
        int64_t more = (int64_t)(tenant->in.used_ns - tenant->used_at);
        more = more < -tenant->beyond ? -tenant->beyond : more > DEBT_NS ? DEBT_NS : more;
        tenant->beyond += more;
        tenant->used_at = tenant->in.used_ns;
        take(schedule, sum, tenant, (double)more);
    }
}

static uint64_t length(const struct schedule_tenant *tenant, const struct sum *sum)
{
    double ns = rate(tenant, sum) * (double)CYCLE_NS;
    if (!fills(sum) && (double)tenant->credit > ns)
        ns = (double)tenant->credit;
    return ns < (double)TURN_MIN_NS ? TURN_MIN_NS : ns > (double)TURN_MAX_NS ? TURN_MAX_NS : (uint64_t)ns;
}

static bool given_up(const struct schedule_tenant *holder, const struct schedule *schedule, uint64_t now)
{
    uint64_t last = holder->in.active_ns > schedule->turn_start ? holder->in.active_ns : schedule->turn_start;
    if (holder->in.busy_until_ns > last)
        last = holder->in.busy_until_ns;
    return !holder->present || now > last + (bursts(holder) ? SPARSE_IDLE_NS : IDLE_NS);
}

/* Returns true if a waiting tenant goes before the holder, so that the turn is cut short. */
static bool preempted(const struct schedule *schedule, const struct sum *sum, uint64_t now)
{
    const struct schedule_tenant *holder = &schedule->tenant[schedule->holder];
    int next = choose(schedule, sum, now);
    if (next < 0 || next == schedule->holder)
        return false;
    const struct schedule_tenant *other = &schedule->tenant[next];
    if (other->in.high && within_share(other, sum) && !holder->in.high)
        return true;
    if (sparse(other, sum, now))
        return now - schedule->turn_start > SPARSE_NS;
    if (overdue(other, sum, now, HELD_MOST_NS))
        return now - schedule->turn_start > TURN_MIN_NS;
    double so_far = (double)(now - schedule->turn_start) / rate(holder, sum);
    return now - schedule->turn_start > TURN_MIN_NS &&
           lag(other, sum) > lag(holder, sum) - so_far + (double)PREEMPT_NS + (double)CYCLE_NS;
}

/* Returns the maximum work in microseconds that the holder may queue; 0 means no maximum. With the maximum, a tenant
 * that should go first does not wait long for the queued work. */
static uint32_t outstanding(const struct schedule *schedule, const struct sum *sum, int holder)
{
    uint32_t most = 0;
    for (int i = 0; i < SCHEDULE_TENANTS; i++)
        if (i != holder && schedule->tenant[i].present && schedule->tenant[i].active && bursts(&schedule->tenant[i]))
            most = SPARSE_OUTSTANDING_US;
    return sum->any_high && !schedule->tenant[holder].in.high ? LOW_OUTSTANDING_US : most;
}

/* Returns true if only the holder uses the GPU: no work of an earlier turn still runs, and there is no tenant without a
 * limit, because such a tenant always runs. */
static bool exclusive(const struct schedule *schedule, const struct sum *sum, uint64_t now)
{
    for (int i = 0; i < SCHEDULE_TENANTS; i++)
        if (schedule->tenant[i].present && schedule->tenant[i].late && schedule->tenant[i].in.busy_until_ns + LATE_NS > now)
            return false;
    return !sum->unlimited;
}

static uint64_t begin_turn(struct schedule *schedule, const struct sum *sum, int next, uint64_t now)
{
    struct schedule_tenant *holder = &schedule->tenant[next];
    schedule->state = SCHEDULE_TURN;
    schedule->holder = next;
    schedule->turn_start = now;
    schedule->turn_end = now + (holder->credit < 0 && overdue(holder, sum, now, HELD_NS) ? TURN_MIN_NS / 2 : length(holder, sum));
    holder->waits_since = 0;
    holder->used_at = holder->in.used_ns;
    holder->late = false;
    holder->out.gate = VGPU_GATE_TURN;
    holder->out.flags = exclusive(schedule, sum, now) ? VGPU_GPU_EXCLUSIVE : 0;
    holder->out.rate_ppm = PPM;
    holder->out.turn_start_ns = now;
    holder->out.turn_end_ns = schedule->turn_end;
    holder->out.outstanding_max_us = outstanding(schedule, sum, next);
    holder->out.turns++;
    return now + LOOK_NS;
}

/* Decides whether to wait longer for the work that is queued at the end of a turn. Returns the time of the next check;
 * 0: stop waiting. *late receives the predicted end of work that is still running. */
static uint64_t drain(struct schedule *schedule, uint64_t now, uint64_t *late)
{
    uint64_t latest = 0;
    /* If there was a holder, wait only for its work. Another tenant's overdue work was already waited for at the end of
     * that tenant's own turn. */
    for (int i = 0; i < SCHEDULE_TENANTS; i++)
        if (schedule->tenant[i].present && (schedule->holder < 0 || schedule->holder == i) &&
            schedule->tenant[i].in.busy_until_ns > latest)
            latest = schedule->tenant[i].in.busy_until_ns;
    /* If latest is 0, the tenant has reported that its work is done. If latest is in the past, the prediction was too
     * short and the kernel may still run. */
    *late = latest && latest + LATE_NS > now ? (latest > now ? latest : now + 1) : 0;
    if (!latest || latest + LATE_NS <= now || now >= schedule->drain_until)
        return 0;
    /* Overdue work is checked every 50 us. */
    uint64_t next = latest < schedule->drain_until ? latest : schedule->drain_until;
    return next > now + 50 * US ? (next < now + 200 * US ? next : now + 200 * US) : now + 50 * US;
}

/* Records the length of the holder's burst if the holder gave up its turn. Uses the time that the tenant reports, at
 * most the length of the turn. */
static void note_burst(struct schedule *schedule, uint64_t now)
{
    struct schedule_tenant *holder = &schedule->tenant[schedule->holder];
    uint64_t took = holder->in.used_ns - holder->used_at, held = now - schedule->turn_start;
    took = took > held ? held : took;
    bool gave_up = given_up(holder, schedule, now) && !waiting(holder) && took <= (schedule->turn_end - holder->out.turn_start_ns) / 2;
    holder->gave_up = gave_up ? holder->gave_up + 1 : 0;
    holder->burst = !gave_up ? 0 : holder->burst ? (3 * holder->burst + took) / 4 : took;
}

static uint64_t take_turns(struct schedule *schedule, const struct sum *sum, uint64_t now)
{
    if (schedule->state == SCHEDULE_FREE) { /* A tenant that ran alone is charged for its queued work from now on. */
        schedule->state = SCHEDULE_DRAIN;
        schedule->holder = (int)schedule->alone - 1;
        schedule->turn_start = now;
        schedule->drain_until = now + DRAIN_NS;
        for (int i = 0; i < SCHEDULE_TENANTS; i++) /* Work from the time without contention is not charged. */
            schedule->tenant[i].late = false;
        if (schedule->holder >= 0)
            schedule->tenant[schedule->holder].used_at = schedule->tenant[schedule->holder].in.used_ns;
    }
    settle_late(schedule, sum);
    if (schedule->state == SCHEDULE_TURN) {
        struct schedule_tenant *holder = &schedule->tenant[schedule->holder];
        /* If the holder waits, its next work does not fit into its turn, so the turn is over. */
        bool over = now >= schedule->turn_end || holder->in.waiting_ns > schedule->turn_start + 100 * US;
        if (over && holder->present && choose(schedule, sum, now) < 0 && fills(sum) &&
            !given_up(holder, schedule, now)) {
            charge(schedule, sum, now, 0); /* No other tenant waits, so the turn continues. */
            schedule->turn_end = holder->out.turn_end_ns = now + TURN_MIN_NS;
            over = false;
        }
        if (!over && !given_up(holder, schedule, now) && !preempted(schedule, sum, now)) {
            uint64_t look = now + (bursts(holder) ? SPARSE_IDLE_NS : LOOK_NS);
            return schedule->turn_end < look ? schedule->turn_end : look;
        }
        note_burst(schedule, now);
        schedule->state = SCHEDULE_DRAIN;
        schedule->drain_until = now + DRAIN_NS;
    }
    for (int i = 0; i < SCHEDULE_TENANTS; i++)
        if (schedule->tenant[i].present)
            close_gate(&schedule->tenant[i], sum->any_high && !schedule->tenant[i].in.high);
    if (schedule->state == SCHEDULE_DRAIN) {
        uint64_t late;
        uint64_t again = drain(schedule, now, &late);
        if (again)
            return again;
        charge(schedule, sum, now, late);
        schedule->state = SCHEDULE_NOBODY;
        schedule->holder = -1;
    }
    int next = choose(schedule, sum, now);
    return next >= 0 ? begin_turn(schedule, sum, next, now) : now + 200 * US;
}

uint64_t schedule_step(struct schedule *schedule, uint64_t now)
{
    uint64_t passed = schedule->stepped && now > schedule->stepped ? now - schedule->stepped : 0;
    struct sum sum = look(schedule, now, passed);
    schedule->stepped = now;
    if (!fills(&sum)) /* The shares are limits, so credit grows with time. */
        for (int i = 0; i < SCHEDULE_TENANTS; i++)
            if (schedule->tenant[i].present && schedule->tenant[i].active)
                add_credit(&schedule->tenant[i], (double)passed * rate(&schedule->tenant[i], &sum), &sum);
    for (int i = 0; i < SCHEDULE_TENANTS; i++) /* A tenant without a share limit always runs. */
        if (schedule->tenant[i].present && schedule->tenant[i].in.unlimited)
            schedule->tenant[i].out.rate_ppm = PPM;
    if (sum.active <= 1 || (sum.all_high && sum.present > 1))
        return all_free(schedule, &sum, now, passed);
    return take_turns(schedule, &sum, now);
}
