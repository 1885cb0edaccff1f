/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The arithmetic of the compute limiter. Nothing here reads a clock or calls a driver: time is an argument, so the same
 * object code runs in the library and in the model of the tests (tests/native/vcuda/model). Times and device times are
 * nanoseconds.
 *
 * bucket: what a container may still use; time fills it at a rate, device time empties it.
 *
 * pace: whether a launch may go now, and if not, when to ask again.
 *
 * cost: the device time of a kernel, learned from segments.
 *
 * segment: the launches between two fences of one stream, corrected by their measured time.
 *
 * wakes: how often the settling thread may wake.
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

#define BUCKET_CAP_NS (5 * MS)       /* The most that an idle container may save up. */
#define BUCKET_BUSY_CAP_NS (50 * MS) /* The same while work is queued: time spent waiting must not be lost. */

/* Adds the time that accrued since the last call, up to the cap. Any number of processes may call it at once. */
void bucket_accrue(struct vgpu_tenant_device *device, uint64_t now, uint32_t rate_ppm, bool busy);
void bucket_charge(struct vgpu_tenant_device *device, uint64_t ns);
/* Replaces the charged `predicted` by the measured `real`. */
void bucket_correct(struct vgpu_tenant_device *device, uint64_t predicted, uint64_t real);
int64_t bucket_balance(const struct vgpu_tenant_device *device);
/* Returns the predicted end of all queued work of the container. */
uint64_t bucket_busy_until(const struct vgpu_tenant_device *device);

/* --- pace -------------------------------------------------------------------------------------------- */

#define PACE_OUTSTANDING_NS (4 * MS) /* predicted work that may be queued unless the arbiter sets a lower maximum */

/* The inputs of the decision about one launch. */
struct pace_view {
    uint64_t now;
    uint64_t waited; /* Time that this launch has waited. */
    uint32_t gate; /* enum vgpu_gate; NONE: no arbiter. */
    uint32_t rate_ppm;
    uint64_t turn_start, turn_end;
    uint64_t outstanding_max; /* ns */
    uint64_t busy_until;      /* predicted end of this process's work. */
    bool watches;             /* This launch polls whether the GPU has finished the process's queued work. */
    int64_t balance;
};

enum pace { PACE_GO, PACE_WAIT, PACE_WAIT_GATE };
/* Decides whether a launch may go. *until: when to ask again. PACE_WAIT_GATE: ask again also when the gpu page's
 * `wake` changes. */
enum pace pace_decide(const struct pace_view *view, uint64_t cost, uint64_t *until);
/*
 * Returns for how long after the start of this launch no other tenant runs; 0: another tenant may run at any time.
 * Without an arbiter this is unknown and the measured time is charged, so a container never gets more than its share,
 * and less if another one is busy.
 */
uint64_t pace_exclusive(const struct pace_view *view, uint32_t flags);

/*
 * Returns the rate that applies: the arbiter's rate if there is one, but never less than the container's share. With
 * `force` it is the share. It is also the share if the environment has `lowered` the share, unless the tenant is alone,
 * because the arbiter uses the limits file.
 */
uint32_t pace_rate(uint32_t share_ppm, bool force, bool lowered, bool arbiter, const struct vgpu_gpu_page *page);

/* --- cost -------------------------------------------------------------------------------------------- */

#define COST_BITS 14u
#define COST_ENTRIES (1u << COST_BITS)
/* the assumed cost of a kernel that was never measured; so few of them are queued at once */
#define COST_UNKNOWN_NS (2 * MS)
#define COST_APART 0x80000000ull /* bit in an entry's nanoseconds: measure each launch of this kernel */
#define COST_MOST_NS (COST_APART - 1)

struct costs {
    _Atomic uint64_t entry[COST_ENTRIES]; /* low half: the key; high half: nanoseconds; a launch reads both at once */
    _Atomic uint32_t seen[COST_ENTRIES];
    _Atomic uint32_t most[COST_ENTRIES]; /* ns of the longest launch, reduced a little at each later launch */
};
/* The key of a kernel's cost: its function and the dimensions that vary most, with few instructions (three additions
 * with a shift). Two kernels with the same key share a cost, but are still settled by their measured time. */
static inline uint32_t cost_key(const void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx)
{
    return (uint32_t)(uintptr_t)function ^ (((gx * 8 + gy) * 8 + gz) * 8 + bx) * 0x2c1b3c6du;
}
/* Drivers place functions at near addresses, so keys that differ only in a few low bits must get different indices. */
static inline uint64_t cost_index(uint32_t key)
{
    return key * 0xc2b2ae35u >> (32 - COST_BITS);
}
/* Returns the entry of a key; replaces an entry of another key. *known: the kernel was measured, and its launches
 * take about equally long. */
unsigned cost_find(struct costs *costs, uint32_t key, uint64_t *ns, bool *known);

/* --- segments ---------------------------------------------------------------------------------------- */

#define SEGMENT_LAUNCHES 64u
#define SEGMENT_NS (250 * US)

struct segment {
    uint64_t predicted;
    uint64_t count;
    bool known;     /* All its launches were measured before. */
    bool begun;     /* The segment has its own begin event, so earlier host time is not included. */
    uint64_t host_ns; /* From the begin event to the last launch: at most so long its stream may have been idle. */
    /* For so long from the segment's begin no other tenant runs; 0: another tenant may run at any time. */
    uint64_t exclusive_ns;
    uint16_t items[SEGMENT_LAUNCHES + 1]; /* one extra item, for the launch that finds the segment full */
};
/*
 * Returns true if the clock must be read before this launch. Reading it costs several times the rest of a launch, so
 * only one in four launches of short kernels does. After an unnoticed pause at most 15 microseconds of work go
 * unchecked. This check also bounds the segment.
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
    segment->begun = false;
    segment->host_ns = 0;
    segment->exclusive_ns = 0;
}
static inline void segment_add(struct segment *segment, unsigned item, uint64_t ns)
{
    segment->items[segment->count++] = (uint16_t)item;
    segment->predicted += ns;
}

/* One per context: the streams of one context overlap, and time when several run is counted once. */
struct settler {
    uint64_t frontier; /* device time up to this point has been counted. */
    /* For segments while another tenant ran: the charge above the minimum, as a value of at most 0. */
    int64_t carry;
};
/* Returns the charge of a finished segment and updates `costs`. begin and end are on one time base. */
uint64_t segment_settle(struct costs *costs, struct settler *settler, const struct segment *segment, uint64_t begin,
                        uint64_t end);

/* --- wake-ups of the settling thread ------------------------------------------------------------------- */

#define FENCE_SOON_NS (50 * US)
#define FENCE_POLL_NS (2 * MS) /* Longest time between two polls of overdue work. */
#define FENCE_LOOK_NS (4 * MS) /* Time between two polls of a queue that is refilled repeatedly. */
#define FENCE_HELP_NS (1 * MS) /* Time between two polls by a program that repeatedly waits for its launches. */

/* Average time between wake-ups, and the number allowed in a burst. */
#define WAKE_EVERY_NS (10 * MS)
#define WAKE_BURST 8u
struct wakes {
    uint64_t paid; /* the time up to which wake-ups have been used */
};
/* Returns the earliest time of the next wake-up. */
static inline uint64_t wakes_from(const struct wakes *wakes)
{
    return wakes->paid > WAKE_BURST * WAKE_EVERY_NS ? wakes->paid - WAKE_BURST * WAKE_EVERY_NS : 0;
}
/* Returns when a thread may wake that wants to wake at `wanted`, and counts that wake-up as used. */
static inline uint64_t wakes_take(struct wakes *wakes, uint64_t wanted)
{
    uint64_t at = wanted > wakes_from(wakes) ? wanted : wakes_from(wakes);
    wakes->paid = (wakes->paid > at ? wakes->paid : at) + WAKE_EVERY_NS;
    return at;
}

#endif
