/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The arithmetic of the compute limiter, which keeps a container to its share of the GPU's time. All times are in
 * nanoseconds. The parts are:
 *
 * bucket: the GPU time that a container may still use. The bucket fills with time, and kernels empty it.
 *
 * pace: the rule that decides whether a launch may start now, and if not, when to check again.
 *
 * cost: the GPU time of a kernel, learned from segments.
 *
 * segment: the launches between two fences (timing events) of one stream. When the second fence is settled, the
 * measured time replaces the predicted time.
 *
 * wakes: limits how often the thread that settles fences wakes.
 *
 * This code reads no clock and calls no driver, because time is an argument. So the same object code runs in the
 * library and in the tests' model (tests/native/vcuda/model).
 */
#ifndef VGPU_PACE_H
#define VGPU_PACE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "vgpu_abi.h"

#define PPM 1000000u
#define US 1000ull
#define MS 1000000ull

/* --- bucket ------------------------------------------------------------------------------------------ */

/* Largest balance of a container without queued work. */
#define BUCKET_CAP_NS (5 * MS)
/* Largest balance while work is queued. It is higher, because the container must not lose time while its launches
 * wait. */
#define BUCKET_BUSY_CAP_NS (50 * MS)

/* Adds the GPU time that accrued since the last call, up to the largest balance. Several processes may call it at the
 * same time. */
void bucket_accrue(struct vgpu_tenant_device *device, uint64_t now, uint32_t rate_ppm, bool busy);
void bucket_charge(struct vgpu_tenant_device *device, uint64_t ns);
/* Replaces the charge `predicted` by the measured time `real`. */
void bucket_correct(struct vgpu_tenant_device *device, uint64_t predicted, uint64_t real);
int64_t bucket_balance(const struct vgpu_tenant_device *device);
/* Returns the predicted end of all queued work of the container. */
uint64_t bucket_busy_until(const struct vgpu_tenant_device *device);

/* --- pace -------------------------------------------------------------------------------------------- */

/* Largest amount of predicted work that may be queued, unless the arbiter (the node's scheduler of the GPU) sets a
 * lower one. */
#define PACE_OUTSTANDING_NS (4 * MS)

/* The inputs of the decision about one launch. */
struct pace_view {
    uint64_t now;
    uint64_t waited; /* waited: how long this launch has waited so far. */
    /* gate: value of enum vgpu_gate, which says whether the arbiter lets this container launch; NONE without an
     * arbiter. */
    uint32_t gate;
    uint32_t rate_ppm;
    /* turn_start, turn_end: the arbiter's turn (time slice) for this container. */
    uint64_t turn_start, turn_end;
    uint64_t outstanding_max; /* outstanding_max: largest amount of predicted work (ns) that may be queued. */
    uint64_t busy_until;      /* busy_until: predicted end of this process's queued work. */
    /* watches: true if this launch checks whether the GPU has finished this process's queued work. */
    bool watches;
    int64_t balance;
};

enum pace { PACE_GO, PACE_WAIT, PACE_WAIT_GATE };
/* Decides whether a launch may start. If not, *until is the time of the next check. After PACE_WAIT_GATE the caller
 * also checks as soon as the arbiter changes the gpu page (the arbiter's page with the gate and the turns). */
enum pace pace_decide(const struct pace_view *view, uint64_t cost, uint64_t *until);
/*
 * Returns the time (ns) after the start of this launch in which no other container uses the GPU. The measured time of
 * this launch is charged in full up to this time. 0: another container may use the GPU at any time. Without an arbiter
 * the time is unknown, and UINT64_MAX is returned. Then all measured time is charged, also the part in which another
 * container ran. So the container never gets more than its share, but it may get less.
 */
uint64_t pace_exclusive(const struct pace_view *view, uint32_t flags);

/*
 * Returns the part of the GPU's time (in millionths) that the container gets. Without an arbiter or with `force` it is
 * the container's share. With an arbiter it is the arbiter's rate, but never less than the share. The arbiter reads
 * the share in the limits file. The container's environment may have `lowered` the share, and the arbiter does not
 * know this. Then the arbiter's rate applies only while the gate is open.
 */
uint32_t pace_rate(uint32_t share_ppm, bool force, bool lowered, bool arbiter, const struct vgpu_gpu_page *page);

/* --- cost -------------------------------------------------------------------------------------------- */

#define COST_BITS 14u
#define COST_ENTRIES (1u << COST_BITS)
/* Assumed cost of a kernel that was never measured. It is high, so that few such kernels are queued at once. */
#define COST_UNKNOWN_NS (2 * MS)
/* An entry with this bit belongs to a kernel whose times vary, so that each of its launches is measured alone. */
#define COST_APART 0x80000000ull
#define COST_MOST_NS (COST_APART - 1)

struct costs {
    /* The low half of an entry is the key, the high half the cost in nanoseconds. Both are in one word, so that one
     * read gets a key and its cost together. */
    _Atomic uint64_t entry[COST_ENTRIES];
    /* Number of measured launches; it does not count beyond a few. */
    _Atomic uint32_t seen[COST_ENTRIES];
    /* Time (ns) of the longest launch, reduced a little at each later measured launch. */
    _Atomic uint32_t most[COST_ENTRIES];
};
/* Returns the key of a kernel's cost, computed from its function and the dimensions that vary most. Uses few
 * instructions (three additions with a shift). If two kernels get the same key, they share a predicted cost, but each
 * is finally charged its measured time. */
static inline uint32_t cost_key(const void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx)
{
    return (uint32_t)(uintptr_t)function ^ (((gx * 8 + gy) * 8 + gz) * 8 + bx) * 0x2c1b3c6du;
}
/* Returns the index of a key in the table. Keys that differ only in a few low bits get different indices, because
 * drivers place functions at addresses close to each other. */
static inline uint64_t cost_index(uint32_t key)
{
    return key * 0xc2b2ae35u >> (32 - COST_BITS);
}
/* Returns the index of a key's entry, and its cost in *ns. If the entry belongs to another key, it is replaced. *known
 * is true if the kernel was measured and its launches take about equally long. */
unsigned cost_find(struct costs *costs, uint32_t key, uint64_t *ns, bool *known);

/* --- segments ---------------------------------------------------------------------------------------- */

#define SEGMENT_LAUNCHES 64u
#define SEGMENT_NS (250 * US)
/* While the arbiter lets the container use the whole GPU at any time, nothing throttles it. Then segments may be longer
 * by this factor, and so may the pause that ends a segment. Longer segments need fewer fences, and each fence costs
 * time of the host and of the GPU: on an H200 a program of short kernels that fenced every second launch ran at half
 * its speed. */
#define SEGMENT_OPEN 8u
/* Returns the predicted work (ns) after which a segment ends. An unfinished segment is not charged yet, so it may
 * contain at most half of the work that may be queued. */
static inline uint64_t segment_longest(bool open, uint64_t outstanding_max)
{
    uint64_t half = outstanding_max / 2, longest = SEGMENT_NS * (open ? SEGMENT_OPEN : 1);
    return half >= longest ? longest : half > SEGMENT_NS ? half : SEGMENT_NS;
}

struct segment {
    /* Predicted GPU time of all launches of the segment. */
    uint64_t predicted;
    /* Number of launches. */
    uint64_t count;
    /* True if the segment should have ended and goes on, because too many fences are open. Then the kernels of its
     * launches are not recorded, and `count` is that of a full segment. */
    bool prolonged;
    /* Part of `predicted` that is charged already. 0 unless the segment is prolonged. */
    uint64_t charged;
    /* True if the kernel of every launch was measured before. */
    bool known;
    /* Time from the begin event to the last launch. The stream can have been idle for at most this time. */
    uint64_t host_ns;
    /* For this time after the segment's begin no other container uses the GPU. 0 means that another one may use it at
     * any time. */
    uint64_t exclusive_ns;
    /* Index of each launch's kernel in the table of costs. */
    uint16_t items[SEGMENT_LAUNCHES + 1]; /* One extra item, for a launch into a full segment. */
};
/*
 * Returns true if the processor's counter must be read before this launch, to find out whether the stream was idle and
 * whether the segment has become too long. A reading costs several times as much as the rest of a launch, so only one
 * in four launches of short kernels makes it. If a pause is missed for this reason, at most 15 microseconds of work
 * start without a check.
 */
#define SEGMENT_LOOK_NS (5 * US)
#define SEGMENT_LOOK_LAUNCHES 4u
static inline bool segment_looks(uint64_t count, uint64_t cost)
{
    return count % SEGMENT_LOOK_LAUNCHES == 0 || cost >= SEGMENT_LOOK_NS;
}
static inline void segment_start(struct segment *segment)
{
    segment->predicted = 0;
    segment->count = 0;
    segment->prolonged = false;
    segment->charged = 0;
    segment->known = true;
    segment->host_ns = 0;
    segment->exclusive_ns = 0;
}
static inline void segment_add(struct segment *segment, unsigned item, uint64_t ns)
{
    segment->predicted += ns;
    if (!segment->prolonged)
        segment->items[segment->count++] = (uint16_t)item;
}
/* Lets a segment go on that was charged just now. */
static inline void segment_prolong(struct segment *segment)
{
    segment->prolonged = true;
    segment->charged = segment->predicted;
    segment->count = SEGMENT_LAUNCHES;
}

/* State for the charges of one context. The streams of a context can run at the same time, and time in which several of
 * them run is counted once. */
struct settler {
    uint64_t frontier; /* frontier: point in time up to which GPU time has been counted. */
    /* carry: 0 or negative. Some past charges exceeded the minimum charge, for segments during which another container
     * may have run. `carry` is minus this excess, and it lowers the minimum of later charges. */
    int64_t carry;
};
/* Returns the charge of a finished segment and updates `costs`. `begin` and `end` are measured from the same start. */
uint64_t segment_settle(struct costs *costs, struct settler *settler, const struct segment *segment, uint64_t begin,
                        uint64_t end);

/* --- wake-ups of the settling thread ------------------------------------------------------------------- */

#define FENCE_SOON_NS (50 * US)
/* Longest time between two checks of work that should have finished before. */
#define FENCE_POLL_NS (2 * MS)
/* Time between two checks while a program keeps launching work. */
#define FENCE_LOOK_NS (4 * MS)
/* Shortest time between two checks by threads of the program that wait for their launches. */
#define FENCE_HELP_NS (1 * MS)

/* On average the settling thread may wake once in this time. */
#define WAKE_EVERY_NS (10 * MS)
/* Number of times that the thread may wake in a row without waiting for that time. */
#define WAKE_BURST 8u
struct wakes {
    /* Each wake-up uses up one interval of WAKE_EVERY_NS. `paid` is the end of the last interval that was used up. */
    uint64_t paid;
};
/* Returns the earliest time at which the thread may wake next. */
static inline uint64_t wakes_from(const struct wakes *wakes)
{
    return wakes->paid > WAKE_BURST * WAKE_EVERY_NS ? wakes->paid - WAKE_BURST * WAKE_EVERY_NS : 0;
}
/* Returns when the thread may wake if it wants to wake at `wanted`, and uses up an interval for that. */
static inline uint64_t wakes_take(struct wakes *wakes, uint64_t wanted)
{
    uint64_t at = wanted > wakes_from(wakes) ? wanted : wakes_from(wakes);
    wakes->paid = (wakes->paid > at ? wakes->paid : at) + WAKE_EVERY_NS;
    return at;
}

#endif
