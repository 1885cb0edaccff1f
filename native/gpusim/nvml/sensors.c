/* SPDX-License-Identifier: Apache-2.0 */
/* Implements NVML's functions for clocks, power, temperature and fan. The values are computed from constants of the
 * model and the present utilization, so that load is visible. */
#include "nvml_internal.h"

#include <stdbool.h>

#define IDLE_CELSIUS 30u
#define BUSY_CELSIUS 65u /* The temperature under constant full load. */

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

/* Idle clocks depend on the generation: data-centre boards do not lower their memory clock. */
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

#define CLOCK(name, kind)                                                                                              \
    NVML_API nvmlReturn_t name(nvmlDevice_t device, unsigned domain, unsigned *mhz)                                    \
    {                                                                                                                  \
        return nvmlDeviceGetClock(device, domain, NVML_CLOCK_ID_##kind, mhz);                                          \
    }
CLOCK(nvmlDeviceGetClockInfo, CURRENT)
CLOCK(nvmlDeviceGetMaxClockInfo, CUSTOMER_BOOST_MAX)
CLOCK(nvmlDeviceGetMaxCustomerBoostClock, CUSTOMER_BOOST_MAX)
CLOCK(nvmlDeviceGetApplicationsClock, APP_TARGET)
CLOCK(nvmlDeviceGetDefaultApplicationsClock, APP_DEFAULT)

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
    bool stacked = target.model->bus_width_bits > 1024; /* Only HBM memory reports a temperature. */
    if (kind > NVML_TEMPERATURE_THRESHOLD_GPU_MAX || (kind == NVML_TEMPERATURE_THRESHOLD_MEM_MAX && !stacked))
        return NVML_ERROR_NOT_SUPPORTED;
    *celsius = limits[kind];
    return NVML_SUCCESS;
}

NVML_GETTER(nvmlDeviceGetFanSpeed, unsigned, nvml_open(device, NVML_WHOLE_GPU, &target), target.model->fan,
            20 + load(&target) / 2)
NVML_WORD(nvmlDeviceGetNumFans, NVML_WHOLE_GPU, target.model->fan ? 1 : 0)

NVML_API nvmlReturn_t nvmlDeviceGetFanSpeed_v2(nvmlDevice_t device, unsigned fan, unsigned *percent)
{
    NVML_NEED(fan == 0);
    return nvmlDeviceGetFanSpeed(device, percent);
}

/* A100 and later data-centre boards stay in performance state P0; the others go to P8 when idle. */
NVML_WORD(nvmlDeviceGetPerformanceState, NVML_WHOLE_GPU, target.model->bus_width_bits > 1024 || load(&target) > 0 ? 0 : 8)
NVML_WORD(nvmlDeviceGetPowerState, NVML_WHOLE_GPU, target.model->bus_width_bits > 1024 || load(&target) > 0 ? 0 : 8)

NVML_WORD(nvmlDeviceGetPowerUsage, NVML_WHOLE_GPU, nvml_power_mw(&target))
NVML_GETTER(nvmlDeviceGetTotalEnergyConsumption, unsigned long long, nvml_open(device, NVML_WHOLE_GPU, &target),
            target.model->arch >= SIM_VOLTA, nvml_energy_mj(&target))

/* Defines both names: throttle reasons were renamed event reasons. */
#define REASONS(name, expression)                                                                                      \
    NVML_GETTER(name, unsigned long long, nvml_open(device, NVML_WHOLE_GPU, &target), true, expression)
REASONS(nvmlDeviceGetCurrentClocksThrottleReasons, load(&target) == 0 ? NVML_CLOCKS_REASON_GPU_IDLE : 0)
REASONS(nvmlDeviceGetCurrentClocksEventReasons, load(&target) == 0 ? NVML_CLOCKS_REASON_GPU_IDLE : 0)
REASONS(nvmlDeviceGetSupportedClocksThrottleReasons, NVML_CLOCKS_REASON_ALL)
REASONS(nvmlDeviceGetSupportedClocksEventReasons, NVML_CLOCKS_REASON_ALL)
