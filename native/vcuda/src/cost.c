/* SPDX-License-Identifier: Apache-2.0 */
/* What kernels take, and what a finished segment is charged. Pure: see pace.h. */
#include "pace.h"

#define STREAK 8u /* so many segments in a row far over the prediction: the kernels have become slower, not the neighbours */

unsigned cost_find(struct costs *costs, uint64_t key, uint64_t *ns, bool *known)
{
    unsigned index = cost_index(key);
    struct cost *cost = &costs->entry[index];
    if (atomic_load_explicit(&cost->key, memory_order_relaxed) != key) {
        atomic_store_explicit(&cost->seen, 0, memory_order_relaxed);
        atomic_store_explicit(&cost->ns, (uint32_t)COST_UNKNOWN_NS, memory_order_relaxed);
        atomic_store_explicit(&cost->key, key, memory_order_relaxed);
    }
    *ns = atomic_load_explicit(&cost->ns, memory_order_relaxed);
    *known = atomic_load_explicit(&cost->seen, memory_order_relaxed) != 0;
    return index;
}

static void learn(struct costs *costs, const struct segment *segment, uint64_t took, double gain)
{
    if (segment->count == 1) {
        struct cost *cost = &costs->entry[segment->items[0]];
        uint32_t seen = atomic_load_explicit(&cost->seen, memory_order_relaxed);
        double old = atomic_load_explicit(&cost->ns, memory_order_relaxed), fresh = took < UINT32_MAX ? (double)took : UINT32_MAX;
        double next = seen ? old + gain * (fresh - old) : fresh;
        atomic_store_explicit(&cost->ns, (uint32_t)(next < 200 ? 200 : next), memory_order_relaxed);
        atomic_store_explicit(&cost->seen, seen < 1000 ? seen + 1 : seen, memory_order_relaxed);
        return;
    }
    /* Of several launches only the sum is known: each is corrected by the same ratio. The costs of now count, not those of
     * the launch: segments that were under way together would correct the same error again and again. */
    double sum = 0;
    for (uint32_t i = 0; i < segment->count; i++)
        sum += atomic_load_explicit(&costs->entry[segment->items[i]].ns, memory_order_relaxed);
    double step = 1.0 + gain / segment->count * ((double)took / (sum > 1 ? sum : 1) - 1.0);
    for (uint32_t i = 0; i < segment->count; i++) {
        struct cost *cost = &costs->entry[segment->items[i]];
        double next = atomic_load_explicit(&cost->ns, memory_order_relaxed) * step;
        next = next < 200 ? 200 : next > UINT32_MAX ? UINT32_MAX : next;
        atomic_store_explicit(&cost->ns, (uint32_t)(next + 0.5), memory_order_relaxed);
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
