/* SPDX-License-Identifier: Apache-2.0 */
/* cuInit and what is true of the whole driver: version, error names, and which GPUs this process may see. */
#include "driver.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

struct driver driver = {.mutex = PTHREAD_MUTEX_INITIALIZER, .next_id = 1};

static pthread_mutex_t init_mutex = PTHREAD_MUTEX_INITIALIZER;

static void add_device(int gpu)
{
    driver.devices[driver.count++] = (struct device){.gpu = gpu};
}

static int match_uuid(const int *gpus, int count, const char *text, size_t length)
{
    int found = -1;
    for (int i = 0; i < count; i++) {
        if (strncasecmp(sim_state()->gpus[gpus[i]].uuid, text, length) != 0)
            continue;
        if (found >= 0)
            return -1; /* a prefix that fits two GPUs fits none */
        found = i;
    }
    return found;
}

/* CUDA_VISIBLE_DEVICES: indices and UUIDs (a unique prefix is enough), separated by commas. What follows the first entry
 * that names no GPU is not visible; a GPU named twice hides all. */
static void apply_visible(const int *gpus, int count, const char *text)
{
    bool taken[SIM_MAX_GPUS] = {false};
    while (*text) {
        while (isspace((unsigned char)*text))
            text++;
        size_t length = strcspn(text, ",");
        size_t word = length;
        while (word > 0 && isspace((unsigned char)text[word - 1]))
            word--;
        int found = -1;
        if (word > 4 && strncasecmp(text, "GPU-", 4) == 0) {
            found = match_uuid(gpus, count, text, word);
        } else if (word > 0 && isdigit((unsigned char)*text)) {
            char *end;
            long index = strtol(text, &end, 10);
            if ((size_t)(end - text) == word && index < count)
                found = (int)index;
        }
        if (found < 0)
            return;
        if (taken[found]) {
            driver.count = 0;
            return;
        }
        taken[found] = true;
        add_device(gpus[found]);
        text += length;
        if (*text == ',')
            text++;
    }
}

static uint64_t speed(int gpu)
{
    const struct sim_gpu *g = &sim_state()->gpus[gpu];
    const struct sim_model *model = sim_model_find(g->model);
    return (uint64_t)g->sm_count * model->cores_per_sm * model->clock_sm_mhz;
}

/* CUDA's order is not NVML's: the fastest GPU is device 0 unless the program asks for the order of the bus. */
static void order_devices(int *gpus, int count)
{
    const char *order = getenv("CUDA_DEVICE_ORDER");
    if (count == 0 || (order && strcmp(order, "PCI_BUS_ID") == 0))
        return;
    int best = 0;
    for (int i = 1; i < count; i++)
        if (speed(gpus[i]) > speed(gpus[best]))
            best = i;
    int fastest = gpus[best];
    memmove(&gpus[1], &gpus[0], (size_t)best * sizeof *gpus);
    gpus[0] = fastest;
}

static CUresult find_devices(void)
{
    int gpus[SIM_MAX_GPUS], count = 0;
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    driver.count = 0;
    for (uint32_t i = 0; i < sim_state()->gpu_count; i++)
        /* A GPU in MIG mode is visible through its instances only, which this driver does not run contexts on. */
        if (sim_gpu_visible((int)i) && !sim_state()->gpus[i].lost && !sim_state()->gpus[i].mig_mode)
            gpus[count++] = (int)i;
    order_devices(gpus, count);
    if (visible) {
        apply_visible(gpus, count, visible);
    } else {
        for (int i = 0; i < count; i++)
            add_device(gpus[i]);
    }
    return driver.count > 0 ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

EXPORT CUresult cuInit(unsigned flags);
CUresult cuInit(unsigned flags)
{
    REQUIRE(flags == 0, CUDA_ERROR_INVALID_VALUE);
    if (atomic_load(&driver.ready))
        return driver_enter();
    pthread_mutex_lock(&init_mutex);
    CUresult result = CUDA_SUCCESS;
    if (!atomic_load(&driver.ready)) {
        enum sim_status status = sim_attach(SIM_ROLE_CUDA);
        if (status != SIM_OK && getenv("GPUSIM_DEBUG"))
            fprintf(stderr, "gpusim: %s\n", sim_error());
        result = status == SIM_OK               ? find_devices()
                 : status == SIM_ERR_NO_PROFILE ? CUDA_ERROR_NO_DEVICE
                                                : CUDA_ERROR_UNKNOWN;
        driver.forks = sim_forks();
        if (result == CUDA_SUCCESS)
            atomic_store_explicit(&driver.ready, 1, memory_order_release);
    }
    pthread_mutex_unlock(&init_mutex);
    return result;
}

EXPORT CUresult cuDriverGetVersion(int *version);
CUresult cuDriverGetVersion(int *version)
{
    REQUIRE(version, CUDA_ERROR_INVALID_VALUE);
    /* Legal before cuInit. */
    *version = sim_attach(SIM_ROLE_CUDA) == SIM_OK ? (int)sim_state()->cuda_version : 0;
    return CUDA_SUCCESS;
}
