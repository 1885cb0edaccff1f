/* SPDX-License-Identifier: Apache-2.0 */
/* Implements NVML's functions for ECC mode and counters, retired pages and remapped rows. The only errors are those
 * that `gpusimctl ecc` injects; all of them are DRAM errors. */
#include "nvml_internal.h"

#include <stdbool.h>
#include <string.h>

static nvmlReturn_t open_ecc(nvmlDevice_t device, struct nvml_target *target)
{
    NVML_TRY(nvml_open(device, NVML_WHOLE_GPU, target));
    return target->model->ecc ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

NVML_API nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, unsigned *current, unsigned *pending)
{
    struct nvml_target target;
    NVML_TRY(open_ecc(device, &target));
    NVML_NEED(current != NULL && pending != NULL);
    sim_lock();
    *current = target.gpu->ecc_mode;
    *pending = target.gpu->ecc_pending;
    sim_unlock();
    return NVML_SUCCESS;
}

NVML_GETTER(nvmlDeviceGetDefaultEccMode, unsigned, open_ecc(device, &target), true, NVML_FEATURE_ENABLED)

/* A new ECC mode takes effect at the next reset, as on hardware. */
NVML_API nvmlReturn_t nvmlDeviceSetEccMode(nvmlDevice_t device, unsigned mode)
{
    struct nvml_target target;
    NVML_TRY(open_ecc(device, &target));
    NVML_NEED(mode <= NVML_FEATURE_ENABLED);
    NVML_TRY(nvml_root());
    sim_lock();
    target.gpu->ecc_pending = mode;
    sim_unlock();
    return NVML_SUCCESS;
}

/* A MIG device has ECC counters too, but they stay at 0, because injected errors count for the whole GPU only. */
static nvmlReturn_t open_counters(nvmlDevice_t device, struct nvml_target *target)
{
    NVML_TRY(nvml_open(device, NVML_ANY_DEVICE, target));
    if (!target->model->ecc)
        return NVML_ERROR_NOT_SUPPORTED;
    sim_lock();
    bool on = target->gpu->ecc_mode != 0;
    sim_unlock();
    return on ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

static unsigned long long counter(const struct nvml_target *target, unsigned type, unsigned scope)
{
    if (target->gi >= 0)
        return 0;
    sim_lock();
    const uint64_t *counters =
        type == NVML_MEMORY_ERROR_TYPE_CORRECTED ? target->gpu->ecc_single : target->gpu->ecc_double;
    unsigned long long count = counters[scope];
    sim_unlock();
    return count;
}

NVML_API nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, unsigned type, unsigned scope,
                                                  unsigned long long *count)
{
    struct nvml_target target;
    NVML_TRY(open_counters(device, &target));
    NVML_NEED(count != NULL && type <= 1 && scope <= 1);
    *count = counter(&target, type, scope);
    return NVML_SUCCESS;
}

/* Turing and later generations count errors by kind of memory (SRAM, DRAM), Volta by unit of the GPU. */
NVML_API nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device, unsigned type, unsigned scope,
                                                      unsigned location, unsigned long long *count)
{
    struct nvml_target target;
    NVML_TRY(open_counters(device, &target));
    NVML_NEED(count != NULL && type <= 1 && scope <= 1 && location < NVML_MEMORY_LOCATION_COUNT);
    bool by_unit = target.model->arch < SIM_TURING;
    if (location != NVML_MEMORY_LOCATION_DEVICE_MEMORY && by_unit == (location == NVML_MEMORY_LOCATION_SRAM))
        return NVML_ERROR_NOT_SUPPORTED;
    *count = location == NVML_MEMORY_LOCATION_DEVICE_MEMORY ? counter(&target, type, scope) : 0;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetDetailedEccErrors(nvmlDevice_t device, unsigned type, unsigned scope,
                                                     nvmlEccErrorCounts_t *counts)
{
    struct nvml_target target;
    NVML_TRY(open_counters(device, &target));
    NVML_NEED(counts != NULL && type <= 1 && scope <= 1);
    *counts = (nvmlEccErrorCounts_t){.deviceMemory = counter(&target, type, scope)};
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetSramEccErrorStatus(nvmlDevice_t device, nvmlEccSramErrorStatus_t *status)
{
    struct nvml_target target;
    NVML_TRY(open_counters(device, &target));
    NVML_NEED(status != NULL);
    if (status->version != NVML_STRUCT_VERSION(nvmlEccSramErrorStatus_t, 1))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (target.model->arch < SIM_AMPERE)
        return NVML_ERROR_NOT_SUPPORTED;
    *status = (nvmlEccSramErrorStatus_t){.version = status->version};
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceClearEccErrorCounts(nvmlDevice_t device, unsigned scope)
{
    struct nvml_target target;
    NVML_TRY(open_counters(device, &target));
    NVML_NEED(scope <= 1 && target.gi < 0);
    NVML_TRY(nvml_root());
    sim_lock();
    target.gpu->ecc_single[scope] = target.gpu->ecc_double[scope] = 0;
    sim_unlock();
    return NVML_SUCCESS;
}

/* Boards up to Turing retire pages, later ones remap rows. The simulation never does either: lists are empty. */
static nvmlReturn_t open_retiring(nvmlDevice_t device)
{
    struct nvml_target target;
    NVML_TRY(open_ecc(device, &target));
    return target.model->arch <= SIM_TURING ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

NVML_API nvmlReturn_t nvmlDeviceGetRetiredPages(nvmlDevice_t device, unsigned cause, unsigned *count,
                                                unsigned long long *addresses)
{
    (void)addresses;
    NVML_TRY(open_retiring(device));
    NVML_NEED(count != NULL && cause <= 1);
    *count = 0;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetRetiredPages_v2(nvmlDevice_t device, unsigned cause, unsigned *count,
                                                   unsigned long long *addresses, unsigned long long *timestamps)
{
    (void)timestamps;
    return nvmlDeviceGetRetiredPages(device, cause, count, addresses);
}

NVML_API nvmlReturn_t nvmlDeviceGetRetiredPagesPendingStatus(nvmlDevice_t device, unsigned *pending)
{
    NVML_TRY(open_retiring(device));
    NVML_NEED(pending != NULL);
    *pending = NVML_FEATURE_DISABLED;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned *corrected, unsigned *uncorrected,
                                                unsigned *pending, unsigned *failed)
{
    struct nvml_target target;
    NVML_TRY(open_ecc(device, &target));
    NVML_NEED(corrected != NULL && uncorrected != NULL && pending != NULL && failed != NULL);
    if (target.model->arch < SIM_AMPERE)
        return NVML_ERROR_NOT_SUPPORTED;
    *corrected = *uncorrected = *pending = *failed = 0;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetRowRemapperHistogram(nvmlDevice_t device, nvmlRowRemapperHistogram_t *histogram)
{
    struct nvml_target target;
    NVML_TRY(open_ecc(device, &target));
    NVML_NEED(histogram != NULL);
    if (target.model->arch < SIM_AMPERE)
        return NVML_ERROR_NOT_SUPPORTED;
    *histogram = (nvmlRowRemapperHistogram_t){.max = 640};
    return NVML_SUCCESS;
}
