/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Finds the shares of this container. A share is one allocation of GPUs, that is, a limits file with a ledger (the file
 * in which charges are recorded) in the same folder. Most containers have one share. A container with several shares
 * (for example from several Kubernetes claims) may use the cards of all its shares. If two shares name a card, the
 * container gets the sum of both. For settings of the whole process the strictest share applies.
 */
#include "env.h"
#include "limits_file.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

/* Copies the next path of a list. Returns false if the list has no further path or the path is too long. */
static bool next_path(const char **list, char *kept, size_t room)
{
    char path[256];
    size_t length = strcspn(*list, ":");
    if (!length || length >= sizeof path)
        return false;
    memcpy(path, *list, length);
    path[length] = 0;
    *list += length + ((*list)[length] == ':');
    env_keep_path(path, kept, room);
    return true;
}

static void name(struct share *share, const char *limits, const char *ledger)
{
    snprintf(share->limits, sizeof share->limits, "%s", limits);
    snprintf(share->ledger, sizeof share->ledger, "%s", ledger);
}

bool shares_by_hand(struct shares *shares, const char *limits, const char *ledgers)
{
    shares->count = 0;
    if (!strchr(limits, ':')) {
        env_keep_path(limits, shares->of[0].limits, sizeof shares->of[0].limits);
        env_keep_path(*ledgers ? ledgers : VGPU_PATH_LEDGER, shares->of[0].ledger, sizeof shares->of[0].ledger);
        shares->count = 1;
        return true;
    }
    while (*limits && shares->count < VGPU_MAX_SHARES) {
        struct share *share = &shares->of[shares->count];
        if (!next_path(&limits, share->limits, sizeof share->limits) || !next_path(&ledgers, share->ledger, sizeof share->ledger))
            return false;
        shares->count++;
    }
    return !*limits && !*ledgers;
}

bool shares_of_the_node(struct shares *shares, char *reason, size_t room)
{
    char limits[64], ledger[64];
    int numbers[VGPU_MAX_SHARES], count = shares_find(numbers, reason, room);
    for (int i = 0; i < count; i++) {
        snprintf(limits, sizeof limits, VGPU_PATH_ROOT "/%d/limits", numbers[i]);
        snprintf(ledger, sizeof ledger, VGPU_PATH_ROOT "/%d/ledger", numbers[i]);
        name(&shares->of[i], limits, ledger);
        shares->of[i].number = numbers[i];
    }
    shares->count = count < 0 ? 0 : (unsigned)count;
    return count > 0;
}

const struct share *shares_map(struct shares *shares, bool of_the_node, char *reason, size_t room)
{
    for (unsigned i = 0; i < shares->count; i++) {
        struct share *share = &shares->of[i];
        int descriptor = of_the_node ? share_limits_open(share->number, reason, room) : -1;
        share->file.missing = false;
        bool mapped = of_the_node ? descriptor >= 0 && limits_map_open(descriptor, &share->file, reason, room)
                                  : limits_map(share->limits, &share->file, reason, room);
        if (!mapped) {
            shares_unmap(shares);
            return share;
        }
    }
    return NULL;
}

void shares_unmap(struct shares *shares)
{
    for (unsigned i = 0; i < shares->count; i++)
        if (shares->of[i].file.data) {
            munmap((void *)shares->of[i].file.data, shares->of[i].file.length);
            shares->of[i].file.data = NULL;
        }
}

/* --- the limits of several shares as one ------------------------------------------------------------------ */

/* Compares UUIDs without the part before the first dash, because CUDA and NVML spell a MIG device's UUID differently
 * there. */
bool uuid_same(const char *left, const char *right)
{
    const char *l = strchr(left, '-'), *r = strchr(right, '-');
    return strcmp(l ? l : left, r ? r : right) == 0;
}

static bool is_unlimited(const struct vgpu_limits_device *device)
{
    return !device->memory_bytes && (device->flags & VGPU_DEVICE_UNLIMITED_MEMORY);
}

/* Adds two percentages. 0 and 100 mean that there is no limit. */
static uint32_t percent_of_both(uint32_t one, uint32_t other)
{
    return !one || !other || one + other >= 100 ? 0 : one + other;
}

static void add_device(struct vgpu_limits_device *all, const struct vgpu_limits_device *one)
{
    if (is_unlimited(all) || is_unlimited(one)) {
        all->memory_bytes = 0;
        all->flags |= VGPU_DEVICE_UNLIMITED_MEMORY;
    } else {
        uint64_t sum = all->memory_bytes + one->memory_bytes;
        all->memory_bytes = sum < one->memory_bytes ? UINT64_MAX : sum;
        all->flags &= ~(uint32_t)VGPU_DEVICE_UNLIMITED_MEMORY;
    }
    all->sm_percent = percent_of_both(all->sm_percent, one->sm_percent);
    all->card_bytes = one->card_bytes > all->card_bytes ? one->card_bytes : all->card_bytes;
}

int policy_tightness(enum vgpu_core_policy policy)
{
    return policy == VGPU_CORE_FORCE ? 2 : policy == VGPU_CORE_DEFAULT ? 1 : 0;
}

bool limits_add(struct vgpu_limits *all, const struct vgpu_limits *one)
{
    const uint32_t any = VGPU_LIMITS_COUNT_CONTEXT | VGPU_LIMITS_DENY | VGPU_LIMITS_OOM_KILLER;
    all->flags = ((all->flags | one->flags) & any) | (all->flags & one->flags & ~any);
    if (policy_tightness((enum vgpu_core_policy)one->core_policy) > policy_tightness((enum vgpu_core_policy)all->core_policy))
        all->core_policy = one->core_policy;
    all->priority |= one->priority;
    all->log_level = one->log_level > all->log_level ? one->log_level : all->log_level;
    for (uint32_t i = 0, at; i < one->device_count; i++) {
        for (at = 0; at < all->device_count && !uuid_same(all->devices[at].uuid, one->devices[i].uuid); at++)
            ;
        if (at == VGPU_MAX_DEVICES)
            return false;
        if (at < all->device_count) {
            add_device(&all->devices[at], &one->devices[i]);
        } else {
            all->devices[at] = one->devices[i];
            all->device_count++;
        }
    }
    return true;
}
