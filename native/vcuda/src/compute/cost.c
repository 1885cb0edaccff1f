/* SPDX-License-Identifier: Apache-2.0 */
/* What kernels take, and what a finished segment is charged. Pure: see pace.h. */
#include "pace.h"

#define LEAST_NS 200u
#define STREAK 8u /* so many segments in a row far over the prediction: the kernels have become slower, not the neighbours */

static uint64_t entry_of(uint32_t key, double ns)
{
    uint32_t whole = ns < LEAST_NS ? LEAST_NS : ns < UINT32_MAX ? (uint32_t)(ns + 0.5) : UINT32_MAX;
    return key | (uint64_t)whole << 32;
}

unsigned cost_find(struct costs *costs, uint32_t key, uint64_t *ns, bool *known)
{
    unsigned index = (unsigned)cost_index(key);
    uint64_t entry = atomic_load_explicit(&costs->entry[index], memory_order_relaxed);
    if ((uint32_t)entry != key) {
        entry = entry_of(key, COST_UNKNOWN_NS);
        atomic_store_explicit(&costs->seen[index], 0, memory_order_relaxed);
        atomic_store_explicit(&costs->entry[index], entry, memory_order_relaxed);
    }
    *ns = entry >> 32;
    *known = atomic_load_explicit(&costs->seen[index], memory_order_relaxed) != 0;
    return index;
}

static void learn(struct costs *costs, const struct segment *segment, uint64_t took, double gain)
{
    /* Of several launches only the sum is known: each is corrected by the same ratio. The costs of now count, not those of
     * the launch: segments that were under way together would correct the same error again and again. */
    double sum = 0;
    for (uint64_t i = 0; i < segment->count; i++)
        sum += (double)(atomic_load_explicit(&costs->entry[segment->items[i]], memory_order_relaxed) >> 32);
    double step = 1.0 + gain / (double)segment->count * ((double)took / (sum > 1 ? sum : 1) - 1.0);
    for (uint64_t i = 0; i < segment->count; i++) {
        _Atomic uint64_t *entry = &costs->entry[segment->items[i]];
        uint64_t old = atomic_load_explicit(entry, memory_order_relaxed);
        double next = (double)(old >> 32) * step;
        if (segment->count == 1) {
            _Atomic uint32_t *times = &costs->seen[segment->items[i]];
            uint32_t seen = atomic_load_explicit(times, memory_order_relaxed);
            if (!seen)
                next = (double)took;
            atomic_store_explicit(times, seen < 1000 ? seen + 1 : seen, memory_order_relaxed);
        }
        /* A key that came between keeps its place. */
        atomic_compare_exchange_strong_explicit(entry, &old, entry_of((uint32_t)old, next), memory_order_relaxed,
                                                memory_order_relaxed);
    }
}

uint64_t segment_settle(struct costs *costs, struct settler *settler, const struct segment *segment, uint64_t begin,
                        uint64_t end)
{
    uint64_t from = begin > settler->frontier ? begin : settler->frontier;
    uint64_t took = end > from ? end - from : 0;
    bool overlapped = from != begin;
    if (end > settler->frontier)
        settler->frontier = end;
    /* From then on another tenant's turns take every second slice, but for what they leave between them. */
    if (segment->exclusive_ns && took > segment->exclusive_ns)
        took = segment->exclusive_ns + (took - segment->exclusive_ns) / 8 * 5;
    if (!segment->known) {
        if (!overlapped)
            learn(costs, segment, took, 0.25);
        return took;
    }
    uint64_t likely = segment->predicted + segment->predicted / 4 + 100 * US;
    if (took > likely && !(segment->exclusive_ns && segment->begun)) {
        /* Another tenant's slices, or time in which the host gave nothing: neither is ours. */
        if (!overlapped && ++settler->streak > STREAK)
            learn(costs, segment, took, 0.125);
        return segment->predicted;
    }
    settler->streak = 0;
    if (!overlapped)
        learn(costs, segment, took, 0.125);
    return took;
}
