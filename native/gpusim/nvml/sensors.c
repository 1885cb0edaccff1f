/* SPDX-License-Identifier: Apache-2.0 */
/* Clocks, power, temperature, fan: constants of the model, moved by utilisation so that load can be seen. */
#include "nvml_internal.h"

#include <stdbool.h>

#define IDLE_CELSIUS 30u
#define BUSY_CELSIUS 65u /* under full load, constantly */

static unsigned load(const struct nvml_target *target)
{
    unsigned gpu, memory;
    nvml_utilization(target, &gpu, &memory);
    return gpu;
}

unsigned nvml_power_mw(const struct nvml_target *target)
{
    unsigned idle = target->model->idle_power_mw, full = target->gpu->power_limit_mw;
    if (full == 0)
        full = target->model->power_limit_mw;
    return full > idle ? idle + (unsigned)((uint64_t)(full - idle) * load(target) / 100) : idle;
}

unsigned nvml_celsius(const struct nvml_target *target)
{
    return IDLE_CELSIUS + (BUSY_CELSIUS - IDLE_CELSIUS) * load(target) / 100;
}

/* Idle clocks by generation: data-centre boards keep their memory clock up. */
static unsigned clock_now(const struct nvml_target *target, unsigned domain)
{
    const struct sim_model *model = target->model;
    bool busy = load(target) > 0;
    switch (domain) {
    case NVML_CLOCK_GRAPHICS:
    case NVML_CLOCK_SM:
        return busy ? model->clock_sm_mhz : model->arch >= SIM_AMPERE ? 345 : 300;
    case NVML_CLOCK_MEM:
        return busy || model->bus_width_bits > 1024 ? model->clock_mem_mhz : 405;
    default:
        return busy ? model->clock_sm_mhz * 9 / 10 : 540;
    }
}

static unsigned clock_max(const struct nvml_target *target, unsigned domain)
{
    const struct sim_model *model = target->model;
    if (domain == NVML_CLOCK_MEM)
        return model->clock_mem_mhz;
    return domain == NVML_CLOCK_VIDEO ? model->clock_sm_mhz * 9 / 10 : model->clock_sm_mhz;
}

NVML_API nvmlReturn_t nvmlDeviceGetClock(nvmlDevice_t device, unsigned domain, unsigned kind, unsigned *mhz)
{
    struct nvml_target target;
    NVML_TRY(nvml_open(device, NVML_WHOLE_GPU, &target));
    NVML_NEED(mhz != NULL && domain <= NVML_CLOCK_VIDEO && kind <= NVML_CLOCK_ID_CUSTOMER_BOOST_MAX);
    *mhz = kind == NVML_CLOCK_ID_CURRENT ? clock_now(&target, domain) : clock_max(&target, domain);
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, unsigned domain, unsigned *mhz)
{
    return nvmlDeviceGetClock(device, domain, NVML_CLOCK_ID_CURRENT, mhz);
}

NVML_API nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, unsigned domain, unsigned *mhz)
{
    return nvmlDeviceGetClock(device, domain, NVML_CLOCK_ID_CUSTOMER_BOOST_MAX, mhz);
}

NVML_API nvmlReturn_t nvmlDeviceGetMaxCustomerBoostClock(nvmlDevice_t device, unsigned domain, unsigned *mhz)
{
    return nvmlDeviceGetClock(device, domain, NVML_CLOCK_ID_CUSTOMER_BOOST_MAX, mhz);
}

NVML_API nvmlReturn_t nvmlDeviceGetApplicationsClock(nvmlDevice_t device, unsigned domain, unsigned *mhz)
{
    return nvmlDeviceGetClock(device, domain, NVML_CLOCK_ID_APP_TARGET, mhz);
}

NVML_API nvmlReturn_t nvmlDeviceGetDefaultApplicationsClock(nvmlDevice_t device, unsigned domain, unsigned *mhz)
{
    return nvmlDeviceGetClock(device, domain, NVML_CLOCK_ID_APP_DEFAULT, mhz);
}

static nvmlReturn_t one_clock(nvmlDevice_t device, unsigned domain, unsigned *count, unsigned *mhz)
{
    struct nvml_target target;
    NVML_TRY(nvml_open(device, NVML_WHOLE_GPU, &target));
    NVML_NEED(count != NULL);
    unsigned room = *count;
    *count = 1;
    if (room < 1)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    NVML_NEED(mhz != NULL);
    mhz[0] = clock_max(&target, domain);
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetSupportedMemoryClocks(nvmlDevice_t device, unsigned *count, unsigned *mhz)
{
    return one_clock(device, NVML_CLOCK_MEM, count, mhz);
}

NVML_API nvmlReturn_t nvmlDeviceGetSupportedGraphicsClocks(nvmlDevice_t device, unsigned memory_mhz, unsigned *count,
                                                           unsigned *mhz)
{
    struct nvml_target target;
    NVML_TRY(nvml_open(device, NVML_WHOLE_GPU, &target));
    if (memory_mhz != target.model->clock_mem_mhz)
        return NVML_ERROR_NOT_FOUND;
    return one_clock(device, NVML_CLOCK_GRAPHICS, count, mhz);
}

NVML_API nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned sensor, unsigned *celsius)
{
    struct nvml_target target;
    NVML_TRY(nvml_open(device, NVML_WHOLE_GPU, &target));
    NVML_NEED(celsius != NULL && sensor == 0);
    *celsius = nvml_celsius(&target);
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, unsigned kind, unsigned *celsius)
{
    static const unsigned limits[] = {
        [NVML_TEMPERATURE_THRESHOLD_SHUTDOWN] = 96,
        [NVML_TEMPERATURE_THRESHOLD_SLOWDOWN] = 93,
        [NVML_TEMPERATURE_THRESHOLD_MEM_MAX] = 95,
        [NVML_TEMPERATURE_THRESHOLD_GPU_MAX] = 85,
    };
    struct nvml_target target;
    NVML_TRY(nvml_open(device, NVML_WHOLE_GPU, &target));
    NVML_NEED(celsius != NULL);
    bool stacked = target.model->bus_width_bits > 1024; /* only HBM reports a temperature of its own */
    if (kind > NVML_TEMPERATURE_THRESHOLD_GPU_MAX || (kind == NVML_TEMPERATURE_THRESHOLD_MEM_MAX && !stacked))
        return NVML_ERROR_NOT_SUPPORTED;
    *celsius = limits[kind];
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetFanSpeed(nvmlDevice_t device, unsigned *percent)
{
    struct nvml_target target;
    NVML_TRY(nvml_open(device, NVML_WHOLE_GPU, &target));
    NVML_NEED(percent != NULL);
    if (!target.model->fan)
        return NVML_ERROR_NOT_SUPPORTED;
    *percent = 20 + load(&target) / 2;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetFanSpeed_v2(nvmlDevice_t device, unsigned fan, unsigned *percent)
{
    NVML_NEED(fan == 0);
    return nvmlDeviceGetFanSpeed(device, percent);
}

NVML_API nvmlReturn_t nvmlDeviceGetNumFans(nvmlDevice_t device, unsigned *fans)
{
    struct nvml_target target;
    NVML_TRY(nvml_open(device, NVML_WHOLE_GPU, &target));
    NVML_NEED(fans != NULL);
    *fans = target.model->fan ? 1 : 0;
    return NVML_SUCCESS;
}

/* The boards of the A100 line and later stay in P0; the others sink to P8 when idle. */
NVML_API nvmlReturn_t nvmlDeviceGetPerformanceState(nvmlDevice_t device, unsigned *state)
{
    struct nvml_target target;
    NVML_TRY(nvml_open(device, NVML_WHOLE_GPU, &target));
    NVML_NEED(state != NULL);
    *state = target.model->bus_width_bits > 1024 || load(&target) > 0 ? 0 : 8;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetPowerState(nvmlDevice_t device, unsigned *state)
{
    return nvmlDeviceGetPerformanceState(device, state);
}

NVML_API nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned *milliwatts)
{
    struct nvml_target target;
    NVML_TRY(nvml_open(device, NVML_WHOLE_GPU, &target));
    NVML_NEED(milliwatts != NULL);
    *milliwatts = nvml_power_mw(&target);
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, unsigned long long *millijoules)
{
    struct nvml_target target;
    NVML_TRY(nvml_open(device, NVML_WHOLE_GPU, &target));
    NVML_NEED(millijoules != NULL);
    if (target.model->arch < SIM_VOLTA)
        return NVML_ERROR_NOT_SUPPORTED;
    *millijoules = nvml_energy_mj(&target);
    return NVML_SUCCESS;
}

static nvmlReturn_t idle_reason(nvmlDevice_t device, unsigned long long *reasons, bool all)
{
    struct nvml_target target;
    NVML_TRY(nvml_open(device, NVML_WHOLE_GPU, &target));
    NVML_NEED(reasons != NULL);
    *reasons = all ? NVML_CLOCKS_REASON_ALL : load(&target) == 0 ? NVML_CLOCKS_REASON_GPU_IDLE : 0;
    return NVML_SUCCESS;
}

/* Throttle reasons were renamed event reasons; both names stay. */
NVML_API nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    return idle_reason(device, reasons, false);
}

NVML_API nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    return idle_reason(device, reasons, false);
}

NVML_API nvmlReturn_t nvmlDeviceGetSupportedClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    return idle_reason(device, reasons, true);
}

NVML_API nvmlReturn_t nvmlDeviceGetSupportedClocksEventReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    return idle_reason(device, reasons, true);
}
