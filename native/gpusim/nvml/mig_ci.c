/* SPDX-License-Identifier: Apache-2.0 */
/* Implements NVML's functions for compute instances (MIG). A compute instance has all or some compute slices of a GPU
 * instance and shares the memory and the engines of that GPU instance with its other compute instances. */
#include "nvml_internal.h"

#include <stdio.h>
#include <string.h>

static struct nvml_compute_instance instances[NVML_MAX_GPUS][SIM_MAX_GI][SIM_MAX_CI];

/* Number of the profile (NVML_COMPUTE_INSTANCE_PROFILE_*, which is also its id) for each number of compute slices. */
static const struct {
    unsigned number, slices;
} profiles[] = {{0, 1}, {1, 2}, {2, 3}, {3, 4}, {4, 7}};
#define PROFILES (sizeof profiles / sizeof profiles[0])

/* True if a GPU instance of `whole` slices can have compute instances of `slices` slices. Every size up to `whole` is
 * possible, with one exception: 3 slices of a GPU instance of 4. */
static bool allowed(unsigned whole, unsigned slices)
{
    return slices <= whole && !(whole == 4 && slices == 3);
}

static unsigned slices_of(unsigned number)
{
    for (unsigned i = 0; i < PROFILES; i++)
        if (profiles[i].number == number)
            return profiles[i].slices;
    return 0;
}

/* Returns the number of SMs of a compute instance. If it takes only some slices of its GPU instance, it has the SMs of
 * these slices. If it takes the whole GPU instance, it has all SMs of that instance, which can be more: on an H100 a 3g
 * instance has 60 SMs, and three slices of 16 SMs are only 48. */
static unsigned sm_count(const struct sim_gpu *gpu, const struct sim_mig_profile *profile, unsigned slices)
{
    unsigned per_slice = gpu->arch >= SIM_HOPPER ? 16 : 14;
    return slices == profile->slices ? profile->sm_count : slices * per_slice;
}

static nvmlReturn_t open_profile(nvmlGpuInstance_t instance, unsigned number, struct nvml_target *target,
                                 const struct sim_mig_profile **profile, unsigned *slices)
{
    NVML_TRY(nvml_open_instance(instance, target));
    sim_lock();
    *profile = nvml_mig_profile(target, target->gpu->gi[target->gi].profile_id);
    sim_unlock();
    *slices = slices_of(number);
    if (*profile == NULL || *slices == 0 || !allowed((*profile)->slices, *slices))
        return NVML_ERROR_NOT_SUPPORTED;
    return NVML_SUCCESS;
}

#define COPY_PROFILE(into)                                                                                             \
    do {                                                                                                               \
        (into)->id = number;                                                                                           \
        (into)->sliceCount = slices;                                                                                   \
        (into)->instanceCount = profile->slices / slices;                                                              \
        (into)->multiprocessorCount = sm_count(target.gpu, profile, slices);                                           \
        (into)->sharedCopyEngineCount = profile->copy_engines;                                                         \
        (into)->sharedDecoderCount = profile->decoders;                                                                \
        (into)->sharedEncoderCount = profile->encoders;                                                                \
        (into)->sharedJpegCount = profile->jpegs;                                                                      \
        (into)->sharedOfaCount = profile->ofas;                                                                        \
    } while (0)

NVML_API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfo(nvmlGpuInstance_t instance, unsigned number,
                                                                   unsigned engines,
                                                                   nvmlComputeInstanceProfileInfo_t *info)
{
    struct nvml_target target;
    const struct sim_mig_profile *profile;
    unsigned slices;
    NVML_NEED(info != NULL && engines == 0);
    NVML_TRY(open_profile(instance, number, &target, &profile, &slices));
    COPY_PROFILE(info);
    return NVML_SUCCESS;
}

static void profile_name(char name[96], const struct sim_mig_profile *profile, unsigned slices)
{
    if (slices == profile->slices)
        snprintf(name, 96, "MIG %s", profile->name);
    else
        snprintf(name, 96, "MIG %uc.%s", slices, profile->name);
}

NVML_API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfoV(nvmlGpuInstance_t instance, unsigned number,
                                                                    unsigned engines,
                                                                    nvmlComputeInstanceProfileInfo_v2_t *info)
{
    struct nvml_target target;
    const struct sim_mig_profile *profile;
    unsigned slices;
    NVML_NEED(info != NULL && engines == 0);
    bool third = info->version == NVML_STRUCT_VERSION(nvmlComputeInstanceProfileInfo_v3_t, 3);
    if (!third && info->version != NVML_STRUCT_VERSION(nvmlComputeInstanceProfileInfo_v2_t, 2))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    NVML_TRY(open_profile(instance, number, &target, &profile, &slices));
    COPY_PROFILE(info); /* Version 3 of the structure begins like version 2. */
    profile_name(info->name, profile, slices);
    if (third)
        ((nvmlComputeInstanceProfileInfo_v3_t *)(void *)info)->capabilities = 0;
    return NVML_SUCCESS;
}

static unsigned taken_slices(const struct sim_mig_gi *gi)
{
    unsigned taken = 0;
    for (unsigned i = 0; i < SIM_MAX_CI; i++)
        if (gi->ci[i].used)
            taken |= ((1u << gi->ci[i].slices) - 1) << gi->ci[i].placement_start;
    return taken;
}

/* Returns the lowest free start, or -1. */
static int free_start(unsigned taken, unsigned whole, unsigned slices)
{
    for (unsigned start = 0; start + slices <= whole; start++)
        if ((taken & (((1u << slices) - 1) << start)) == 0)
            return (int)start;
    return -1;
}

NVML_API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceRemainingCapacity(nvmlGpuInstance_t instance, unsigned number,
                                                                         unsigned *count)
{
    struct nvml_target target;
    const struct sim_mig_profile *profile;
    unsigned slices;
    NVML_NEED(count != NULL);
    NVML_TRY(open_profile(instance, number, &target, &profile, &slices));
    int start;
    *count = 0;
    sim_lock();
    unsigned taken = taken_slices(&target.gpu->gi[target.gi]);
    while ((start = free_start(taken, profile->slices, slices)) >= 0) {
        taken |= ((1u << slices) - 1) << start;
        (*count)++;
    }
    sim_unlock();
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlGpuInstanceGetComputeInstancePossiblePlacements(nvmlGpuInstance_t instance, unsigned number,
                                                                          nvmlPlacement_t *placements, unsigned *count)
{
    struct nvml_target target;
    const struct sim_mig_profile *profile;
    unsigned slices;
    NVML_NEED(count != NULL);
    NVML_TRY(open_profile(instance, number, &target, &profile, &slices));
    unsigned room = *count;
    *count = profile->slices / slices;
    if (placements == NULL)
        return NVML_SUCCESS;
    if (room < *count)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < *count; i++)
        placements[i] = (nvmlPlacement_t){i * slices, slices};
    return NVML_SUCCESS;
}

static nvmlComputeInstance_t handle_of(const struct nvml_target *target, int ci)
{
    struct nvml_compute_instance *instance = &instances[target->number][target->gi][ci];
    instance->gpu = target->number;
    instance->gi = target->gi;
    instance->ci = ci;
    return instance;
}

/* Derives the UUID from GPU, GPU instance and compute instance, equal in every run: 16 bytes of two FNV-1a hashes. */
static void make_uuid(char uuid[SIM_UUID], const char *gpu, unsigned gi, unsigned ci)
{
    char text[96];
    uint64_t half[2] = {0xcbf29ce484222325ull, 0x84222325cbf29ce4ull};
    snprintf(text, sizeof text, "%s/%u/%u", gpu, gi, ci);
    for (int h = 0; h < 2; h++)
        for (const char *c = text; *c != '\0'; c++)
            half[h] = (half[h] ^ (unsigned char)*c) * 0x100000001b3ull;
    snprintf(uuid, SIM_UUID, "MIG-%08x-%04x-5%03x-%04x-%012llx", (unsigned)(half[0] >> 32),
             (unsigned)(half[0] >> 16) & 0xffffu, (unsigned)half[0] & 0xfffu,
             ((unsigned)(half[1] >> 48) & 0x3fffu) | 0x8000u, (unsigned long long)half[1] & 0xffffffffffffull);
}

static nvmlReturn_t create(nvmlGpuInstance_t instance, unsigned number, const nvmlPlacement_t *wanted,
                           nvmlComputeInstance_t *made)
{
    struct nvml_target target;
    const struct sim_mig_profile *profile;
    unsigned slices;
    NVML_NEED(made != NULL);
    NVML_TRY(open_profile(instance, number, &target, &profile, &slices));
    NVML_TRY(nvml_root());
    NVML_NEED(wanted == NULL || (wanted->size == slices && wanted->start + slices <= profile->slices));
    nvmlReturn_t result = NVML_ERROR_INSUFFICIENT_RESOURCES;
    sim_lock();
    struct sim_mig_gi *gi = &target.gpu->gi[target.gi];
    unsigned taken = taken_slices(gi);
    int start = wanted == NULL ? free_start(taken, profile->slices, slices) : (int)wanted->start;
    bool fits = start >= 0 && (taken & (((1u << slices) - 1) << start)) == 0;
    for (int i = 0; fits && i < SIM_MAX_CI; i++) {
        struct sim_mig_ci *ci = &gi->ci[i];
        if (ci->used)
            continue;
        *ci = (struct sim_mig_ci){.used = 1, .id = (uint32_t)i, .slices = slices, .placement_start = (uint32_t)start,
                                  .profile = number};
        make_uuid(ci->uuid, target.gpu->uuid, gi->id, ci->id);
        gi->ci_count++;
        *made = handle_of(&target, i);
        result = NVML_SUCCESS;
        break;
    }
    sim_unlock();
    return result;
}

NVML_API nvmlReturn_t nvmlGpuInstanceCreateComputeInstance(nvmlGpuInstance_t instance, unsigned number,
                                                           nvmlComputeInstance_t *made)
{
    return create(instance, number, NULL, made);
}

NVML_API nvmlReturn_t nvmlGpuInstanceCreateComputeInstanceWithPlacement(nvmlGpuInstance_t instance, unsigned number,
                                                                        const nvmlPlacement_t *placement,
                                                                        nvmlComputeInstance_t *made)
{
    NVML_NEED(placement != NULL);
    return create(instance, number, placement, made);
}

static nvmlReturn_t open_compute(nvmlComputeInstance_t instance, struct nvml_target *target)
{
    uintptr_t address = (uintptr_t)instance, base = (uintptr_t)instances;
    NVML_TRY(nvml_enter());
    NVML_NEED(instance != NULL && address >= base && address < base + sizeof instances &&
              (address - base) % sizeof instances[0][0][0] == 0);
    NVML_TRY(nvml_open(nvml_gpu_handle(instance->gpu), NVML_WHOLE_GPU, target));
    target->gi = instance->gi;
    target->ci = instance->ci;
    sim_lock();
    const struct sim_mig_gi *gi = &target->gpu->gi[target->gi];
    bool exists = gi->used && gi->ci[target->ci].used;
    sim_unlock();
    return exists ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

NVML_API nvmlReturn_t nvmlComputeInstanceDestroy(nvmlComputeInstance_t instance)
{
    struct nvml_target target;
    NVML_TRY(open_compute(instance, &target));
    NVML_TRY(nvml_root());
    sim_lock();
    struct sim_mig_gi *gi = &target.gpu->gi[target.gi];
    if (gi->ci[target.ci].used) {
        memset(&gi->ci[target.ci], 0, sizeof gi->ci[target.ci]);
        gi->ci_count--;
    }
    sim_unlock();
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlComputeInstanceGetInfo_v2(nvmlComputeInstance_t instance, nvmlComputeInstanceInfo_t *info)
{
    struct nvml_target target;
    NVML_TRY(open_compute(instance, &target));
    NVML_NEED(info != NULL);
    sim_lock();
    const struct sim_mig_ci *ci = &target.gpu->gi[target.gi].ci[target.ci];
    *info = (nvmlComputeInstanceInfo_t){.device = nvml_gpu_handle(target.number),
                                        .gpuInstance = nvml_instance_handle(target.number, target.gi),
                                        .id = ci->id, .profileId = ci->profile,
                                        .placement = {ci->placement_start, ci->slices}};
    sim_unlock();
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlComputeInstanceGetInfo(nvmlComputeInstance_t instance, nvmlComputeInstanceInfo_t *info)
{
    return nvmlComputeInstanceGetInfo_v2(instance, info);
}

NVML_API nvmlReturn_t nvmlGpuInstanceGetComputeInstances(nvmlGpuInstance_t instance, unsigned number,
                                                         nvmlComputeInstance_t *list, unsigned *count)
{
    struct nvml_target target;
    NVML_NEED(list != NULL && count != NULL);
    NVML_TRY(nvml_open_instance(instance, &target));
    if (slices_of(number) == 0)
        return NVML_ERROR_NOT_SUPPORTED;
    *count = 0;
    sim_lock();
    const struct sim_mig_gi *gi = &target.gpu->gi[target.gi];
    for (int i = 0; i < SIM_MAX_CI; i++)
        if (gi->ci[i].used && gi->ci[i].profile == number)
            list[(*count)++] = handle_of(&target, i);
    sim_unlock();
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceById(nvmlGpuInstance_t instance, unsigned id,
                                                            nvmlComputeInstance_t *found)
{
    struct nvml_target target;
    NVML_NEED(found != NULL);
    NVML_TRY(nvml_open_instance(instance, &target));
    nvmlReturn_t result = NVML_ERROR_NOT_FOUND;
    sim_lock();
    const struct sim_mig_gi *gi = &target.gpu->gi[target.gi];
    for (int i = 0; i < SIM_MAX_CI; i++)
        if (gi->ci[i].used && gi->ci[i].id == id) {
            *found = handle_of(&target, i);
            result = NVML_SUCCESS;
        }
    sim_unlock();
    return result;
}
