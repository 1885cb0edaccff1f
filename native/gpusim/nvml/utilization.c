/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Implements NVML's functions for utilization. They read the ring of samples that the simulation of the GPU fills. As
 * in the driver, a sample is taken every 139 ms, the last 72 are shown, and each names the one process whose context
 * ran on the GPU at that moment.
 *
 * A process's utilization over a window is (sum of the samples that name the process) / (number of samples in the
 * window). This estimate is noisy on purpose; `gpusimctl log` has the exact run times.
 */
#include "nvml_internal.h"

#include <stdlib.h>
#include <string.h>

#define PERCENT(permyriad) ((permyriad) / 100u)

/* Copies the samples newer than last_us, oldest first, and returns their number. */
static unsigned newer(const struct nvml_target *target, unsigned long long last_us, struct sim_sample *samples)
{
    const struct sim_gpu *gpu = target->gpu;
    unsigned found = 0;
    sim_lock();
    sim_reap();
    sim_advance(target->number, sim_now());
    uint64_t kept = gpu->sample_count < SIM_SAMPLES_NVML ? gpu->sample_count : SIM_SAMPLES_NVML;
    for (uint64_t i = gpu->sample_count - kept; i < gpu->sample_count; i++) {
        struct sim_sample sample = gpu->samples[i % SIM_SAMPLES];
        if (sim_wall_us(sample.time) <= last_us)
            continue;
        bool alive = sample.slot >= 0 && sim_state()->procs[sample.slot].serial == sample.serial &&
                     sim_state()->procs[sample.slot].role != SIM_ROLE_NONE;
        sample.pid = alive ? sim_proc_pid(sample.slot) : 0;
        samples[found++] = sample;
    }
    sim_unlock();
    return found;
}

void nvml_utilization(const struct nvml_target *target, unsigned *gpu_percent, unsigned *memory_percent)
{
    struct sim_sample samples[SIM_SAMPLES_NVML];
    unsigned count = newer(target, 0, samples);
    *gpu_percent = count ? PERCENT(samples[count - 1].sm_util) : 0;
    *memory_percent = count ? PERCENT(samples[count - 1].mem_util) : 0;
}

/* Refuses a GPU with MIG on: utilization belongs to the instances, for which this driver has no figures. */
static nvmlReturn_t open_measured(nvmlDevice_t device, struct nvml_target *target)
{
    NVML_TRY(nvml_open(device, NVML_WHOLE_GPU, target));
    sim_lock();
    bool mig = target->gpu->mig_mode != 0;
    sim_unlock();
    return mig ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization)
{
    struct nvml_target target;
    NVML_TRY(open_measured(device, &target));
    NVML_NEED(utilization != NULL);
    nvml_utilization(&target, &utilization->gpu, &utilization->memory);
    return NVML_SUCCESS;
}

/* Video engines are not simulated and always idle, sampled every 167 ms. JPEG and optical-flow engines exist since
 * Ampere. */
#define IDLE_ENGINE(name, oldest)                                                                                      \
    NVML_API nvmlReturn_t name(nvmlDevice_t device, unsigned *percent, unsigned *period_us)                            \
    {                                                                                                                  \
        struct nvml_target target;                                                                                     \
        NVML_TRY(open_measured(device, &target));                                                                      \
        if (target.model->arch < (oldest))                                                                             \
            return NVML_ERROR_NOT_SUPPORTED;                                                                           \
        NVML_NEED(percent != NULL && period_us != NULL);                                                               \
        *percent = 0;                                                                                                  \
        *period_us = 167000;                                                                                           \
        return NVML_SUCCESS;                                                                                           \
    }
IDLE_ENGINE(nvmlDeviceGetEncoderUtilization, SIM_PASCAL)
IDLE_ENGINE(nvmlDeviceGetDecoderUtilization, SIM_PASCAL)
IDLE_ENGINE(nvmlDeviceGetJpgUtilization, SIM_AMPERE)
IDLE_ENGINE(nvmlDeviceGetOfaUtilization, SIM_AMPERE)

/* The simulation has no encoder sessions. */
NVML_API nvmlReturn_t nvmlDeviceGetEncoderStats(nvmlDevice_t device, unsigned *sessions, unsigned *frames,
                                                unsigned *latency)
{
    struct nvml_target target;
    NVML_TRY(open_measured(device, &target));
    NVML_NEED(sessions != NULL && frames != NULL && latency != NULL);
    *sessions = *frames = *latency = 0;
    return NVML_SUCCESS;
}

/* Returns no traffic: the bytes of copies are not counted. */
NVML_API nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, unsigned counter, unsigned *kib_per_s)
{
    struct nvml_target target;
    NVML_TRY(open_measured(device, &target));
    NVML_NEED(kib_per_s != NULL && counter <= 1);
    *kib_per_s = 0;
    return NVML_SUCCESS;
}

static int by_pid(const void *a, const void *b)
{
    int first = ((const struct sim_sample *)a)->pid, second = ((const struct sim_sample *)b)->pid;
    return (first > second) - (first < second);
}

/* Adds one entry for each process that a sample newer than last_us names; list has room for SIM_SAMPLES_NVML. */
static unsigned by_process(const struct nvml_target *target, unsigned long long last_us,
                           nvmlProcessUtilizationSample_t *list)
{
    struct sim_sample samples[SIM_SAMPLES_NVML];
    unsigned count = newer(target, last_us, samples), found = 0;
    qsort(samples, count, sizeof samples[0], by_pid);
    for (unsigned i = 0, end; i < count; i = end) {
        unsigned long long sm = 0, memory = 0;
        uint64_t newest = 0;
        for (end = i; end < count && samples[end].pid == samples[i].pid; end++) {
            sm += samples[end].sm_util;
            memory += samples[end].mem_util;
            newest = samples[end].time > newest ? samples[end].time : newest;
        }
        if (samples[i].pid > 0)
            list[found++] = (nvmlProcessUtilizationSample_t){.pid = (unsigned)samples[i].pid,
                                                             .timeStamp = sim_wall_us(newest),
                                                             .smUtil = (unsigned)PERCENT(sm / count),
                                                             .memUtil = (unsigned)PERCENT(memory / count)};
    }
    return found;
}

/* Without a buffer the function returns, as the driver does, a number of entries that is always sufficient. */
NVML_API nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *buffer,
                                                      unsigned *count, unsigned long long last_us)
{
    struct nvml_target target;
    nvmlProcessUtilizationSample_t list[SIM_SAMPLES_NVML];
    NVML_TRY(open_measured(device, &target));
    NVML_NEED(count != NULL);
    unsigned found = by_process(&target, last_us, list), room = *count;
    if (found == 0) {
        *count = 0;
        return NVML_ERROR_NOT_FOUND;
    }
    if (buffer == NULL) {
        *count = SIM_SAMPLES_NVML;
        return NVML_ERROR_INSUFFICIENT_SIZE;
    }
    *count = found;
    if (found > room)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    memcpy(buffer, list, found * sizeof *list);
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device, nvmlProcessesUtilizationInfo_t *info)
{
    struct nvml_target target;
    nvmlProcessUtilizationSample_t list[SIM_SAMPLES_NVML];
    NVML_TRY(open_measured(device, &target));
    NVML_NEED(info != NULL);
    if (info->version != NVML_STRUCT_VERSION(nvmlProcessesUtilizationInfo_t, 1))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    unsigned found = by_process(&target, info->lastSeenTimeStamp, list), room = info->processSamplesCount;
    info->processSamplesCount = found;
    if (found == 0)
        return NVML_ERROR_NOT_FOUND;
    if (found > room || info->procUtilArray == NULL)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < found; i++)
        info->procUtilArray[i] = (nvmlProcessUtilizationInfo_t){.timeStamp = list[i].timeStamp, .pid = list[i].pid,
                                                                .smUtil = list[i].smUtil, .memUtil = list[i].memUtil};
    return NVML_SUCCESS;
}

enum { SAMPLES_POWER = 0, SAMPLES_GPU, SAMPLES_MEMORY, SAMPLES_ENCODER, SAMPLES_DECODER, SAMPLES_SM_CLOCK, SAMPLES_MEM_CLOCK };

static unsigned sample_value(const struct nvml_target *target, unsigned type, const struct sim_sample *sample)
{
    const struct sim_model *model = target->model;
    switch (type) {
    case SAMPLES_POWER:
        return model->idle_power_mw +
               (unsigned)((uint64_t)(model->power_limit_mw - model->idle_power_mw) * sample->sm_util / 10000);
    case SAMPLES_GPU:
        return PERCENT(sample->sm_util);
    case SAMPLES_MEMORY:
        return PERCENT(sample->mem_util);
    case SAMPLES_SM_CLOCK:
        return model->clock_sm_mhz;
    case SAMPLES_MEM_CLOCK:
        return model->clock_mem_mhz;
    default:
        return 0;
    }
}

NVML_API nvmlReturn_t nvmlDeviceGetSamples(nvmlDevice_t device, unsigned type, unsigned long long last_us,
                                           unsigned *value_type, unsigned *count, nvmlSample_t *buffer)
{
    struct nvml_target target;
    struct sim_sample samples[SIM_SAMPLES_NVML];
    NVML_TRY(open_measured(device, &target));
    NVML_NEED(value_type != NULL && count != NULL && type <= SAMPLES_MEM_CLOCK);
    *value_type = NVML_VALUE_TYPE_UNSIGNED_INT;
    if (buffer == NULL) {
        *count = SIM_SAMPLES_NVML;
        return NVML_SUCCESS;
    }
    unsigned found = newer(&target, last_us, samples);
    if (found == 0)
        return NVML_ERROR_NOT_FOUND;
    unsigned skip = found > *count ? found - *count : 0; /* If there is too little room, return the newest samples. */
    *count = found - skip;
    for (unsigned i = skip; i < found; i++)
        buffer[i - skip] = (nvmlSample_t){.timeStamp = sim_wall_us(samples[i].time),
                                          .sampleValue.uiVal = sample_value(&target, type, &samples[i])};
    return NVML_SUCCESS;
}
