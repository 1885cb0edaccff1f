/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The arithmetic of the compute limiter. This code reads no clock and calls no driver: time is an argument. So the same
 * object code runs in the library and in the tests' model (tests/native/vcuda/model). All times are in nanoseconds.
 *
 * bucket: the GPU time that a container may still use. The bucket fills with time, and kernels empty it.
 *
 * pace: decides whether a launch may start now, and if not, when to check again.
 *
 * cost: the GPU time of a kernel, learned from segments.
 *
 * segment: the launches between two fences of one stream. Its measured time replaces the predicted time.
 *
 * wakes: limits how often the settling thread wakes.
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

/* Largest balance of an idle container. */
#define BUCKET_CAP_NS (5 * MS)
/* Largest balance while work is queued: the container must not lose time while its launches wait. */
#define BUCKET_BUSY_CAP_NS (50 * MS)

/* Adds the time that accrued since the last call, up to the cap. Any number of processes may call it at once. */
void bucket_accrue(struct vgpu_tenant_device *device, uint64_t now, uint32_t rate_ppm, bool busy);
void bucket_charge(struct vgpu_tenant_device *device, uint64_t ns);
/* Replaces the charged `predicted` by the measured `real`. */
void bucket_correct(struct vgpu_tenant_device *device, uint64_t predicted, uint64_t real);
int64_t bucket_balance(const struct vgpu_tenant_device *device);
/* Returns the predicted end of all queued work of the container. */
uint64_t bucket_busy_until(const struct vgpu_tenant_device *device);

/* --- pace -------------------------------------------------------------------------------------------- */

#define PACE_OUTSTANDING_NS (4 * MS) /* Predicted work that may be queued, unless the arbiter sets a lower maximum. */

/* The inputs of the decision about one launch. */
struct pace_view {
    uint64_t now;
    uint64_t waited; /* waited: time that this launch has waited so far. */
    uint32_t gate;   /* gate: a value of enum vgpu_gate; NONE if there is no arbiter. */
    uint32_t rate_ppm;
    uint64_t turn_start, turn_end;
    uint64_t outstanding_max; /* outstanding_max: predicted work (ns) that may be queued. */
    uint64_t busy_until;      /* busy_until: predicted end of this process's work. */
    bool watches;             /* watches: this launch checks whether the GPU has finished the process's queued work. */
    int64_t balance;
};

enum pace { PACE_GO, PACE_WAIT, PACE_WAIT_GATE };
/* Decides whether a launch may start. *until is the time of the next check. After PACE_WAIT_GATE the caller also checks
 * when the gpu page's `wake` changes. */
enum pace pace_decide(const struct pace_view *view, uint64_t cost, uint64_t *until);
/*
 * Returns for how long after the start of this launch no other tenant runs; 0: another tenant may run at any time.
 * Without an arbiter this is unknown and the measured time is charged, so a container never gets more than its share,
 * and less if another one is busy.
 */
uint64_t pace_exclusive(const struct pace_view *view, uint32_t flags);

/*
 * Returns the rate that applies. Without an arbiter or with `force` it is the container's share. Otherwise it is the
 * arbiter's rate, but never less than the share. If the environment has `lowered` the share, the arbiter's rate applies
 * only while the gate is open, because the arbiter uses the share of the limits file.
 */
uint32_t pace_rate(uint32_t share_ppm, bool force, bool lowered, bool arbiter, const struct vgpu_gpu_page *page);

/* --- cost -------------------------------------------------------------------------------------------- */

#define COST_BITS 14u
#define COST_ENTRIES (1u << COST_BITS)
/* Assumed cost of a kernel that was never measured. It is high, so that few such kernels are queued at once. */
#define COST_UNKNOWN_NS (2 * MS)
/* This bit in an entry's nanoseconds means that each launch of the kernel is measured. */
#define COST_APART 0x80000000ull
#define COST_MOST_NS (COST_APART - 1)

struct costs {
    /* The low half of an entry is the key, the high half the cost in nanoseconds. They are one word, so that a launch
     * reads both at once. */
    _Atomic uint64_t entry[COST_ENTRIES];
    _Atomic uint32_t seen[COST_ENTRIES];
    /* Time (ns) of the longest launch, reduced a little at each later launch. */
    _Atomic uint32_t most[COST_ENTRIES];
};
/* Returns the key of a kernel's cost, from its function and the dimensions that vary most. Uses few instructions
 * (three additions with a shift). Two kernels with the same key share a predicted cost, but each is finally charged
 * its measured time. */
static inline uint32_t cost_key(const void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx)
{
    return (uint32_t)(uintptr_t)function ^ (((gx * 8 + gy) * 8 + gz) * 8 + bx) * 0x2c1b3c6du;
}
/* Returns the index of a key. Keys that differ only in a few low bits get different indices, because drivers place
 * functions at near addresses. */
static inline uint64_t cost_index(uint32_t key)
{
    return key * 0xc2b2ae35u >> (32 - COST_BITS);
}
/* Returns the entry of a key; replaces an entry of another key. *known is true if the kernel was measured and its
 * launches take about equally long. */
unsigned cost_find(struct costs *costs, uint32_t key, uint64_t *ns, bool *known);

/* --- segments ---------------------------------------------------------------------------------------- */

#define SEGMENT_LAUNCHES 64u
#define SEGMENT_NS (250 * US)
/* While the gate is open at full rate, nothing throttles the container. Then segments are longer by this factor, and so
 * is the pause that ends one. Each fence costs time of the host and of the GPU: on an H200 a program of short kernels
 * that fenced every second launch ran at half its speed. */
#define SEGMENT_OPEN 8u
/* Returns the predicted work (ns) after which a segment ends. An open segment is not charged yet, so it may add at most
 * half of the work that may be queued. */
static inline uint64_t segment_longest(bool open, uint64_t outstanding_max)
{
    uint64_t half = outstanding_max / 2, longest = SEGMENT_NS * (open ? SEGMENT_OPEN : 1);
    return half >= longest ? longest : half > SEGMENT_NS ? half : SEGMENT_NS;
}

struct segment {
    uint64_t predicted;
    uint64_t count;
    /* True if the kernel of every launch was measured before. */
    bool known;
    /* Time from the begin event to the last launch. The stream may have been idle for at most this time. */
    uint64_t host_ns;
    /* For this time after the segment's begin no other tenant runs. 0 means that another tenant may run at any time. */
    uint64_t exclusive_ns;
    uint16_t items[SEGMENT_LAUNCHES + 1]; /* One extra item, for a launch into a full segment. */
};
/*
 * Returns true if the clock must be read before this launch. Reading the clock costs several times the rest of a
 * launch, so only one in four launches of short kernels reads it. After an unnoticed pause, at most 15 microseconds of
 * work start without a check. The check also limits the length of the segment.
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
    segment->known = true;
    segment->host_ns = 0;
    segment->exclusive_ns = 0;
}
static inline void segment_add(struct segment *segment, unsigned item, uint64_t ns)
{
    segment->items[segment->count++] = (uint16_t)item;
    segment->predicted += ns;
}

/* Each context has a settler: its streams overlap, and time in which several streams run is counted once. */
struct settler {
    uint64_t frontier; /* frontier: GPU time up to this point has been counted. */
    /* carry is 0 or negative. It is minus the part of past charges above the minimum, for segments during which another
     * tenant ran. */
    int64_t carry;
};
/* Returns the charge of a finished segment and updates `costs`. begin and end are on one time base. */
uint64_t segment_settle(struct costs *costs, struct settler *settler, const struct segment *segment, uint64_t begin,
                        uint64_t end);

/* --- wake-ups of the settling thread ------------------------------------------------------------------- */

#define FENCE_SOON_NS (50 * US)
/* Longest time between two polls of overdue work. */
#define FENCE_POLL_NS (2 * MS)
/* Time between two polls of a queue that is refilled repeatedly. */
#define FENCE_LOOK_NS (4 * MS)
/* Time between two polls by a program that repeatedly waits for its launches. */
#define FENCE_HELP_NS (1 * MS)

/* Average time between two wake-ups of the settling thread. */
#define WAKE_EVERY_NS (10 * MS)
/* Number of wake-ups that may follow each other without that pause. */
#define WAKE_BURST 8u
struct wakes {
    uint64_t paid; /* Each wake-up uses up an interval of WAKE_EVERY_NS. This is the end of the last interval. */
};
/* Returns the earliest time of the next wake-up. */
static inline uint64_t wakes_from(const struct wakes *wakes)
{
    return wakes->paid > WAKE_BURST * WAKE_EVERY_NS ? wakes->paid - WAKE_BURST * WAKE_EVERY_NS : 0;
}
/* Returns when a thread may wake if it has to wake at `wanted`, and counts that wake-up as used. */
static inline uint64_t wakes_take(struct wakes *wakes, uint64_t wanted)
{
    uint64_t at = wanted > wakes_from(wakes) ? wanted : wakes_from(wakes);
    wakes->paid = (wakes->paid > at ? wakes->paid : at) + WAKE_EVERY_NS;
    return at;
}

#endif
