/* SPDX-License-Identifier: Apache-2.0 */
/* Implements NVML's functions for the settings of an administrator: persistence, compute mode, power limit, clocks. All
 * setters need root. */
#include "nvml_internal.h"

#include <stdbool.h>

/* read_word() and write_word() access one word of sim_gpu. */
static nvmlReturn_t read_word(nvmlDevice_t device, size_t offset, unsigned *value)
{
    struct nvml_target target;
    NVML_TRY(nvml_open(device, NVML_WHOLE_GPU, &target));
    NVML_NEED(value != NULL);
    sim_lock();
    *value = *(const uint32_t *)((const char *)target.gpu + offset);
    sim_unlock();
    return NVML_SUCCESS;
}

static nvmlReturn_t write_word(nvmlDevice_t device, size_t offset, unsigned value)
{
    struct nvml_target target;
    NVML_TRY(nvml_open(device, NVML_WHOLE_GPU, &target));
    NVML_TRY(nvml_root());
    sim_lock();
    *(uint32_t *)((char *)target.gpu + offset) = value;
    sim_unlock();
    return NVML_SUCCESS;
}

#define WORD(field) offsetof(struct sim_gpu, field)

NVML_API nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, unsigned *mode)
{
    return read_word(device, WORD(persistence), mode);
}

NVML_API nvmlReturn_t nvmlDeviceSetPersistenceMode(nvmlDevice_t device, unsigned mode)
{
    NVML_NEED(mode <= NVML_FEATURE_ENABLED);
    return write_word(device, WORD(persistence), mode);
}

NVML_API nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, unsigned *mode)
{
    struct nvml_target target;
    NVML_TRY(nvml_open(device, NVML_ANY_DEVICE, &target));
    return read_word(nvml_gpu_handle(target.number), WORD(compute_mode), mode);
}

/* CUDA 8 removed EXCLUSIVE_THREAD. With MIG on, the mode cannot be changed. */
NVML_API nvmlReturn_t nvmlDeviceSetComputeMode(nvmlDevice_t device, unsigned mode)
{
    struct nvml_target target;
    NVML_NEED(mode <= NVML_COMPUTEMODE_EXCLUSIVE_PROCESS);
    NVML_TRY(nvml_open(device, NVML_WHOLE_GPU, &target));
    sim_lock();
    bool mig = target.gpu->mig_mode != 0;
    sim_unlock();
    if (mode == NVML_COMPUTEMODE_EXCLUSIVE_THREAD || mig)
        return NVML_ERROR_NOT_SUPPORTED;
    return write_word(device, WORD(compute_mode), mode);
}

NVML_WORD(nvmlDeviceGetPowerManagementMode, NVML_WHOLE_GPU, NVML_FEATURE_ENABLED)
NVML_WORD(nvmlDeviceGetPowerManagementDefaultLimit, NVML_WHOLE_GPU, target.model->power_limit_mw)

NVML_API nvmlReturn_t nvmlDeviceGetPowerManagementLimit(nvmlDevice_t device, unsigned *milliwatts)
{
    NVML_TRY(read_word(device, WORD(power_limit_mw), milliwatts));
    return *milliwatts != 0 ? NVML_SUCCESS : nvmlDeviceGetPowerManagementDefaultLimit(device, milliwatts);
}

NVML_API nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned *milliwatts)
{
    return nvmlDeviceGetPowerManagementLimit(device, milliwatts);
}

NVML_API nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t device, unsigned *minimum,
                                                                   unsigned *maximum)
{
    NVML_NEED(minimum != NULL);
    NVML_TRY(nvmlDeviceGetPowerManagementDefaultLimit(device, maximum));
    *minimum = *maximum / 4;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceSetPowerManagementLimit(nvmlDevice_t device, unsigned milliwatts)
{
    unsigned minimum, maximum;
    NVML_TRY(nvmlDeviceGetPowerManagementLimitConstraints(device, &minimum, &maximum));
    NVML_NEED(milliwatts >= minimum && milliwatts <= maximum);
    return write_word(device, WORD(power_limit_mw), milliwatts);
}

NVML_API nvmlReturn_t nvmlDeviceSetPowerManagementLimit_v2(nvmlDevice_t device, nvmlPowerValue_v2_t *value)
{
    NVML_NEED(value != NULL);
    if (value->version != NVML_STRUCT_VERSION(nvmlPowerValue_v2_t, 2))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (value->powerScope != 0)
        return NVML_ERROR_NOT_SUPPORTED;
    return nvmlDeviceSetPowerManagementLimit(device, value->powerValueMw);
}

/* Reports both APIs as restricted to root. Only Kepler and Maxwell boards have auto boost. */
NVML_API nvmlReturn_t nvmlDeviceGetAPIRestriction(nvmlDevice_t device, unsigned api, unsigned *restricted)
{
    struct nvml_target target;
    NVML_TRY(nvml_open(device, NVML_WHOLE_GPU, &target));
    NVML_NEED(restricted != NULL && api <= 1);
    *restricted = NVML_FEATURE_ENABLED;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetGspFirmwareMode(nvmlDevice_t device, unsigned *enabled, unsigned *by_default)
{
    struct nvml_target target;
    NVML_TRY(nvml_open(device, NVML_WHOLE_GPU, &target));
    NVML_NEED(enabled != NULL && by_default != NULL);
    *enabled = *by_default = target.model->arch >= SIM_TURING;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetGspFirmwareVersion(nvmlDevice_t device, char *version)
{
    struct nvml_target target;
    NVML_TRY(nvml_open(device, NVML_WHOLE_GPU, &target));
    if (target.model->arch < SIM_TURING)
        return NVML_ERROR_NOT_SUPPORTED;
    return nvml_text(sim_state()->driver_version, version, 80);
}
