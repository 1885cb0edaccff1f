/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The arithmetic of the compute limiter. Nothing here reads a clock or calls a driver: time is an argument, so the same
 * object code runs in the library and in the model of the tests (tests/native/vcuda/model). Times and device times are
 * nanoseconds.
 *
 *   bucket   what a container may still use: filled by time at a rate, emptied by device time
 *   pace     may this launch go now, and if not, when to ask again
 *   cost     what a kernel takes, learned from segments
 *   segment  launches between two fences of one stream; settled by what they really took
 *   wakes    how often the thread that settles may wake
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

#define BUCKET_CAP_NS (5 * MS)       /* what an idle container may save up */
#define BUCKET_BUSY_CAP_NS (50 * MS) /* the same while work is queued: time that it was waiting for must not be lost */

/* Adds what came due since the last call, up to the cap. Any number of processes may call it at once. */
void bucket_accrue(struct vgpu_tenant_device *device, uint64_t now, uint32_t rate_ppm, bool busy);
void bucket_charge(struct vgpu_tenant_device *device, uint64_t ns);
/* The `predicted` that was charged was really `real`. */
void bucket_correct(struct vgpu_tenant_device *device, uint64_t predicted, uint64_t real);
int64_t bucket_balance(const struct vgpu_tenant_device *device);
/* The end of all queued work of the container, as predicted. */
uint64_t bucket_busy_until(const struct vgpu_tenant_device *device);

/* --- pace -------------------------------------------------------------------------------------------- */

#define PACE_OUTSTANDING_NS (4 * MS) /* so much predicted work may be queued where nobody says less */

/* What is known at the moment of a launch. */
struct pace_view {
    uint64_t now;
    uint64_t waited; /* by this launch */
    uint32_t gate; /* enum vgpu_gate; NONE: no arbiter */
    uint32_t rate_ppm;
    uint64_t turn_start, turn_end;
    uint64_t outstanding_max; /* ns */
    uint64_t busy_until;      /* of this process */
    bool watches;             /* it is this launch that looks when the GPU has done what the process had queued */
    int64_t balance;
};

enum pace { PACE_GO, PACE_WAIT, PACE_WAIT_GATE };
/* *until: when to ask again. WAIT_GATE: or when the gpu page's `wake` changes. */
enum pace pace_decide(const struct pace_view *view, uint64_t cost, uint64_t *until);
/*
 * How long nobody else runs from the begin of what is launched now; 0: somebody runs all the time. Without an arbiter nobody
 * knows, and what was measured is charged: a container never gets more than its share for it, and less next to a busy one.
 */
uint64_t pace_exclusive(const struct pace_view *view, uint32_t flags);

/*
 * The rate that rules: the arbiter's if it speaks, never less than the own share; `force` keeps to the share. So does a share
 * that the environment has `lowered`, unless the tenant is alone: the arbiter counts by the limits file.
 */
uint32_t pace_rate(uint32_t share_ppm, bool force, bool lowered, bool arbiter, const struct vgpu_gpu_page *page);

/* --- cost -------------------------------------------------------------------------------------------- */

#define COST_BITS 14u
#define COST_ENTRIES (1u << COST_BITS)
#define COST_UNKNOWN_NS (2 * MS) /* what a kernel is taken for that was never measured: few of them are queued at once */
#define COST_APART 0x80000000ull /* in an entry's nanoseconds: each of its launches is to be measured */
#define COST_MOST_NS (COST_APART - 1)

struct costs {
    _Atomic uint64_t entry[COST_ENTRIES]; /* the key below, the nanoseconds above: a launch reads both at once */
    _Atomic uint32_t seen[COST_ENTRIES];
    _Atomic uint32_t most[COST_ENTRIES]; /* ns that the longest launch took, less with each one since */
};
/* The key of a kernel's cost: its function and the parts of its shape that vary most (every instruction counts here: three
 * additions with a shift). Two that collide are taken for one, and settled by what they took all the same. */
static inline uint32_t cost_key(const void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx)
{
    return (uint32_t)(uintptr_t)function ^ (((gx * 8 + gy) * 8 + gz) * 8 + bx) * 0x2c1b3c6du;
}
/* Drivers give functions that lie near each other: keys that differ in a few low bits must not meet. */
static inline uint64_t cost_index(uint32_t key)
{
    return key * 0xc2b2ae35u >> (32 - COST_BITS);
}
/* The entry of a key, made new if another key had it. *known: it has been measured, and takes about as long each time. */
unsigned cost_find(struct costs *costs, uint32_t key, uint64_t *ns, bool *known);

/* --- segments ---------------------------------------------------------------------------------------- */

#define SEGMENT_LAUNCHES 64u
#define SEGMENT_NS (250 * US)

struct segment {
    uint64_t predicted;
    uint64_t count;
    bool known;     /* all its launches had been measured before */
    bool begun;     /* it has a begin event of its own: no time of the host before it is in it */
    uint64_t host_ns; /* from its begin event to its last launch: so long its stream may have had nothing to run */
    uint64_t exclusive_ns; /* from its begin on nobody else runs for so long; 0: somebody runs all the time */
    uint16_t items[SEGMENT_LAUNCHES + 1]; /* one more, for the launch that finds it full */
};
/*
 * Is the clock to be looked at before this launch? A reading costs several times as much as all else of a launch, so one of
 * four launches of short kernels pays for it: after a pause that nobody has seen, no more than 15 microseconds of work go
 * unasked. What looks also bounds the segment.
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

/* Per context: streams of one context overlap, and what runs at once is counted once. */
struct settler {
    uint64_t frontier; /* up to here device time has been counted */
    int64_t carry;     /* of segments while somebody else ran all the time: what was charged over the least (never above 0) */
};
/* What a finished segment is charged; teaches `costs`. begin and end are on one time base. */
uint64_t segment_settle(struct costs *costs, struct settler *settler, const struct segment *segment, uint64_t begin,
                        uint64_t end);

/* --- wake-ups of the thread that settles --------------------------------------------------------------- */

#define FENCE_SOON_NS (50 * US)
#define FENCE_POLL_NS (2 * MS) /* the longest between two looks at what should be done */
#define FENCE_LOOK_NS (4 * MS) /* between two looks at a queue that is filled again and again */
#define FENCE_HELP_NS (1 * MS) /* between two looks of a program that waits for what it launched, again and again */

/* So far apart on average, and so many at once. */
#define WAKE_EVERY_NS (10 * MS)
#define WAKE_BURST 8u
struct wakes {
    uint64_t paid; /* up to then wake-ups have been used */
};
/* An earlier one is not allowed. */
static inline uint64_t wakes_from(const struct wakes *wakes)
{
    return wakes->paid > WAKE_BURST * WAKE_EVERY_NS ? wakes->paid - WAKE_BURST * WAKE_EVERY_NS : 0;
}
/* When the thread may wake that wants to at `wanted`; that wake-up is taken for used. */
static inline uint64_t wakes_take(struct wakes *wakes, uint64_t wanted)
{
    uint64_t at = wanted > wakes_from(wakes) ? wanted : wakes_from(wakes);
    wakes->paid = (wakes->paid > at ? wakes->paid : at) + WAKE_EVERY_NS;
    return at;
}

#endif
