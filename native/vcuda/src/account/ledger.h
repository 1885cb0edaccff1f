/* SPDX-License-Identifier: Apache-2.0 */
/* Private to ledger.c, ledger_*.c, seats.c and shareable.c. */
#ifndef VGPU_LEDGER_H
#define VGPU_LEDGER_H

#include "account.h"

#pragma GCC visibility push(hidden)

/* This process's part in the ledger of a share; all zero before it joins. */
struct membership {
    _Atomic bool joined; /* of the first alone, and last to be set: what follows is complete, in all of them */
    unsigned share;      /* its place among the shares */
    struct vgpu_ledger *map;
    struct vgpu_ledger_slot *mine;
    uint32_t slot;
    char path[256];
    uint64_t file[2]; /* the mapped file's device and inode: its name may come to mean another file */
    _Atomic uint64_t owed[2][VGPU_MAX_DEVICES]; /* uncharges that found the lock held too long */
    uint64_t exported[VGPU_LEDGER_EXPORTED_DEVICES];
    uint64_t reaped_ns;
    uint64_t own[2][VGPU_MAX_DEVICES]; /* of cards without the short way: as `own` of counters, of this share alone */
};
/* The first is the only one of a container that has one share. */
extern struct membership ledger_members[VGPU_MAX_SHARES];

static inline struct vgpu_ledger_slot *ledger_slot(struct vgpu_ledger *ledger, uint32_t slot)
{
    return (struct vgpu_ledger_slot *)((char *)ledger + VGPU_LEDGER_SLOT_OFFSET) + slot;
}
static inline uint32_t ledger_high(const struct vgpu_ledger *ledger)
{
    uint32_t high = __atomic_load_n(&ledger->slot_high, __ATOMIC_RELAXED);
    return high < VGPU_LEDGER_SLOTS ? high : VGPU_LEDGER_SLOTS;
}

static inline struct ledger_key *ledger_key_of(const struct membership *member)
{
    return &ledger_keys[member->share];
}
/* false: a live holder has kept it for seconds (stopped, or frozen). Nothing waits longer than that. */
bool ledger_lock_wait(struct membership *member);
static inline bool ledger_lock_take(struct membership *member)
{
    return __builtin_expect(key_try(ledger_key_of(member)), 1) || ledger_lock_wait(member);
}
static inline void ledger_lock_drop(const struct membership *member)
{
    key_drop(ledger_key_of(member));
}
/* Lock held: total from the slots; slots of dead processes cleared first. */
void ledger_recount(struct membership *member);
void ledger_reap(struct membership *member);
uint64_t ledger_clock(void);
/* From now on this device, which is that of the first ledger, has the short way. */
void ledger_open_short_way(int device, int at);

int ledger_device_index(const struct vgpu_ledger *ledger, const char *uuid);
/* Inode of this process's pid namespace, 0 where /proc does not tell. */
uint64_t ledger_pid_namespace(void);
/* What the living hold, for a process without a slot of its own: nothing may be repaired. */
bool ledger_view_total(const char *uuid, uint64_t *bytes);
uint64_t ledger_view_beyond(const char *uuid);

/* --- ledger_file.c: the file itself ------------------------------------------------------------------ */

/* Opens, lays out if empty, checks. A descriptor, or -1 after a line on stderr. */
int ledger_file_open(const char *path, unsigned share, bool write);
bool ledger_header_ok(const struct vgpu_ledger *ledger);
/* 1 a process holds the byte, 0 nobody does, -1 cannot be known. */
int ledger_byte_held(int descriptor, uint64_t byte);
bool ledger_byte_take(int descriptor, uint64_t byte);

/* The mapped file again, by its name; -1 where that is another file now: about its locks nothing can be known. */
int ledger_file_again(const struct membership *member, bool write);
bool ledger_file_identity(int descriptor, uint64_t file[2]);
void ledger_byte_drop(int descriptor, uint64_t byte);
bool ledger_byte_share(int descriptor, uint64_t byte); /* by any number of processes */
int ledger_range_held(int descriptor, uint64_t first, uint64_t count); /* as ledger_byte_held, for any of them */
/* --- seats.c: containers with several shares ---------------------------------------------------------- */

/* A device's place in the ledger of one share. */
struct seat {
    struct membership *member;
    int at;
};
void seats_begin(unsigned shares);
/* The index of a device, entered where it is new; -1: no room. The caller keeps others out. */
int seats_add(const char *uuid);
extern bool ledger_several; /* this container has several shares */
int seats_search(const char *uuid);
static inline int seats_find(const char *uuid) /* -1: not entered */
{
    return ledger_several ? seats_search(uuid) : ledger_device_index(ledger_members[0].map, uuid);
}
uint64_t seats_total(int device);
/* The seats of a device, one at least; the first is where what belongs to the device alone is kept. */
const struct seat *seats_of(int device, unsigned *count);
static inline struct seat seats_home(int device)
{
    unsigned count;
    return seats_of(device, &count)[0];
}
/* Whether the device has no short way; then the next two charge it. */
bool seats_several(int device);
enum charge seats_charge(int device, enum account account, uint64_t bytes, uint64_t limit);
void seats_uncharge(int device, enum account account, uint64_t bytes);
void seats_reset(void);

/* --- shareable.c: descriptors that stand for device memory ------------------------------------------------ */

/* Is any handle open that a process of this ledger, a file of that device and inode, made? Also where it cannot be known. */
bool shareable_any(const struct vgpu_ledger *ledger, const uint64_t identity[2]);

/* Of a dead process's slot: is memory of it still open in another process, and how much of a device's is charged as long. */
bool ledger_slot_exported(int descriptor, const struct vgpu_ledger *ledger, const struct vgpu_ledger_slot *slot);
uint64_t ledger_slot_exported_bytes(const struct vgpu_ledger_slot *slot, int device);

#pragma GCC visibility pop

#endif
