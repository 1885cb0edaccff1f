/* SPDX-License-Identifier: Apache-2.0 */
/* The inside of the ledger, the file in which the processes of a container record their device memory. A process joins
 * the ledger by claiming a slot, its entry in the file. The fast path charges inline in the hooks (counters.h). Only
 * ledger.c, ledger_*.c, seats.c and shareable.c include this header. */
#ifndef VGPU_LEDGER_H
#define VGPU_LEDGER_H

#include "account.h"

#pragma GCC visibility push(hidden)

/* This process's membership in the ledger of one share (one allocation of the container). All fields are zero before
 * the process joins. */
struct membership {
    /* Only the first entry uses this field. It is set last, when this process has joined the ledgers of all shares. */
    _Atomic bool joined;
    unsigned share; /* The position of the share among the container's shares. */
    struct vgpu_ledger *map;
    struct vgpu_ledger_slot *mine;
    uint32_t slot;
    char path[256];
    /* Device and inode of the mapped file, because its name may later refer to another file. */
    uint64_t file[2];
    /* Bytes of uncharges that are pending because the lock was not obtained in time. */
    _Atomic uint64_t owed[2][VGPU_MAX_DEVICES];
    /* Bytes that other processes may have open, by device. */
    uint64_t exported[VGPU_LEDGER_EXPORTED_DEVICES];
    /* Time of the last ledger_reap. */
    uint64_t reaped_ns;
    /* What this process is charged in this ledger, for GPUs without the fast path. For the other GPUs this figure is in
     * struct counters. */
    uint64_t own[2][VGPU_MAX_DEVICES];
};
/* A container with one share uses only the first entry. */
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
/* Waits for the lock. Returns false if a live but stopped or frozen process has held it for five seconds. */
bool ledger_lock_wait(struct membership *member);
static inline bool ledger_lock_take(struct membership *member)
{
    return __builtin_expect(key_try(ledger_key_of(member)), 1) || ledger_lock_wait(member);
}
static inline void ledger_lock_drop(const struct membership *member)
{
    key_drop(ledger_key_of(member));
}
/* ledger_recount computes the totals from the slots of all processes. ledger_reap first clears the slots of dead
 * processes. The caller holds the lock. */
void ledger_recount(struct membership *member);
void ledger_reap(struct membership *member);
uint64_t ledger_clock(void);
/* Opens the fast path for a device that only the first ledger lists. */
void ledger_open_short_way(int device, int at);

int ledger_device_index(const struct vgpu_ledger *ledger, const char *uuid);
/* Returns the inode of this process's pid namespace; 0 if /proc does not show it. */
uint64_t ledger_pid_namespace(void);
/* ledger_view_total and ledger_view_beyond serve a process that has no slot. Such a process repairs nothing in the
 * ledger. */
bool ledger_view_total(const char *uuid, uint64_t *bytes);
uint64_t ledger_view_beyond(const char *uuid);

/* --- ledger_file.c: the file itself ------------------------------------------------------------------ */

/* Opens and checks the ledger, and initialises an empty file. Returns a descriptor, or -1 after a line on stderr. */
int ledger_file_open(const char *path, unsigned share, bool write);
bool ledger_header_ok(const struct vgpu_ledger *ledger);
/* Returns 1 if a process has a lock on the byte, 0 if none does, -1 if that is unknown. */
int ledger_byte_held(int descriptor, uint64_t byte);
bool ledger_byte_take(int descriptor, uint64_t byte);

/* Opens the mapped file again by its name. Returns -1 if the name now refers to another file, because the locks of that
 * file say nothing about this ledger. */
int ledger_file_again(const struct membership *member, bool write);
bool ledger_file_identity(int descriptor, uint64_t file[2]);
void ledger_byte_drop(int descriptor, uint64_t byte);
/* Takes a shared lock on the byte, which any number of processes can hold. */
bool ledger_byte_share(int descriptor, uint64_t byte);
/* Returns 1 if a process has a lock on any byte of the range, 0 if none does, -1 if that is unknown. */
int ledger_range_held(int descriptor, uint64_t first, uint64_t count);
/* --- seats.c: containers with several shares ---------------------------------------------------------- */

/* A device's seat: its entry in the ledger of one share. A device that several shares name has several seats. */
struct seat {
    struct membership *member;
    /* Index of the device in that ledger. */
    int at;
};
void seats_begin(unsigned shares);
/* Returns the index by which this process knows a device; adds a device that is new. -1: a ledger is full. The caller
 * holds the join lock (see ledger_hold). */
int seats_add(const char *uuid);
extern bool ledger_several; /* True if this container has several shares. */
int seats_search(const char *uuid);
/* Returns the index by which this process knows a device; -1: no ledger lists the device. */
static inline int seats_find(const char *uuid)
{
    return ledger_several ? seats_search(uuid) : ledger_device_index(ledger_members[0].map, uuid);
}
uint64_t seats_total(int device);
/* Returns the seats of a device, at least one. Values that exist once for a device are stored at its first seat. */
const struct seat *seats_of(int device, unsigned *count);
static inline struct seat seats_home(int device)
{
    unsigned count;
    return seats_of(device, &count)[0];
}
/* Returns true if the device has no fast path. Then seats_charge and seats_uncharge must be used for it. */
bool seats_several(int device);
enum charge seats_charge(int device, enum account account, uint64_t bytes, uint64_t limit);
void seats_uncharge(int device, enum account account, uint64_t bytes);
void seats_reset(void);

/* --- shareable.c: file descriptors that refer to device memory -------------------------------------------- */

/* Returns true if any handle made in this container is open, or if that is unknown. `identity` is the device and inode
 * number of the ledger file. */
bool shareable_any(const struct vgpu_ledger *ledger, const uint64_t identity[2]);

/* Both functions are for the slot of a dead process that had exported memory. ledger_slot_exported returns true if
 * another process still has that memory open. ledger_slot_exported_bytes returns how many bytes of a device stay
 * charged for it. */
bool ledger_slot_exported(int descriptor, const struct vgpu_ledger *ledger, const struct vgpu_ledger_slot *slot);
uint64_t ledger_slot_exported_bytes(const struct vgpu_ledger_slot *slot, int device);

#pragma GCC visibility pop

#endif
