/* SPDX-License-Identifier: Apache-2.0 */
/* Implements NVML's functions for MIG devices: handles that programs use like those of GPUs, one for each compute
 * instance. */
#include "nvml_internal.h"

NVML_WORD(nvmlDeviceIsMigDeviceHandle, NVML_ANY_DEVICE, target.gi >= 0)

NVML_API nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t *mig)
{
    struct nvml_target target;
    nvmlReturn_t result = NVML_ERROR_NOT_FOUND;
    NVML_TRY(nvml_open(device, NVML_WHOLE_GPU, &target));
    NVML_NEED(mig != NULL);
    if (target.model->mig_count == 0)
        return NVML_ERROR_NOT_SUPPORTED;
    sim_lock();
    unsigned position = 0;
    for (int gi = 0; gi < SIM_MAX_GI; gi++)
        for (int ci = 0; target.gpu->gi[gi].used && ci < SIM_MAX_CI; ci++)
            if (target.gpu->gi[gi].ci[ci].used && position++ == index) {
                *mig = nvml_mig_handle(target.number, gi, ci);
                result = NVML_SUCCESS;
            }
    sim_unlock();
    return result;
}

static nvmlReturn_t open_mig(nvmlDevice_t device, struct nvml_target *target)
{
    NVML_TRY(nvml_open(device, NVML_ANY_DEVICE, target));
    return target->gi >= 0 ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

NVML_API nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t mig, nvmlDevice_t *parent)
{
    struct nvml_target target;
    NVML_TRY(open_mig(mig, &target));
    NVML_NEED(parent != NULL);
    *parent = nvml_gpu_handle(target.number);
    return NVML_SUCCESS;
}

static nvmlReturn_t instance_ids(nvmlDevice_t mig, unsigned *gi_id, unsigned *ci_id)
{
    struct nvml_target target;
    NVML_TRY(open_mig(mig, &target));
    sim_lock();
    const struct sim_mig_gi *gi = &target.gpu->gi[target.gi];
    *gi_id = gi->id;
    *ci_id = gi->ci[target.ci].id;
    sim_unlock();
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t mig, unsigned *id)
{
    unsigned other;
    NVML_NEED(id != NULL);
    return instance_ids(mig, id, &other);
}

NVML_API nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t mig, unsigned *id)
{
    unsigned other;
    NVML_NEED(id != NULL);
    return instance_ids(mig, &other, id);
}

NVML_API nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t mig, nvmlDeviceAttributes_t *attributes)
{
    struct nvml_target target;
    NVML_TRY(open_mig(mig, &target));
    NVML_NEED(attributes != NULL);
    sim_lock();
    const struct sim_mig_gi *gi = &target.gpu->gi[target.gi];
    const struct sim_mig_profile *profile = nvml_mig_profile(&target, gi->profile_id);
    unsigned slices = gi->ci[target.ci].slices;
    sim_unlock();
    if (profile == NULL)
        return NVML_ERROR_UNKNOWN;
    unsigned per_slice = target.gpu->arch >= SIM_HOPPER ? 16 : 14;
    *attributes = (nvmlDeviceAttributes_t){
        .multiprocessorCount = slices == profile->slices ? profile->sm_count : slices * per_slice,
        .sharedCopyEngineCount = profile->copy_engines,
        .sharedDecoderCount = profile->decoders,
        .sharedEncoderCount = profile->encoders,
        .sharedJpegCount = profile->jpegs,
        .sharedOfaCount = profile->ofas,
        .gpuInstanceSliceCount = profile->slices,
        .computeInstanceSliceCount = slices,
        .memorySizeMB = profile->memory_mib,
    };
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetAttributes(nvmlDevice_t mig, nvmlDeviceAttributes_t *attributes)
{
    return nvmlDeviceGetAttributes_v2(mig, attributes);
}
