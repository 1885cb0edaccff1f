/* SPDX-License-Identifier: Apache-2.0 */
/* Private to ledger.c, ledger_*.c and shareable.c. */
#ifndef VGPU_LEDGER_H
#define VGPU_LEDGER_H

#include "account.h"

#pragma GCC visibility push(hidden)

/* This process's part in the ledger; all zero before it joins. */
struct membership {
    _Atomic bool joined; /* last to be set: what follows is complete */
    struct vgpu_ledger *map;
    struct vgpu_ledger_slot *mine;
    uint32_t slot;
    char path[256];
    uint64_t file[2]; /* the mapped file's device and inode: its name may come to mean another file */
    _Atomic uint64_t owed[2][VGPU_MAX_DEVICES]; /* uncharges that found the lock held too long */
    uint64_t exported[VGPU_LEDGER_EXPORTED_DEVICES];
    uint64_t reaped_ns;
};
extern struct membership ledger_self;

static inline struct vgpu_ledger_slot *ledger_slot(struct vgpu_ledger *ledger, uint32_t slot)
{
    return (struct vgpu_ledger_slot *)((char *)ledger + VGPU_LEDGER_SLOT_OFFSET) + slot;
}
static inline uint32_t ledger_high(const struct vgpu_ledger *ledger)
{
    uint32_t high = __atomic_load_n(&ledger->slot_high, __ATOMIC_RELAXED);
    return high < VGPU_LEDGER_SLOTS ? high : VGPU_LEDGER_SLOTS;
}

/* false: a live holder has kept it for seconds (stopped, or frozen). Nothing waits longer than that. */
bool ledger_lock_wait(void);
static inline bool ledger_lock_take(void)
{
    return __builtin_expect(ledger_lock_try(), 1) || ledger_lock_wait();
}
/* Lock held: total from the slots; slots of dead processes cleared first. */
void ledger_recount(void);
void ledger_reap(void);
uint64_t ledger_clock(void);

int ledger_device_index(const struct vgpu_ledger *ledger, const char *uuid);
/* Inode of this process's pid namespace, 0 where /proc does not tell. */
uint64_t ledger_pid_namespace(void);
/* What the living hold, for a process without a slot of its own: nothing may be repaired. */
bool ledger_view_total(const char *uuid, uint64_t *bytes);
uint64_t ledger_view_beyond(const char *uuid);

/* --- ledger_file.c: the file itself ------------------------------------------------------------------ */

/* Opens, lays out if empty, checks. A descriptor, or -1 after a line on stderr. */
int ledger_file_open(const char *path, bool write);
bool ledger_header_ok(const struct vgpu_ledger *ledger);
/* 1 a process holds the byte, 0 nobody does, -1 cannot be known. */
int ledger_byte_held(int descriptor, uint64_t byte);
bool ledger_byte_take(int descriptor, uint64_t byte);

/* The mapped file again, by its name; -1 where that is another file now: about its locks nothing can be known. */
int ledger_file_again(bool write);
bool ledger_file_identity(int descriptor, uint64_t file[2]);
void ledger_byte_drop(int descriptor, uint64_t byte);
bool ledger_byte_share(int descriptor, uint64_t byte); /* by any number of processes */
int ledger_range_held(int descriptor, uint64_t first, uint64_t count); /* as ledger_byte_held, for any of them */
/* --- shareable.c: descriptors that stand for device memory ------------------------------------------------ */

/* Is any handle open that a process of this ledger, a file of that device and inode, made? Also where it cannot be known. */
bool shareable_any(const struct vgpu_ledger *ledger, const uint64_t identity[2]);

/* Of a dead process's slot: is memory of it still open in another process, and how much of a device's is charged as long. */
bool ledger_slot_exported(int descriptor, const struct vgpu_ledger *ledger, const struct vgpu_ledger_slot *slot);
uint64_t ledger_slot_exported_bytes(const struct vgpu_ledger_slot *slot, int device);

#pragma GCC visibility pop

#endif
