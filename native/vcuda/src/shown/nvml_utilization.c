/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Computes NVML's utilisation figures for a container. They show the GPU use of the container's own processes, relative
 * to its share of SM time, so 100 % is the whole share. A container can get more than its share if no other container
 * needs the GPU. Then the figures still show 100.
 *
 * The driver samples processes by pid. The driver's figures are used if the driver's own list of processes contains the
 * container's pids. If that list has other pids (the host's) or none, the container's utilisation is unknown. Then the
 * functions return NOT_SUPPORTED, because they must never show the load of other containers.
 */
#include "nvml_shown.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

/* NVML's own utilisation rates cover at most the last second, so the hooks (replacements of NVML functions) look back
 * for one second. */
#define LOOK_BACK_US 1000000ull
/* Number of samples for which there is room; a driver keeps fewer. */
#define RING 256u

/* The container's processes on a device, and its share. */
struct account_of {
    struct own_process *processes;
    int count;
    unsigned share; /* Share of SM time in percent, 1 to 100. */
};

static void forget(struct account_of *account)
{
    free(account->processes);
}

static bool is_own(const struct account_of *account, unsigned pid)
{
    for (int i = 0; i < account->count; i++)
        if (account->processes[i].pid == pid)
            return true;
    return false;
}

static unsigned relative(const struct account_of *account, unsigned percent)
{
    unsigned long long scaled = (unsigned long long)percent * 100 / account->share;
    return scaled < 100 ? (unsigned)scaled : 100;
}

/* Returns true if the driver's own list contains one of the container's processes, so that the driver knows the
 * container's pids. */
static bool driver_knows_us(const struct account_of *account, nvmlDevice_t device)
{
    __typeof__(&nvmlDeviceGetComputeRunningProcesses_v3) list = REAL(nvmlDeviceGetComputeRunningProcesses_v3);
    if (!list)
        list = REAL(nvmlDeviceGetComputeRunningProcesses_v2);
    unsigned count = 0;
    bool known = account->count == 0;
    for (int attempt = 0; list && !known && attempt < 4; attempt++) {
        unsigned room = count + 64;
        nvmlProcessInfo_t *found = calloc(room, sizeof *found);
        count = room;
        nvmlReturn_t status = found ? list(device, &count, found) : NVML_ERROR_MEMORY;
        for (unsigned i = 0; status == NVML_SUCCESS && i < count; i++)
            known = known || is_own(account, found[i].pid);
        free(found);
        if (status != NVML_ERROR_INSUFFICIENT_SIZE)
            break;
    }
    return known;
}

/* Reads the container's processes. The caller must call forget() in every case, also after an error. */
static nvmlReturn_t open_account(enum control control, nvmlDevice_t device, struct account_of *account)
{
    struct part parts[VGPU_MAX_DEVICES];
    *account = (struct account_of){.share = 100};
    int count = nvml_parts(control, device, parts);
    if (count == 0)
        return NVML_ERROR_NO_PERMISSION;
    account->count = nvml_own_processes(control, device, &account->processes);
    if (count < 0 || account->count < 0)
        account->count = 0; /* If there is no ledger, no process of the container has a context. */
    unsigned share = count == 1 && limits_core_policy() != VGPU_CORE_DISABLE
                         ? limits_sm_percent(parts[0].uuid, parts[0].nvml_index)
                         : 0;
    if (share)
        account->share = share;
    return driver_knows_us(account, device) ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

/* Reads the driver's samples of all processes since the time `since`; the caller frees *list. Returns NOT_FOUND if no
 * process was sampled. */
static nvmlReturn_t driver_samples(nvmlDevice_t device, unsigned long long since, nvmlProcessUtilizationSample_t **list,
                                   unsigned *count)
{
    *list = NULL;
    *count = 0;
    if (!REAL_HAS(nvmlDeviceGetProcessUtilization))
        return NVML_ERROR_NOT_SUPPORTED;
    nvmlReturn_t status = REAL(nvmlDeviceGetProcessUtilization)(device, NULL, count, since);
    for (int attempt = 0; status == NVML_ERROR_INSUFFICIENT_SIZE && attempt < 4; attempt++) {
        *count += 16;
        free(*list);
        *list = calloc(*count, sizeof **list);
        status = *list ? REAL(nvmlDeviceGetProcessUtilization)(device, *list, count, since) : NVML_ERROR_MEMORY;
    }
    if (!*list)
        /* Without a list there are no samples, whatever the driver has written to *count. */
        *count = 0;
    return status;
}

/* Reads the samples of the container's own processes and scales them by its share. Samples of other processes are
 * removed. */
static nvmlReturn_t own_samples(const struct account_of *account, nvmlDevice_t device, unsigned long long since,
                                nvmlProcessUtilizationSample_t **list, unsigned *count)
{
    unsigned kept = 0;
    nvmlReturn_t status = driver_samples(device, since, list, count);
    if (status != NVML_SUCCESS)
        return status;
    for (unsigned i = 0; i < *count; i++) {
        if (!is_own(account, (*list)[i].pid))
            continue;
        (*list)[kept] = (*list)[i];
        (*list)[kept].smUtil = relative(account, (*list)[i].smUtil);
        (*list)[kept++].memUtil = relative(account, (*list)[i].memUtil);
    }
    *count = kept;
    return kept ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

/* Returns the sum over all of the container's processes. The values are scaled and rounded before the addition, so
 * their sum could exceed 100. It is therefore limited to 100. */
static nvmlReturn_t together(const struct account_of *account, nvmlDevice_t device, unsigned long long since,
                             nvmlUtilization_t *sum)
{
    nvmlProcessUtilizationSample_t *list;
    unsigned count;
    *sum = (nvmlUtilization_t){0, 0};
    nvmlReturn_t status = own_samples(account, device, since, &list, &count);
    for (unsigned i = 0; status == NVML_SUCCESS && i < count; i++) {
        sum->gpu += list[i].smUtil;
        sum->memory += list[i].memUtil;
    }
    free(list);
    sum->gpu = sum->gpu < 100 ? sum->gpu : 100;
    sum->memory = sum->memory < 100 ? sum->memory : 100;
    return status == NVML_ERROR_NOT_FOUND ? NVML_SUCCESS : status;
}

/* Returns the current time of the driver's clock: the time of the card's newest sample. The driver takes samples even
 * if the GPU is idle. */
static unsigned long long driver_now(nvmlDevice_t device)
{
    unsigned type, count = RING;
    struct timespec now;
    nvmlSample_t *samples = calloc(count, sizeof *samples);
    unsigned long long newest = 0;
    if (samples && REAL_HAS(nvmlDeviceGetSamples) &&
        REAL(nvmlDeviceGetSamples)(device, NVML_GPU_UTILIZATION_SAMPLES, 0, &type, &count, samples) == NVML_SUCCESS)
        for (unsigned i = 0; i < count && i < RING; i++)
            newest = samples[i].timeStamp > newest ? samples[i].timeStamp : newest;
    free(samples);
    if (newest)
        return newest;
    clock_gettime(CLOCK_REALTIME, &now);
    return (unsigned long long)now.tv_sec * 1000000 + (unsigned long long)now.tv_nsec / 1000;
}

EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization)
{
    ENTER_NVML(nvmlDeviceGetUtilizationRates, (device, utilization));
    struct account_of account;
    nvmlReturn_t status = REAL(nvmlDeviceGetUtilizationRates)(device, utilization);
    if (status != NVML_SUCCESS)
        return status;
    status = open_account(control, device, &account);
    if (status == NVML_SUCCESS)
        status = together(&account, device, driver_now(device) - LOOK_BACK_US, utilization);
    if (status != NVML_SUCCESS)
        *utilization = (nvmlUtilization_t){0, 0};
    forget(&account);
    return status;
}

EXPORT nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples,
                                                    unsigned int *count, unsigned long long since)
{
    ENTER_NVML(nvmlDeviceGetProcessUtilization, (device, samples, count, since));
    struct account_of account;
    nvmlProcessUtilizationSample_t *own = NULL;
    unsigned found = 0;
    if (!count)
        return REAL(nvmlDeviceGetProcessUtilization)(device, samples, count, since);
    nvmlReturn_t status = open_account(control, device, &account);
    if (status == NVML_SUCCESS)
        status = own_samples(&account, device, since, &own, &found);
    forget(&account);
    unsigned room = samples ? *count : 0;
    *count = found;
    if (status == NVML_SUCCESS && found > room)
        status = NVML_ERROR_INSUFFICIENT_SIZE;
    if (status == NVML_SUCCESS)
        memcpy(samples, own, found * sizeof *own);
    free(own);
    return status;
}

EXPORT nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device, nvmlProcessesUtilizationInfo_t *info)
{
    ENTER_NVML(nvmlDeviceGetProcessesUtilizationInfo, (device, info));
    struct account_of account;
    if (!info)
        return REAL(nvmlDeviceGetProcessesUtilizationInfo)(device, info);
    if (info->version != NVML_STRUCT_VERSION(nvmlProcessesUtilizationInfo_t, 1))
        /* A later version has entries of another size, so it is not supported. */
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    nvmlProcessesUtilizationInfo_t all = *info;
    all.processSamplesCount = 0;
    all.procUtilArray = NULL;
    nvmlReturn_t status = open_account(control, device, &account);
    if (status == NVML_SUCCESS)
        status = REAL(nvmlDeviceGetProcessesUtilizationInfo)(device, &all);
    for (int attempt = 0; status == NVML_ERROR_INSUFFICIENT_SIZE && attempt < 4; attempt++) {
        all.processSamplesCount += 16;
        free(all.procUtilArray);
        all.procUtilArray = calloc(all.processSamplesCount, sizeof *all.procUtilArray);
        status = all.procUtilArray ? REAL(nvmlDeviceGetProcessesUtilizationInfo)(device, &all) : NVML_ERROR_MEMORY;
    }
    unsigned kept = 0;
    for (unsigned i = 0; status == NVML_SUCCESS && all.procUtilArray && i < all.processSamplesCount; i++) {
        if (!is_own(&account, all.procUtilArray[i].pid))
            continue;
        all.procUtilArray[kept] = all.procUtilArray[i];
        all.procUtilArray[kept].smUtil = relative(&account, all.procUtilArray[i].smUtil);
        all.procUtilArray[kept].memUtil = relative(&account, all.procUtilArray[i].memUtil);
        kept++;
    }
    forget(&account);
    unsigned room = info->procUtilArray ? info->processSamplesCount : 0;
    info->processSamplesCount = kept;
    if (status == NVML_SUCCESS && kept == 0)
        status = NVML_ERROR_NOT_FOUND;
    else if (status == NVML_SUCCESS && kept > room)
        status = NVML_ERROR_INSUFFICIENT_SIZE;
    if (status == NVML_SUCCESS)
        memcpy(info->procUtilArray, all.procUtilArray, kept * sizeof *all.procUtilArray);
    free(all.procUtilArray);
    return status;
}

/*
 * The driver's samples are of the whole card and name no process. So each of them is replaced by the container's
 * utilisation since the time `since`. Samples of power, clocks and other values remain the card's.
 */
EXPORT nvmlReturn_t nvmlDeviceGetSamples(nvmlDevice_t device, unsigned int type, unsigned long long since,
                                         unsigned int *value_type, unsigned int *count, nvmlSample_t *samples)
{
    ENTER_NVML(nvmlDeviceGetSamples, (device, type, since, value_type, count, samples));
    struct account_of account;
    nvmlUtilization_t mean;
    nvmlReturn_t status = REAL(nvmlDeviceGetSamples)(device, type, since, value_type, count, samples);
    if (status != NVML_SUCCESS || !samples || (type != NVML_GPU_UTILIZATION_SAMPLES && type != NVML_MEMORY_UTILIZATION_SAMPLES))
        return status;
    status = open_account(control, device, &account);
    if (status == NVML_SUCCESS)
        status = together(&account, device, since, &mean);
    forget(&account);
    *value_type = NVML_VALUE_TYPE_UNSIGNED_INT;
    for (unsigned i = 0; i < *count; i++)
        samples[i].sampleValue = (nvmlValue_t){.ullVal = 0};
    for (unsigned i = 0; status == NVML_SUCCESS && i < *count; i++)
        samples[i].sampleValue.uiVal = type == NVML_GPU_UTILIZATION_SAMPLES ? mean.gpu : mean.memory;
    return status;
}

/* --- accounting: only the container's live processes, because the driver does not report whose ended processes were */

EXPORT nvmlReturn_t nvmlDeviceGetAccountingPids(nvmlDevice_t device, unsigned int *count, unsigned int *pids)
{
    ENTER_NVML(nvmlDeviceGetAccountingPids, (device, count, pids));
    struct account_of account;
    if (!count)
        return REAL(nvmlDeviceGetAccountingPids)(device, count, pids);
    unsigned *all = NULL, found = 0, kept = 0, room = pids ? *count : 0;
    nvmlReturn_t status = REAL(nvmlDeviceGetAccountingPids)(device, &found, NULL);
    for (int attempt = 0; status == NVML_ERROR_INSUFFICIENT_SIZE && attempt < 4; attempt++) {
        found += 16;
        free(all);
        all = calloc(found, sizeof *all);
        status = all ? REAL(nvmlDeviceGetAccountingPids)(device, &found, all) : NVML_ERROR_MEMORY;
    }
    if (status == NVML_SUCCESS) {
        status = open_account(control, device, &account);
        for (unsigned i = 0; status == NVML_SUCCESS && all && i < found; i++)
            if (is_own(&account, all[i]))
                all[kept++] = all[i];
        forget(&account);
    }
    *count = kept;
    if (status == NVML_SUCCESS && kept > room)
        status = NVML_ERROR_INSUFFICIENT_SIZE;
    if (status == NVML_SUCCESS && kept)
        memcpy(pids, all, kept * sizeof *pids);
    free(all);
    return status;
}

EXPORT nvmlReturn_t nvmlDeviceGetAccountingStats(nvmlDevice_t device, unsigned int pid, nvmlAccountingStats_t *stats)
{
    ENTER_NVML(nvmlDeviceGetAccountingStats, (device, pid, stats));
    struct account_of account;
    nvmlAccountingStats_t found;
    nvmlReturn_t status = REAL(nvmlDeviceGetAccountingStats)(device, pid, stats ? &found : NULL);
    if (status != NVML_SUCCESS)
        return status;
    status = open_account(control, device, &account);
    if (status == NVML_SUCCESS && !is_own(&account, pid))
        status = NVML_ERROR_NOT_FOUND;
    if (status == NVML_SUCCESS) {
        *stats = found;
        stats->gpuUtilization = relative(&account, found.gpuUtilization);
        stats->memoryUtilization = relative(&account, found.memoryUtilization);
    }
    forget(&account);
    return status;
}

static unsigned long long relative_sum(const struct account_of *account, unsigned long long sum, unsigned samples)
{
    /* Both values are in hundredths of a percent. */
    unsigned long long most = samples * 10000ull, scaled = sum * 100 / account->share;
    return scaled < most ? scaled : most;
}

EXPORT nvmlReturn_t nvmlDeviceGetAccountingStats_v2(nvmlDevice_t device, nvmlAccountingStats_v2_t *stats)
{
    ENTER_NVML(nvmlDeviceGetAccountingStats_v2, (device, stats));
    struct account_of account;
    nvmlAccountingStats_v2_t found = {0};
    if (stats)
        found = *stats; /* `pid` in *stats names the process. */
    nvmlReturn_t status = REAL(nvmlDeviceGetAccountingStats_v2)(device, stats ? &found : NULL);
    if (status != NVML_SUCCESS)
        return status;
    status = open_account(control, device, &account);
    if (status == NVML_SUCCESS && !is_own(&account, stats->pid))
        status = NVML_ERROR_NOT_FOUND;
    if (status == NVML_SUCCESS) {
        *stats = found;
        stats->gpuUtilization = relative(&account, found.gpuUtilization);
        stats->memoryUtilization = relative(&account, found.memoryUtilization);
        stats->sumGpuUtil = relative_sum(&account, found.sumGpuUtil, found.sampleCount);
        stats->sumFbUtil = relative_sum(&account, found.sumFbUtil, found.sampleCount);
    }
    forget(&account);
    return status;
}
