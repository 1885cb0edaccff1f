/* SPDX-License-Identifier: Apache-2.0 */
/* Implements cuInit, returns the driver's version, and finds the GPUs that are visible to this process. */
#include "hostile.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

struct driver driver = {.mutex = PTHREAD_MUTEX_INITIALIZER, .next_id = 1};

static pthread_mutex_t init_mutex = PTHREAD_MUTEX_INITIALIZER;

/* A visible device: a GPU or one of its MIG devices. */
struct visible {
    int gpu, gi, ci; /* gpu is -1 if there is no device. gi and ci are -1 for a whole GPU. */
};

static void add_device(struct visible what)
{
    driver.devices[driver.count++] = (struct device){.gpu = what.gpu, .gi = what.gi, .ci = what.ci};
}

/* Returns the first compute instance of a GPU for which `wanted` is true, and their number. The caller must hold the
 * lock. */
static struct visible instance_where(int gpu, bool (*wanted)(const struct sim_mig_gi *gi, const struct sim_mig_ci *ci, const void *data),
                                     const void *data, int *matches)
{
    struct visible found = {-1, -1, -1};
    for (int gi = 0; gi < SIM_MAX_GI; gi++)
        for (int ci = 0; ci < SIM_MAX_CI; ci++) {
            const struct sim_mig_gi *instance = &sim_state()->gpus[gpu].gi[gi];
            if (!instance->used || !instance->ci[ci].used || !wanted(instance, &instance->ci[ci], data))
                continue;
            if (found.gpu < 0)
                found = (struct visible){gpu, gi, ci};
            ++*matches;
        }
    return found;
}

static bool any(const struct sim_mig_gi *gi, const struct sim_mig_ci *ci, const void *data)
{
    (void)gi;
    (void)ci;
    (void)data;
    return true;
}

/* Returns the device that a GPU's name selects: the GPU or, in MIG mode, its first instance. */
static struct visible first_of(int gpu)
{
    int matches = 0;
    return sim_state()->gpus[gpu].mig_mode ? instance_where(gpu, any, NULL, &matches) : (struct visible){gpu, -1, -1};
}

struct word {
    const char *text;
    size_t length;
};

static bool begins(const char *name, const struct word *word)
{
    return strncasecmp(name, word->text, word->length) == 0;
}

static bool uuid_begins(const struct sim_mig_gi *gi, const struct sim_mig_ci *ci, const void *data)
{
    (void)gi;
    return begins(ci->uuid, data);
}

static bool has_ids(const struct sim_mig_gi *gi, const struct sim_mig_ci *ci, const void *data)
{
    const unsigned *ids = data;
    return gi->id == ids[0] && ci->id == ids[1];
}

/* Finds a GPU by its UUID or a unique prefix. A prefix that matches two GPUs selects none. */
static int match_uuid(const int *gpus, int count, struct word word)
{
    int found = -1;
    for (int i = 0; i < count; i++) {
        if (!begins(sim_state()->gpus[gpus[i]].uuid, &word))
            continue;
        if (found >= 0)
            return -1;
        found = gpus[i];
    }
    return found;
}

/* Finds a MIG device by MIG-UUID, or by the older form MIG-GPU-UUID/GPU instance/compute instance. */
static struct visible match_mig(const int *gpus, int count, struct word word)
{
    struct visible found = {-1, -1, -1};
    int matches = 0;
    if (word.length > 8 && strncasecmp(word.text, "MIG-GPU-", 8) == 0) {
        const char *slash = memchr(word.text, '/', word.length);
        unsigned ids[2];
        int gpu = slash ? match_uuid(gpus, count, (struct word){word.text + 4, (size_t)(slash - word.text) - 4}) : -1, used = 0;
        if (gpu >= 0 && sscanf(slash, "/%u/%u%n", &ids[0], &ids[1], &used) == 2 && slash + used == word.text + word.length)
            found = instance_where(gpu, has_ids, ids, &matches);
        return found;
    }
    for (int i = 0; i < count && word.length > 4; i++) {
        struct visible one = instance_where(gpus[i], uuid_begins, &word, &matches);
        if (one.gpu >= 0)
            found = one;
    }
    return matches == 1 ? found : (struct visible){-1, -1, -1};
}

static struct visible match(const int *gpus, int count, struct word word)
{
    if (word.length > 4 && strncasecmp(word.text, "MIG-", 4) == 0)
        return match_mig(gpus, count, word);
    int gpu = -1;
    if (word.length > 4 && strncasecmp(word.text, "GPU-", 4) == 0) {
        gpu = match_uuid(gpus, count, word);
    } else if (word.length > 0 && isdigit((unsigned char)*word.text)) {
        char *end;
        long index = strtol(word.text, &end, 10);
        if ((size_t)(end - word.text) == word.length && index < count)
            gpu = gpus[index];
    }
    return gpu >= 0 ? first_of(gpu) : (struct visible){-1, -1, -1};
}

/* If a MIG device is visible, makes it the only visible device, because a process can use only one compute instance. */
static void only_instance(void)
{
    for (int i = 0; i < driver.count; i++)
        if (driver.devices[i].gi >= 0) {
            driver.devices[0] = driver.devices[i];
            driver.count = 1;
        }
}

/* Applies CUDA_VISIBLE_DEVICES: indices and UUIDs or unique prefixes, separated by commas. The first invalid entry
 * hides itself and all later ones; a device named twice hides all devices. */
static void apply_visible(const int *gpus, int count, const char *text)
{
    while (*text) {
        while (isspace((unsigned char)*text))
            text++;
        size_t length = strcspn(text, ","), end = length;
        while (end > 0 && isspace((unsigned char)text[end - 1]))
            end--;
        struct visible found = match(gpus, count, (struct word){text, end});
        if (found.gpu < 0)
            return;
        for (int i = 0; i < driver.count; i++) {
            const struct device *other = &driver.devices[i];
            if (other->gpu == found.gpu && other->gi == found.gi && other->ci == found.ci) {
                driver.count = 0;
                return;
            }
        }
        if (driver.count == SIM_MAX_GPUS)
            return;
        add_device(found);
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

/* Sorts the GPUs in CUDA's order, which differs from NVML's: the fastest is device 0 unless CUDA_DEVICE_ORDER selects
 * the order of the bus. */
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
        if (sim_gpu_visible((int)i) && !sim_state()->gpus[i].lost)
            gpus[count++] = (int)i;
    order_devices(gpus, count);
    sim_lock();
    if (visible) {
        apply_visible(gpus, count, visible);
    } else {
        for (int i = 0; i < count; i++)
            if (!sim_state()->gpus[gpus[i]].mig_mode)
                add_device((struct visible){gpus[i], -1, -1});
        for (int i = 0; i < count && driver.count == 0; i++) {
            struct visible instance = first_of(gpus[i]);
            if (instance.gpu >= 0)
                add_device(instance);
        }
    }
    sim_unlock();
    only_instance();
    if (driver.count == 1 && driver.devices[0].gi >= 0)
        sim_use_instance(driver.devices[0].gpu, driver.devices[0].gi, driver.devices[0].ci);
    return driver.count > 0 ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

EXPORT CUresult cuInit(unsigned flags)
{
    REQUIRE(flags == 0, CUDA_ERROR_INVALID_VALUE);
    if (atomic_load(&driver.ready))
        return driver_enter(__func__);
    pthread_mutex_lock(&init_mutex);
    CUresult result = CUDA_SUCCESS;
    bool first = !atomic_load(&driver.ready);
    if (first) {
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
    if (first && result == CUDA_SUCCESS)
        tool_load();
    return result;
}

EXPORT CUresult cuDriverGetVersion(int *version)
{
    REQUIRE(version, CUDA_ERROR_INVALID_VALUE);
    /* This call is legal before cuInit. */
    *version = sim_attach(SIM_ROLE_CUDA) == SIM_OK ? (int)sim_state()->cuda_version : 0;
    return CUDA_SUCCESS;
}
