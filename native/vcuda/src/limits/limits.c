/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Keeps the limits that apply in this process. If there is a limits file, they are the file's limits, which environment
 * variables can make stricter but not weaker. Otherwise they are those of the environment alone. A snapshot holds the
 * limits as they were read. Whenever the sequence number in a limits file has changed, a new snapshot is built.
 * Snapshots are never freed, because a thread may still read the old one. A change during the life of a process is rare
 * and costs about 1.5 KiB.
 */
#include "env.h"
#include "limits_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

extern char *secure_getenv(const char *name);

#define TORN_PATIENCE_MS 200u

struct snapshot {
    struct cached_limits cached; /* The part that every hook reads. */
    bool from_file, denied;
    /* policy, priority and oom_killer: the file's values, made stricter by the environment, or the environment's
     * values. */
    enum vgpu_core_policy policy;
    int priority;
    bool oom_killer;
    struct vgpu_limits limits; /* Sum of the limits of all shares (allocations of the container). */
    uint32_t sequence[VGPU_MAX_SHARES];
    struct vgpu_limits share[]; /* The limits of each share, if there are several. */
};

static struct environment env;
static const uint32_t never_changes;
/* The sequence number that is used if there are several limits files. It is even and changes whenever any file
 * changes. */
static uint32_t changes;
const uint32_t *vgpu_limits_sequence = &never_changes;
static struct lock lock;
_Atomic(struct cached_limits *) vgpu_cached_limits;
static _Atomic(struct snapshot *) current;
static _Atomic int control = -1; /* control: -1 until the limits have been read, then a value of enum control. */
/* torn: true if the file could not be read after a change. Then the last good snapshot stays in use. */
static _Atomic bool torn;
static struct shares shares = {.count = 1, .of = {{.limits = VGPU_PATH_LIMITS, .ledger = VGPU_PATH_LEDGER}}};
static bool in_force;
static const char *path = VGPU_PATH_LIMITS; /* Path of the limits file to which `reason` refers. */
static char reason[256];

/*
 * Returns true if the node's ld.so.preload names this library. The environment cannot change that file. If the file
 * exists but cannot be read (for example because the process has no free descriptors), it may name the library. In this
 * case the function returns true and sets *known to false.
 */
static bool preload_in_force(bool *known)
{
    char text[4096];
    *known = true;
    int descriptor = open(VGPU_PATH_PRELOAD, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0 && (errno == ENOENT || errno == ENOTDIR))
        return false;
    ssize_t length = descriptor < 0 ? -1 : read(descriptor, text, sizeof text - 1);
    if (descriptor >= 0)
        close(descriptor);
    if (length < 0) {
        *known = false;
        return true;
    }
    text[length] = 0;
    return strstr(text, "libvgpu.so") != NULL;
}

static void merge(struct snapshot *snapshot)
{
    const struct vgpu_limits *limits = &snapshot->limits;
    bool alone = !snapshot->from_file;
    enum vgpu_core_policy asked = (enum vgpu_core_policy)env.policy;
    snapshot->policy = alone ? VGPU_CORE_DEFAULT : (enum vgpu_core_policy)limits->core_policy;
    if (env.policy != ENV_UNSET && (alone || policy_tightness(asked) > policy_tightness(snapshot->policy)))
        snapshot->policy = asked;
    /* 0 is high, 1 is low priority. A container without a setting has low priority. */
    snapshot->priority = alone || limits->priority != 0;
    if (env.priority != ENV_UNSET)
        snapshot->priority = alone ? env.priority : snapshot->priority | env.priority;
    snapshot->oom_killer = (limits->flags & VGPU_LIMITS_OOM_KILLER) || env.oom_killer == true;
    snapshot->cached.oversubscribe =
        alone ? env.oversubscribe == true : (limits->flags & VGPU_LIMITS_OVERSUBSCRIBE) && env.oversubscribe != false;
}

static bool several(void)
{
    return shares.count > 1;
}

static void publish(struct snapshot *snapshot)
{
    merge(snapshot);
    int level = env.log_level >= 0 ? env.log_level : snapshot->from_file ? (int)snapshot->limits.log_level : LOG_WARN;
    atomic_store_explicit(&vgpu_log_level, level, memory_order_relaxed);
    bool may_disable = !snapshot->from_file || (snapshot->limits.flags & VGPU_LIMITS_ALLOW_DISABLE_CONTROL);
    bool off = (env.disable && may_disable) || (!snapshot->from_file && !env.limits);
    struct cached_limits *cached = &snapshot->cached;
    cached->control = off ? CONTROL_OFF : CONTROL_ON;
    /* The fast path is not used while calls are logged, because it writes no log lines. */
    cached->plain = !off && !cached->oversubscribe && level < LOG_CALLS;
    /* With several files no single sequence number shows all changes, so every hook calls limits_control(), which
     * checks each file. */
    static const uint32_t never_the_same = 1;
    cached->sequence_at = !snapshot->from_file ? &cached->sequence : several() ? &never_the_same : vgpu_limits_sequence;
    atomic_store_explicit(&current, snapshot, memory_order_release);
    atomic_store_explicit(&vgpu_cached_limits, cached, memory_order_release);
    atomic_store_explicit(&control, (int)cached->control, memory_order_release);
}

static enum control broken(void)
{
    if (atomic_load_explicit(&current, memory_order_relaxed)) {
        if (!atomic_exchange_explicit(&torn, true, memory_order_relaxed))
            vgpu_log_line(LOG_ERROR, "%s: %s; the last limits stay active, and new contexts are refused", path, reason);
        return CONTROL_ON;
    }
    atomic_store_explicit(&control, CONTROL_BROKEN, memory_order_release);
    return CONTROL_BROKEN;
}

static bool map_files(void)
{
    bool found = !in_force || shares_of_the_node(&shares, reason, sizeof reason);
    const struct share *fault = found ? shares_map(&shares, in_force, reason, sizeof reason) : &shares.of[0];
    path = (fault ? fault : &shares.of[0])->limits;
    return !fault;
}

/* Reads the limits files of all shares into a new snapshot. NULL: one could not be read, and `reason` says why. */
static struct snapshot *read_files(void)
{
    struct snapshot *snapshot = calloc(1, sizeof *snapshot + (several() ? shares.count * sizeof *snapshot->share : 0));
    unsigned patience = atomic_load_explicit(&torn, memory_order_relaxed) ? 0 : TORN_PATIENCE_MS;
    for (unsigned i = 0; snapshot && i < shares.count; i++) {
        struct vgpu_limits *limits = several() ? &snapshot->share[i] : &snapshot->limits;
        bool read = limits_copy(&shares.of[i].file, patience, limits, reason, sizeof reason);
        snapshot->sequence[i] = limits->sequence;
        if (read && i == 0)
            snapshot->limits = *limits;
        else if (read && !limits_add(&snapshot->limits, limits))
            read = !snprintf(reason, sizeof reason, "together with other shares it names more than %d devices", VGPU_MAX_DEVICES);
        if (!read) {
            path = shares.of[i].limits;
            free(snapshot);
            snapshot = NULL;
        } else if (limits->flags & VGPU_LIMITS_DENY) {
            path = shares.of[i].limits;
        }
    }
    return snapshot;
}

/* Returns true if no limits file has changed since the snapshot. */
static bool unchanged(const struct snapshot *snapshot)
{
    for (unsigned i = 0; snapshot->from_file && i < shares.count; i++)
        if (limits_sequence(&shares.of[i].file) != snapshot->sequence[i])
            return false;
    return true;
}

static enum control load(void)
{
    static bool started, settled;
    bool required;
    if (!started)
        env_read(&env);
    started = true;
    /* While the preload file cannot be read, the library counts as loaded by the node. Each load of the limits repeats
     * this check until the preload file or the limits could be read. */
    if (!settled && !atomic_load_explicit(&current, memory_order_relaxed)) {
        in_force = preload_in_force(&settled);
        const char *other = in_force ? NULL : secure_getenv("VGPU_LIMITS_FILE");
        if (!in_force && !shares_by_hand(&shares, other ? other : VGPU_PATH_LIMITS, env.ledger)) {
            snprintf(reason, sizeof reason, "VGPU_LIMITS_FILE and CUDA_DEVICE_MEMORY_SHARED_CACHE name %s %d files",
                     "different numbers of files, or more than", VGPU_MAX_SHARES);
            return broken();
        }
    }
    required = in_force || several() || strcmp(shares.of[0].limits, VGPU_PATH_LIMITS) != 0;
    if (!shares.of[0].file.data && !map_files()) {
        if (!shares.of[0].file.missing || required)
            return broken();
        struct snapshot *snapshot = calloc(1, sizeof *snapshot);
        if (!snapshot)
            return broken();
        snapshot->limits.flags = VGPU_LIMITS_COUNT_CONTEXT;
        publish(snapshot);
        return (enum control)atomic_load(&control);
    }
    struct snapshot *snapshot = read_files();
    if (!snapshot) {
        if (!atomic_load_explicit(&current, memory_order_relaxed))
            shares_unmap(&shares); /* Unmap the files, because they may have another length when they are read again. */
        return broken();
    }
    snapshot->from_file = true;
    snapshot->cached.sequence = several() ? 0 : snapshot->limits.sequence;
    for (uint32_t i = 0; i < snapshot->limits.device_count; i++)
        snapshot->cached.driver_limited |= snapshot->limits.devices[i].card_bytes != 0;
    __atomic_store_n(&changes, changes + 2, __ATOMIC_RELEASE);
    const uint32_t *sequence = several() ? &changes : &((const struct vgpu_limits *)shares.of[0].file.data)->sequence;
    __atomic_store_n(&vgpu_limits_sequence, sequence, __ATOMIC_RELEASE);
    snapshot->denied = (snapshot->limits.flags & VGPU_LIMITS_DENY) != 0;
    atomic_store_explicit(&torn, false, memory_order_relaxed);
    publish(snapshot);
    return (enum control)atomic_load(&control);
}

enum control limits_control(void)
{
    int known = atomic_load_explicit(&control, memory_order_acquire);
    struct snapshot *snapshot = atomic_load_explicit(&current, memory_order_acquire);
    if (known >= 0 && snapshot && unchanged(snapshot))
        return (enum control)known;
    lock_take(&lock);
    snapshot = atomic_load_explicit(&current, memory_order_acquire);
    known = atomic_load_explicit(&control, memory_order_acquire);
    if (known < 0 || !snapshot || !unchanged(snapshot))
        known = (int)load();
    lock_drop(&lock);
    return (enum control)known;
}

void limits_complain(void)
{
    struct snapshot *snapshot = atomic_load_explicit(&current, memory_order_acquire);
    bool denied = snapshot && snapshot->denied && !atomic_load(&torn);
    vgpu_log_line(LOG_ERROR, "no context is created: %s: %s", path, denied ? "this allocation is not ready or was withdrawn" : reason);
}

bool limits_denied(void)
{
    if (limits_control() == CONTROL_BROKEN)
        return true;
    struct snapshot *snapshot = atomic_load_explicit(&current, memory_order_acquire);
    return !snapshot || snapshot->denied || atomic_load_explicit(&torn, memory_order_relaxed);
}

bool limits_count_context(void)
{
    struct snapshot *snapshot = atomic_load_explicit(&current, memory_order_acquire);
    return snapshot && (snapshot->limits.flags & VGPU_LIMITS_COUNT_CONTEXT);
}

bool limits_need_index(void)
{
    struct snapshot *snapshot = atomic_load_explicit(&current, memory_order_acquire);
    return snapshot && !snapshot->from_file && env.by_device;
}

/* Returns the device's position in the limits file, or in NVML's order if only the environment sets limits; -1: the
 * device has none. */
static int place(const struct snapshot *snapshot, const char *uuid, int nvml_index)
{
    if (!snapshot->from_file)
        return nvml_index < VGPU_MAX_DEVICES ? nvml_index : -1;
    for (uint32_t i = 0; i < snapshot->limits.device_count; i++)
        if (uuid_same(snapshot->limits.devices[i].uuid, uuid))
            return (int)i;
    return -1;
}

uint64_t limits_memory(const char *uuid, int nvml_index, bool *known)
{
    struct snapshot *snapshot = atomic_load_explicit(&current, memory_order_acquire);
    uint64_t bytes = UINT64_MAX;
    *known = snapshot != NULL;
    if (!snapshot)
        return 0;
    int index = place(snapshot, uuid, nvml_index);
    if (snapshot->from_file) {
        if (index < 0) {
            *known = false;
            return 0;
        }
        const struct vgpu_limits_device *device = &snapshot->limits.devices[index];
        if (device->memory_bytes || !(device->flags & VGPU_DEVICE_UNLIMITED_MEMORY))
            bytes = device->memory_bytes;
    }
    uint64_t asked = index >= 0 && env.memory_of[index] ? env.memory_of[index] : env.memory;
    return asked && asked < bytes ? asked : bytes;
}

uint64_t limits_card_asked(const char *uuid)
{
    struct snapshot *snapshot = atomic_load_explicit(&current, memory_order_acquire);
    int index = snapshot && snapshot->from_file ? place(snapshot, uuid, -1) : -1;
    return index < 0 ? 0 : snapshot->limits.devices[index].card_bytes;
}

unsigned limits_sm_percent(const char *uuid, int nvml_index)
{
    struct snapshot *snapshot = atomic_load_explicit(&current, memory_order_acquire);
    unsigned percent = 100;
    if (!snapshot)
        return 0;
    int index = place(snapshot, uuid, nvml_index);
    if (snapshot->from_file && index >= 0 && snapshot->limits.devices[index].sm_percent)
        percent = snapshot->limits.devices[index].sm_percent;
    int asked = index >= 0 && env.sm_of[index] != ENV_UNSET ? env.sm_of[index] : env.sm;
    if (asked > 0 && (unsigned)asked < percent)
        percent = (unsigned)asked;
    return percent < 100 ? percent : 0;
}

bool limits_sm_lowered(const char *uuid, int nvml_index)
{
    struct snapshot *snapshot = atomic_load_explicit(&current, memory_order_acquire);
    int index = snapshot && snapshot->from_file ? place(snapshot, uuid, nvml_index) : -1;
    unsigned written = index >= 0 ? snapshot->limits.devices[index].sm_percent : 0, rules = limits_sm_percent(uuid, nvml_index);
    return index >= 0 && rules && (!written || rules < written);
}

enum vgpu_core_policy limits_core_policy(void)
{
    struct snapshot *snapshot = atomic_load_explicit(&current, memory_order_acquire);
    return snapshot ? snapshot->policy : VGPU_CORE_DEFAULT;
}

int limits_priority(void)
{
    struct snapshot *snapshot = atomic_load_explicit(&current, memory_order_acquire);
    return snapshot ? snapshot->priority : 1;
}

bool limits_oom_killer(void)
{
    struct snapshot *snapshot = atomic_load_explicit(&current, memory_order_acquire);
    return snapshot && snapshot->oom_killer;
}

int limits_devices(char uuids[VGPU_MAX_DEVICES][VGPU_UUID_SIZE])
{
    struct snapshot *snapshot = atomic_load_explicit(&current, memory_order_acquire);
    if (!snapshot || !snapshot->from_file)
        return 0;
    for (uint32_t i = 0; i < snapshot->limits.device_count; i++)
        memcpy(uuids[i], snapshot->limits.devices[i].uuid, VGPU_UUID_SIZE);
    return (int)snapshot->limits.device_count;
}

bool limits_of_an_allocation(void)
{
    const struct snapshot *snapshot = atomic_load_explicit(&current, memory_order_acquire);
    return in_force && snapshot && snapshot->from_file && snapshot->limits.allocation[0];
}

static const struct vgpu_limits *limits_of(const struct snapshot *snapshot, unsigned share)
{
    return several() ? &snapshot->share[share] : &snapshot->limits;
}

bool limits_same_allocation(unsigned share, const char allocation[VGPU_ALLOCATION_SIZE])
{
    const struct snapshot *snapshot = atomic_load_explicit(&current, memory_order_acquire);
    return !in_force || (snapshot && strncmp(limits_of(snapshot, share)->allocation, allocation, VGPU_ALLOCATION_SIZE) == 0);
}

unsigned limits_shares(void)
{
    const struct snapshot *snapshot = atomic_load_explicit(&current, memory_order_acquire);
    return snapshot && snapshot->from_file ? shares.count : 1;
}

uint64_t limits_share_memory(unsigned share, const char *uuid, bool *named)
{
    const struct snapshot *snapshot = atomic_load_explicit(&current, memory_order_acquire);
    const struct vgpu_limits *limits = snapshot && snapshot->from_file ? limits_of(snapshot, share) : NULL;
    for (uint32_t i = 0; limits && i < limits->device_count; i++) {
        const struct vgpu_limits_device *device = &limits->devices[i];
        if (!uuid_same(device->uuid, uuid))
            continue;
        *named = true;
        return device->memory_bytes || !(device->flags & VGPU_DEVICE_UNLIMITED_MEMORY) ? device->memory_bytes : UINT64_MAX;
    }
    *named = false;
    return 0;
}

bool limits_ledger_is_own(void)
{
    const struct snapshot *snapshot = atomic_load_explicit(&current, memory_order_acquire);
    return !in_force && !*env.ledger && !(snapshot && snapshot->from_file);
}

const char *limits_ledger_path(unsigned share)
{
    static char fallback[64];
    if (limits_ledger_is_own()) {
        /* A library preloaded by hand uses one ledger (file with the charges) for all processes of this user. */
        snprintf(fallback, sizeof fallback, "/tmp/vgpu-ledger-%u", (unsigned)geteuid());
        return fallback;
    }
    return shares.of[share].ledger;
}

bool limits_ledger_create(void)
{
    return !in_force;
}

void limits_reset(void)
{
    struct cached_limits *cached = atomic_load_explicit(&vgpu_cached_limits, memory_order_relaxed);
    /* The cached values are stored by the device's index in the ledger. The ledger of a forked child may list the
     * devices in another order. */
    if (cached)
        memset(cached->memory, 0, sizeof cached->memory);
    /* A forked child inherits the mapped limits files and the snapshot, and both stay valid. Only the lock must be
     * cleared, because another thread may have held it. */
    atomic_store_explicit(&lock.word, 0, memory_order_relaxed);
}
