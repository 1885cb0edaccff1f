/* SPDX-License-Identifier: Apache-2.0 */
/* Implements nvmlDeviceGetFieldValues, one call that returns many figures, each with its own return code. */
#include "nvml_internal.h"

#include <stdbool.h>

enum field {
    FIELD_ECC_CURRENT = 1,
    FIELD_ECC_PENDING = 2,
    FIELD_ECC_SINGLE_VOLATILE = 3,
    FIELD_ECC_DOUBLE_VOLATILE = 4,
    FIELD_ECC_SINGLE_AGGREGATE = 5,
    FIELD_ECC_DOUBLE_AGGREGATE = 6,
    FIELD_RETIRED_SINGLE = 29,
    FIELD_RETIRED_DOUBLE = 30,
    FIELD_RETIRED_PENDING = 31,
    FIELD_MEMORY_TEMPERATURE = 82,
    FIELD_ENERGY = 83,
    FIELD_NVLINK_COUNT = 91,
    FIELD_PCIE_REPLAYS = 94,
    FIELD_PCIE_REPLAY_ROLLOVERS = 95,
    FIELD_REMAPPED_CORRECTED = 142,
    FIELD_REMAPPED_UNCORRECTED = 143,
    FIELD_REMAPPED_PENDING = 144,
    FIELD_REMAPPED_FAILURE = 145,
    FIELD_RESETLESS_MIG = 184,
    FIELD_POWER_AVERAGE = 185,
    FIELD_POWER_INSTANT = 186,
    FIELD_POWER_MINIMUM = 187,
    FIELD_POWER_MAXIMUM = 188,
    FIELD_POWER_DEFAULT = 189,
    FIELD_POWER_CURRENT = 190,
    FIELD_POWER_REQUESTED = 192,
};

/* Returns the energy used since the host's start, in mJ: at full power while kernels ran, else at idle power. */
unsigned long long nvml_energy_mj(const struct nvml_target *target)
{
    sim_lock();
    uint64_t now = sim_now();
    sim_advance(target->number, now);
    uint64_t up_ms = (now - sim_state()->boot_now) / 1000000, busy_ms = target->gpu->busy_ns / 1000000;
    sim_unlock();
    uint64_t idle = target->model->idle_power_mw, more = target->model->power_limit_mw - idle;
    return (idle * up_ms + more * busy_ms) / 1000;
}

static nvmlReturn_t ecc_field(const struct nvml_target *target, unsigned field, unsigned long long *value)
{
    const struct sim_gpu *gpu = target->gpu;
    if (!target->model->ecc)
        return NVML_ERROR_NOT_SUPPORTED;
    nvmlReturn_t result = NVML_SUCCESS;
    sim_lock();
    switch (field) {
    case FIELD_ECC_CURRENT:
        *value = gpu->ecc_mode;
        break;
    case FIELD_ECC_PENDING:
        *value = gpu->ecc_pending;
        break;
    default:
        if (gpu->ecc_mode == 0)
            result = NVML_ERROR_NOT_SUPPORTED;
        unsigned scope = field >= FIELD_ECC_SINGLE_AGGREGATE;
        bool corrected = field == FIELD_ECC_SINGLE_VOLATILE || field == FIELD_ECC_SINGLE_AGGREGATE;
        *value = corrected ? gpu->ecc_single[scope] : gpu->ecc_double[scope];
    }
    sim_unlock();
    return result;
}

/* Scope 0 is the GPU alone. Scope 1 is a module that combines GPU and processor; the simulated boards are no such
 * modules. */
static nvmlReturn_t power_field(const struct nvml_target *target, unsigned field, unsigned scope,
                                unsigned long long *value)
{
    if (scope == 1)
        return NVML_ERROR_NOT_SUPPORTED;
    unsigned limit = target->model->power_limit_mw;
    switch (field) {
    case FIELD_POWER_AVERAGE:
    case FIELD_POWER_INSTANT:
        *value = nvml_power_mw(target);
        return NVML_SUCCESS;
    case FIELD_POWER_MINIMUM:
        *value = limit / 4;
        return NVML_SUCCESS;
    case FIELD_POWER_MAXIMUM:
    case FIELD_POWER_DEFAULT:
        *value = limit;
        return NVML_SUCCESS;
    default:
        sim_lock();
        *value = target->gpu->power_limit_mw ? target->gpu->power_limit_mw : limit;
        sim_unlock();
        return NVML_SUCCESS;
    }
}

static nvmlReturn_t field_value(const struct nvml_target *target, unsigned field, unsigned scope,
                                unsigned long long *value)
{
    enum sim_arch arch = target->model->arch;
    *value = 0;
    switch (field) {
    case FIELD_ECC_CURRENT:
    case FIELD_ECC_PENDING:
    case FIELD_ECC_SINGLE_VOLATILE:
    case FIELD_ECC_DOUBLE_VOLATILE:
    case FIELD_ECC_SINGLE_AGGREGATE:
    case FIELD_ECC_DOUBLE_AGGREGATE:
        return ecc_field(target, field, value);
    case FIELD_RETIRED_SINGLE:
    case FIELD_RETIRED_DOUBLE:
    case FIELD_RETIRED_PENDING:
        return target->model->ecc && arch <= SIM_TURING ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
    case FIELD_REMAPPED_CORRECTED:
    case FIELD_REMAPPED_UNCORRECTED:
    case FIELD_REMAPPED_PENDING:
    case FIELD_REMAPPED_FAILURE:
        return arch >= SIM_AMPERE ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
    case FIELD_MEMORY_TEMPERATURE:
        *value = nvml_celsius(target) + 5;
        return target->model->bus_width_bits > 1024 ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
    case FIELD_ENERGY:
        *value = nvml_energy_mj(target);
        return arch >= SIM_VOLTA ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
    case FIELD_NVLINK_COUNT:
    case FIELD_PCIE_REPLAYS:
    case FIELD_PCIE_REPLAY_ROLLOVERS:
        return NVML_SUCCESS;
    case FIELD_RESETLESS_MIG:
        *value = arch >= SIM_HOPPER;
        return NVML_SUCCESS;
    case FIELD_POWER_AVERAGE:
    case FIELD_POWER_INSTANT:
    case FIELD_POWER_MINIMUM:
    case FIELD_POWER_MAXIMUM:
    case FIELD_POWER_DEFAULT:
    case FIELD_POWER_CURRENT:
    case FIELD_POWER_REQUESTED:
        return power_field(target, field, scope, value);
    default:
        return NVML_ERROR_NOT_SUPPORTED;
    }
}

static unsigned type_of(unsigned field)
{
    switch (field) {
    case FIELD_ECC_SINGLE_VOLATILE:
    case FIELD_ECC_DOUBLE_VOLATILE:
    case FIELD_ECC_SINGLE_AGGREGATE:
    case FIELD_ECC_DOUBLE_AGGREGATE:
    case FIELD_ENERGY:
        return NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
    default:
        return NVML_VALUE_TYPE_UNSIGNED_INT;
    }
}

NVML_API nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values)
{
    struct nvml_target target;
    NVML_TRY(nvml_open(device, NVML_WHOLE_GPU, &target));
    NVML_NEED(count > 0 && values != NULL);
    for (int i = 0; i < count; i++) {
        unsigned long long value;
        values[i].nvmlReturn = field_value(&target, values[i].fieldId, values[i].scopeId, &value);
        values[i].valueType = type_of(values[i].fieldId);
        values[i].timestamp = (long long)sim_wall_us(sim_now());
        values[i].latencyUsec = 0;
        values[i].value.ullVal = values[i].nvmlReturn == NVML_SUCCESS ? value : 0;
    }
    return NVML_SUCCESS;
}
