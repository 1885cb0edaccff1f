/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Implements NVML's functions for the MIG mode and GPU instances.
 *
 * A GPU has eight memory slices. An instance takes consecutive slices from one of the starts that its profile allows. A
 * change of the MIG mode destroys all instances. If the GPU has clients, the change stays pending and the activation
 * status is IN_USE, as in the driver.
 */
#include "nvml_internal.h"

#include <stdio.h>
#include <string.h>

#define MEMORY_SLICES 8u

static struct nvml_gpu_instance instances[NVML_MAX_GPUS][SIM_MAX_GI];

const struct sim_mig_profile *nvml_mig_profile(const struct nvml_target *target, unsigned profile_id)
{
    for (unsigned i = 0; i < target->model->mig_count; i++)
        if (target->model->mig[i].id == profile_id)
            return &target->model->mig[i];
    return NULL;
}

static nvmlReturn_t open_capable(nvmlDevice_t device, struct nvml_target *target)
{
    NVML_TRY(nvml_open(device, NVML_WHOLE_GPU, target));
    return target->model->mig_count > 0 ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

static nvmlReturn_t open_enabled(nvmlDevice_t device, struct nvml_target *target)
{
    NVML_TRY(open_capable(device, target));
    sim_lock();
    bool on = target->gpu->mig_mode != 0;
    sim_unlock();
    return on ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

NVML_API nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending)
{
    struct nvml_target target;
    NVML_TRY(open_capable(device, &target));
    NVML_NEED(current != NULL && pending != NULL);
    sim_lock();
    *current = target.gpu->mig_mode;
    *pending = target.gpu->mig_pending;
    sim_unlock();
    return NVML_SUCCESS;
}

static bool has_clients(const struct nvml_target *target)
{
    if (nvml_has_processes(target->number))
        return true;
    for (unsigned gi = 0; gi < SIM_MAX_GI; gi++)
        if (target->gpu->gi[gi].used)
            return true;
    return false;
}

NVML_API nvmlReturn_t nvmlDeviceSetMigMode(nvmlDevice_t device, unsigned mode, nvmlReturn_t *activation)
{
    struct nvml_target target;
    NVML_TRY(open_capable(device, &target));
    NVML_NEED(mode <= NVML_FEATURE_ENABLED && activation != NULL);
    NVML_TRY(nvml_root());
    sim_lock();
    target.gpu->mig_pending = mode;
    *activation = NVML_SUCCESS;
    if (target.gpu->mig_mode != mode && has_clients(&target))
        *activation = NVML_ERROR_IN_USE;
    else
        target.gpu->mig_mode = mode;
    sim_unlock();
    return NVML_SUCCESS;
}

/* Succeeds with a count of 0 for a GPU without MIG, so that a loop over its MIG devices needs no special case. */
NVML_WORD(nvmlDeviceGetMaxMigDeviceCount, NVML_WHOLE_GPU, target.model->mig_count > 0 ? 7 : 0)

static const struct sim_mig_profile *by_number(const struct nvml_target *target, unsigned number)
{
    for (unsigned i = 0; i < target->model->mig_count; i++)
        if (target->model->mig[i].nvml_profile == number)
            return &target->model->mig[i];
    return NULL;
}

#define COPY_PROFILE(into, from)                                                                                       \
    do {                                                                                                               \
        (into)->id = (from)->id;                                                                                       \
        (into)->sliceCount = (from)->slices;                                                                           \
        (into)->instanceCount = (from)->max_instances;                                                                 \
        (into)->multiprocessorCount = (from)->sm_count;                                                                \
        (into)->copyEngineCount = (from)->copy_engines;                                                                \
        (into)->decoderCount = (from)->decoders;                                                                       \
        (into)->encoderCount = (from)->encoders;                                                                       \
        (into)->jpegCount = (from)->jpegs;                                                                             \
        (into)->ofaCount = (from)->ofas;                                                                               \
        (into)->memorySizeMB = (from)->memory_mib;                                                                     \
    } while (0)

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfo(nvmlDevice_t device, unsigned number,
                                                          nvmlGpuInstanceProfileInfo_t *info)
{
    struct nvml_target target;
    NVML_TRY(open_capable(device, &target));
    NVML_NEED(info != NULL);
    const struct sim_mig_profile *profile = by_number(&target, number);
    if (profile == NULL)
        return NVML_ERROR_NOT_SUPPORTED;
    COPY_PROFILE(info, profile);
    info->isP2pSupported = 0;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoV(nvmlDevice_t device, unsigned number,
                                                           nvmlGpuInstanceProfileInfo_v2_t *info)
{
    struct nvml_target target;
    NVML_TRY(open_capable(device, &target));
    NVML_NEED(info != NULL);
    const struct sim_mig_profile *profile = by_number(&target, number);
    if (info->version == NVML_STRUCT_VERSION(nvmlGpuInstanceProfileInfo_v2_t, 2)) {
        if (profile == NULL)
            return NVML_ERROR_NOT_SUPPORTED;
        COPY_PROFILE(info, profile);
        info->isP2pSupported = 0;
        snprintf(info->name, sizeof info->name, "MIG %s", profile->name);
        return NVML_SUCCESS;
    }
    nvmlGpuInstanceProfileInfo_v3_t *third = (nvmlGpuInstanceProfileInfo_v3_t *)(void *)info;
    if (info->version != NVML_STRUCT_VERSION(nvmlGpuInstanceProfileInfo_v3_t, 3))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (profile == NULL)
        return NVML_ERROR_NOT_SUPPORTED;
    COPY_PROFILE(third, profile);
    third->capabilities = 0;
    snprintf(third->name, sizeof third->name, "MIG %s", profile->name);
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements_v2(nvmlDevice_t device, unsigned profile_id,
                                                                    nvmlPlacement_t *placements, unsigned *count)
{
    struct nvml_target target;
    NVML_TRY(open_enabled(device, &target));
    NVML_NEED(count != NULL);
    const struct sim_mig_profile *profile = nvml_mig_profile(&target, profile_id);
    if (profile == NULL)
        return NVML_ERROR_NOT_SUPPORTED;
    unsigned room = *count;
    *count = profile->placement_count;
    if (placements == NULL)
        return NVML_SUCCESS;
    if (room < profile->placement_count)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < profile->placement_count; i++)
        placements[i] = (nvmlPlacement_t){profile->placements[i].start, profile->placements[i].size};
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements(nvmlDevice_t device, unsigned profile_id,
                                                                 nvmlPlacement_t *placements, unsigned *count)
{
    return nvmlDeviceGetGpuInstancePossiblePlacements_v2(device, profile_id, placements, count);
}

static unsigned mask_of(unsigned start, unsigned size)
{
    return ((1u << size) - 1) << start;
}

static unsigned taken_slices(const struct sim_gpu *gpu)
{
    unsigned taken = 0;
    for (unsigned i = 0; i < SIM_MAX_GI; i++)
        if (gpu->gi[i].used)
            taken |= mask_of(gpu->gi[i].placement_start, gpu->gi[i].placement_size);
    return taken;
}

static unsigned instances_of(const struct sim_gpu *gpu, unsigned profile_id)
{
    unsigned count = 0;
    for (unsigned i = 0; i < SIM_MAX_GI; i++)
        count += gpu->gi[i].used && gpu->gi[i].profile_id == profile_id;
    return count;
}

/* Returns the highest free start, so that the low starts stay free for the large profiles. */
static const struct sim_mig_placement *free_placement(const struct sim_mig_profile *profile, unsigned taken)
{
    for (unsigned i = profile->placement_count; i-- > 0;)
        if ((taken & mask_of(profile->placements[i].start, profile->placements[i].size)) == 0)
            return &profile->placements[i];
    return NULL;
}

static unsigned capacity_left(const struct sim_gpu *gpu, const struct sim_mig_profile *profile)
{
    unsigned taken = taken_slices(gpu), left = 0, exist = instances_of(gpu, profile->id);
    const struct sim_mig_placement *place;
    while (exist + left < profile->max_instances && (place = free_placement(profile, taken)) != NULL) {
        taken |= mask_of(place->start, place->size);
        left++;
    }
    return left;
}

/* If MIG is off, returns success and a count of 0, because nvidia-smi of branch 550 then prints 0/7 rather than an
 * error. */
NVML_API nvmlReturn_t nvmlDeviceGetGpuInstanceRemainingCapacity(nvmlDevice_t device, unsigned profile_id,
                                                                unsigned *count)
{
    struct nvml_target target;
    NVML_TRY(open_capable(device, &target));
    NVML_NEED(count != NULL);
    const struct sim_mig_profile *profile = nvml_mig_profile(&target, profile_id);
    if (profile == NULL)
        return NVML_ERROR_NOT_SUPPORTED;
    sim_lock();
    *count = target.gpu->mig_mode ? capacity_left(target.gpu, profile) : 0;
    sim_unlock();
    return NVML_SUCCESS;
}

nvmlGpuInstance_t nvml_instance_handle(int gpu, int gi)
{
    instances[gpu][gi].gpu = gpu;
    instances[gpu][gi].gi = gi;
    return &instances[gpu][gi];
}

/* Returns the instance's id, which depends on size and place as on hardware: 0 whole GPU, 1-2 halves, 3-6 pairs, 7-13
 * single slices. */
static unsigned instance_id(const struct sim_mig_placement *place)
{
    switch (place->size) {
    case MEMORY_SLICES:
        return 0;
    case 4:
        return 1 + place->start / 4u;
    case 2:
        return 3 + place->start / 2u;
    default:
        return 7u + place->start;
    }
}

static nvmlReturn_t create(nvmlDevice_t device, unsigned profile_id, const nvmlPlacement_t *wanted,
                           nvmlGpuInstance_t *instance)
{
    struct nvml_target target;
    NVML_TRY(open_enabled(device, &target));
    NVML_NEED(instance != NULL);
    NVML_TRY(nvml_root());
    const struct sim_mig_profile *profile = nvml_mig_profile(&target, profile_id);
    if (profile == NULL)
        return NVML_ERROR_NOT_SUPPORTED;
    struct sim_mig_placement exact;
    const struct sim_mig_placement *place = NULL;
    if (wanted != NULL) {
        exact = (struct sim_mig_placement){(uint8_t)wanted->start, (uint8_t)wanted->size};
        for (unsigned i = 0; i < profile->placement_count; i++)
            if (profile->placements[i].start == wanted->start && profile->placements[i].size == wanted->size)
                place = &exact;
        NVML_NEED(place != NULL);
    }
    nvmlReturn_t result = NVML_ERROR_INSUFFICIENT_RESOURCES;
    sim_lock();
    unsigned taken = taken_slices(target.gpu);
    if (wanted == NULL)
        place = free_placement(profile, taken);
    bool fits = place != NULL && (taken & mask_of(place->start, place->size)) == 0 &&
                instances_of(target.gpu, profile_id) < profile->max_instances;
    for (int i = 0; fits && i < SIM_MAX_GI; i++) {
        struct sim_mig_gi *gi = &target.gpu->gi[i];
        if (gi->used)
            continue;
        memset(gi, 0, sizeof *gi);
        gi->used = 1;
        gi->id = instance_id(place);
        gi->profile_id = profile_id;
        gi->placement_start = place->start;
        gi->placement_size = place->size;
        *instance = nvml_instance_handle(target.number, i);
        result = NVML_SUCCESS;
        break;
    }
    sim_unlock();
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceCreateGpuInstance(nvmlDevice_t device, unsigned profile_id, nvmlGpuInstance_t *instance)
{
    return create(device, profile_id, NULL, instance);
}

NVML_API nvmlReturn_t nvmlDeviceCreateGpuInstanceWithPlacement(nvmlDevice_t device, unsigned profile_id,
                                                               const nvmlPlacement_t *placement,
                                                               nvmlGpuInstance_t *instance)
{
    NVML_NEED(placement != NULL);
    return create(device, profile_id, placement, instance);
}

/* Finds an instance by its handle at each call, because another process may have destroyed it. */
nvmlReturn_t nvml_open_instance(nvmlGpuInstance_t instance, struct nvml_target *target)
{
    uintptr_t address = (uintptr_t)instance, base = (uintptr_t)instances;
    NVML_TRY(nvml_enter());
    NVML_NEED(instance != NULL && address >= base && address < base + sizeof instances &&
              (address - base) % sizeof instances[0][0] == 0);
    NVML_TRY(nvml_open(nvml_gpu_handle(instance->gpu), NVML_WHOLE_GPU, target));
    target->gi = instance->gi;
    sim_lock();
    bool exists = target->gpu->gi[instance->gi].used != 0;
    sim_unlock();
    return exists ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

NVML_API nvmlReturn_t nvmlGpuInstanceDestroy(nvmlGpuInstance_t instance)
{
    struct nvml_target target;
    NVML_TRY(nvml_open_instance(instance, &target));
    NVML_TRY(nvml_root());
    nvmlReturn_t result = NVML_SUCCESS;
    sim_lock();
    struct sim_mig_gi *gi = &target.gpu->gi[target.gi];
    if (gi->ci_count > 0)
        result = NVML_ERROR_IN_USE;
    else
        memset(gi, 0, sizeof *gi);
    sim_unlock();
    return result;
}

NVML_API nvmlReturn_t nvmlGpuInstanceGetInfo(nvmlGpuInstance_t instance, nvmlGpuInstanceInfo_t *info)
{
    struct nvml_target target;
    NVML_TRY(nvml_open_instance(instance, &target));
    NVML_NEED(info != NULL);
    sim_lock();
    const struct sim_mig_gi *gi = &target.gpu->gi[target.gi];
    *info = (nvmlGpuInstanceInfo_t){.device = nvml_gpu_handle(target.number), .id = gi->id, .profileId = gi->profile_id,
                                    .placement = {gi->placement_start, gi->placement_size}};
    sim_unlock();
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstances(nvmlDevice_t device, unsigned profile_id, nvmlGpuInstance_t *list,
                                                unsigned *count)
{
    struct nvml_target target;
    NVML_TRY(open_enabled(device, &target));
    NVML_NEED(list != NULL && count != NULL);
    if (nvml_mig_profile(&target, profile_id) == NULL)
        return NVML_ERROR_NOT_SUPPORTED;
    *count = 0;
    sim_lock();
    for (int i = 0; i < SIM_MAX_GI; i++)
        if (target.gpu->gi[i].used && target.gpu->gi[i].profile_id == profile_id)
            list[(*count)++] = nvml_instance_handle(target.number, i);
    sim_unlock();
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *instance)
{
    struct nvml_target target;
    nvmlReturn_t result = NVML_ERROR_NOT_FOUND;
    NVML_TRY(open_enabled(device, &target));
    NVML_NEED(instance != NULL);
    sim_lock();
    for (int i = 0; i < SIM_MAX_GI; i++)
        if (target.gpu->gi[i].used && target.gpu->gi[i].id == id) {
            *instance = nvml_instance_handle(target.number, i);
            result = NVML_SUCCESS;
        }
    sim_unlock();
    return result;
}
