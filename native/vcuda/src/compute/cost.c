/* SPDX-License-Identifier: Apache-2.0 */
/* Predicts the GPU time of kernels, learns it from measurements, and computes the charge of a finished segment (the
 * launches between two timing events of a stream). These functions read no clock and call no driver (pace.h). */
#include "pace.h"

#define LEAST_NS 200u
#define UNSTEADY_NS (20 * US)
/* Number of launches of a new kernel that are measured one by one. Later launches are measured together. With each of
 * these first measurements the assumed least cost halves, so that more launches may be queued. */
#define TRUSTED 7u

/* The longest time of a kernel decreases slowly: after this number of measured launches it has fallen to a third. */
#define FORGET 8192u
/* A launch of a kernel with varying times costs at least this part of its longest time, so that only few such launches
 * are queued. */
#define MOST_PART 8u
/* No launch call takes the host longer than this, unless the thread is interrupted or the call loads a module. */
#define PAUSE_NS (20 * US)
#define CARRY_NS (10 * (int64_t)MS)

static uint32_t load(const _Atomic uint32_t *word)
{
    return atomic_load_explicit(word, memory_order_relaxed);
}

/* Returns true if some launches took far longer than usual, so that any launch may take that long. */
static bool unsteady(uint64_t most, uint64_t ns)
{
    return most > 2 * (ns + UNSTEADY_NS);
}

/* Builds an entry of the table of costs. For a kernel that must be measured at each launch, the bit COST_APART makes
 * the cost so large that the fast path finds the segment full. */
static uint64_t entry_of(uint32_t key, double ns, uint64_t most)
{
    uint64_t whole = ns < LEAST_NS ? LEAST_NS : ns < COST_MOST_NS ? (uint64_t)(ns + 0.5) : COST_MOST_NS;
    return key | (whole | (unsteady(most, whole) ? COST_APART : 0)) << 32;
}

static uint64_t ns_of(uint64_t entry)
{
    return entry >> 32 & ~COST_APART;
}

unsigned cost_find(struct costs *costs, uint32_t key, uint64_t *ns, bool *known)
{
    unsigned index = (unsigned)cost_index(key);
    uint64_t entry = atomic_load_explicit(&costs->entry[index], memory_order_relaxed);
    if ((uint32_t)entry != key) {
        /* If the entry belonged to another kernel, the program has more kernels than the table has entries, and
         * this kernel may have been measured before. With the long time that is assumed for an unknown kernel, it
         * would have to wait each time the two kernels replace each other in the table. So it starts with the other
         * kernel's time. */
        uint64_t guess = entry && ns_of(entry) < COST_UNKNOWN_NS ? ns_of(entry) : COST_UNKNOWN_NS;
        atomic_store_explicit(&costs->seen[index], entry ? TRUSTED - 1 : 0, memory_order_relaxed);
        atomic_store_explicit(&costs->most[index], 0, memory_order_relaxed);
        entry = entry_of(key, (double)guess, 0);
        atomic_store_explicit(&costs->entry[index], entry, memory_order_relaxed);
    }
    uint32_t seen = load(&costs->seen[index]);
    uint64_t least = entry >> 32 & COST_APART ? load(&costs->most[index]) / MOST_PART : seen < TRUSTED ? COST_UNKNOWN_NS >> seen : 0;
    *ns = ns_of(entry) > least ? ns_of(entry) : least;
    *known = seen >= TRUSTED && !(entry >> 32 & COST_APART);
    return index;
}

/* Updates an entry, unless another key has replaced it meanwhile. */
static void teach(struct costs *costs, unsigned item, uint64_t old, double ns, uint64_t most)
{
    atomic_store_explicit(&costs->most[item], (uint32_t)(most < COST_MOST_NS ? most : COST_MOST_NS), memory_order_relaxed);
    atomic_compare_exchange_strong_explicit(&costs->entry[item], &old, entry_of((uint32_t)old, ns, most), memory_order_relaxed,
                                            memory_order_relaxed);
}

/*
 * Learns from the measured time of a single launch. The cost slowly follows the measured times in both directions. The
 * longest time rises at once and falls over thousands of launches. During a kernel's first launch the driver loads code
 * and the GPU's caches are cold. So this launch counts for the cost only until the second is measured, and never for
 * the longest time. If `bound` is true, the launch took at least `took`. That can only raise the cost, and the first
 * exact measurement replaces it.
 */
static void learn_one(struct costs *costs, unsigned item, uint64_t took, bool bound)
{
    uint64_t old = atomic_load_explicit(&costs->entry[item], memory_order_relaxed), most = load(&costs->most[item]);
    double ns = (double)ns_of(old);
    uint32_t seen = load(&costs->seen[item]);
    uint64_t step = 4 * (most > ns_of(old) ? most : ns_of(old)) + UNSTEADY_NS;
    bool exact = seen && (most || seen >= TRUSTED - 1); /* True unless `ns` is from the first launch or from bounds. */
    most -= (most + FORGET - 1) / FORGET;
    if (!bound || !seen || (double)took > ns)
        ns += ((double)took - ns) / (exact ? seen : 1);
    atomic_store_explicit(&costs->seen[item], seen < TRUSTED ? seen + 1 : seen, memory_order_relaxed);
    /* Limit the increase, so that one delayed launch of a short kernel does not make it a long kernel. */
    uint64_t longest = !seen || bound ? 0 : took < step ? took : step;
    teach(costs, item, old, ns, most > longest ? most : longest);
}

static void learn(struct costs *costs, const struct segment *segment, uint64_t took, bool bound)
{
    if (segment->count == 1) {
        learn_one(costs, segment->items[0], took, bound);
        return;
    }
    /* Only the sum of several launches is known, so each cost is corrected by the same ratio. The current costs are
     * used and not those at launch time: otherwise segments that were queued at the same time would each correct the
     * same error. If the measured sum is far above the predicted sum, the ratio does not show which kernel was slow, so
     * each of the kernels will be measured alone. */
    double sum = 0, count = (double)segment->count;
    for (uint64_t i = 0; i < segment->count; i++)
        sum += (double)ns_of(atomic_load_explicit(&costs->entry[segment->items[i]], memory_order_relaxed));
    bool apart = (double)took > 1.5 * sum + (double)(100 * US);
    double step = 1.0 + 0.125 / count * ((double)took / (sum > 1 ? sum : 1) - 1.0);
    for (uint64_t i = 0; i < segment->count; i++) {
        unsigned item = segment->items[i];
        uint64_t old = atomic_load_explicit(&costs->entry[item], memory_order_relaxed), most = load(&costs->most[item]);
        uint64_t each = (uint64_t)((double)ns_of(old) * 2 + (double)took / count) + UNSTEADY_NS;
        if (apart)
            teach(costs, item, old, (double)ns_of(old), most > each ? most : each);
        else
            teach(costs, item, old, (double)ns_of(old) * step, most);
    }
}

/*
 * Returns the least charge for a segment during which another container may have used the GPU all the time. Then each of
 * the two gets every second time slice: 3/8 of the elapsed time, if the gaps between the slices take a quarter. So over
 * many such segments at least 3/8 of the time are charged. A single segment may be charged less, because one segment
 * lies within the container's time slice and the next waits for another container's slice.
 */
static uint64_t shared_least(struct settler *settler, const struct segment *segment, uint64_t passed)
{
    int64_t carry = settler->carry + (int64_t)(passed / 8 * 3) - (int64_t)segment->predicted;
    settler->carry = carry > 0 ? 0 : carry < -CARRY_NS ? -CARRY_NS : carry;
    return carry > 0 ? segment->predicted + (uint64_t)carry : 0;
}

uint64_t segment_settle(struct costs *costs, struct settler *settler, const struct segment *segment, uint64_t begin,
                        uint64_t end)
{
    uint64_t from = begin > settler->frontier ? begin : settler->frontier;
    uint64_t took = end > from ? end - from : 0;
    bool overlapped = from != begin;
    if (end > settler->frontier)
        settler->frontier = end;
    /* After the time exclusive_ns another container may run too. It gets 3/8 of the time (see shared_least()), so the
     * other 5/8, which include the gaps between the slices, are charged. */
    if (segment->exclusive_ns && took > segment->exclusive_ns)
        took = segment->exclusive_ns + (took - segment->exclusive_ns) / 8 * 5;
    /* The stream may have been idle while the host prepared the next launch, so this time is subtracted from the least
     * charge. The host time starts at `begin` at the latest. So only the part of it after `from` is subtracted. */
    uint64_t dry = segment->host_ns > from - begin ? segment->host_ns - (from - begin) : 0;
    uint64_t least = took > dry ? took - dry : 0, ran = took;
    bool near = segment->known && took <= segment->predicted + segment->predicted / 4 + 100 * US;
    bool sure = (segment->exclusive_ns || near) && 2 * dry <= took;
    if (!segment->exclusive_ns && !near)
        least = shared_least(settler, segment, least);
    if (segment->prolonged) {
        /* host_ns is the time in which the host waited for room to record the end. The stream may have run work
         * meanwhile, so at least the predicted time is charged. If the segments of several streams went on, the first
         * counts all of the time and is charged a part of it. So the others are charged as predicted too. */
        uint64_t whole = overlapped ? end - begin : took;
        least = least > segment->predicted ? least : segment->predicted;
        return least < whole ? least : whole;
    }
    bool unknown = !sure && segment->exclusive_ns && !segment->known, bound = unknown && dry > PAUSE_NS;
    if (bound)
        ran = least; /* The cost of these kernels is not known yet. */
    else if (!sure && !unknown && segment->predicted < took)
        ran = segment->predicted > least ? segment->predicted : least;
    if (!overlapped && (sure || !segment->known || (segment->exclusive_ns && ran != segment->predicted)))
        learn(costs, segment, ran, bound);
    return ran;
}
