/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sets the driver's memory limits of a container's control group by the host's own NVML. Reads each limit back, because
 * a successful call may have had no effect. Soft limits stay 0, because with the kernel's controller dmem a soft limit
 * would leave a reservation in the parent groups.
 */
#include "hook.h"

#include "../probe/loader.h"
#include "driver/nvml_abi.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

struct set_limits { /* Layout of NVML's nvmlSetMemoryLimits_v1_t. */
    const char *group;
    unsigned long long soft, hard;
};

struct get_limits { /* Layout of NVML's nvmlGetMemoryLimits_v1_t. */
    const char *group;
    unsigned long long soft, hard, used;
};

struct nvml {
    nvmlReturn_t (*start)(void);
    nvmlReturn_t (*handle)(const char *uuid, nvmlDevice_t *device);
    nvmlReturn_t (*memory)(nvmlDevice_t device, nvmlMemory_t *memory);
    nvmlReturn_t (*set)(nvmlDevice_t device, struct set_limits *limits);
    nvmlReturn_t (*get)(nvmlDevice_t device, struct get_limits *limits);
    const char *(*words)(nvmlReturn_t code);
};

static bool load(const char *path, struct nvml *nvml)
{
    const struct {
        const char *name;
        void *place;
    } functions[] = {
        {"nvmlInit_v2", &nvml->start},
        {"nvmlErrorString", &nvml->words},
        {"nvmlDeviceGetHandleByUUID", &nvml->handle},
        {"nvmlDeviceGetMemoryInfo", &nvml->memory},
        {"nvmlDeviceSetMemoryLimits_v1", &nvml->set},
        {"nvmlDeviceGetMemoryLimits_v1", &nvml->get},
    };
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return fail("NVML of the host cannot be loaded: %s", dlerror());
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *found = dlsym(library, functions[i].name);
        if (!found)
            return fail("%s has no %s; memory limits of control groups need driver branch 615 or newer", path, functions[i].name);
        memcpy(functions[i].place, &found, sizeof found);
    }
    return true;
}

static bool said(const struct nvml *nvml, const struct gpu *gpu, const char *what, nvmlReturn_t code)
{
    return fail("%s: the driver returns %u (%s) from %s", gpu->uuid, (unsigned)code, nvml->words(code), what);
}

static bool limit(const struct nvml *nvml, struct gpu *gpu, const char *group)
{
    nvmlDevice_t device;
    nvmlMemory_t memory;
    nvmlReturn_t code = nvml->handle(gpu->uuid, &device);
    if (code != NVML_SUCCESS)
        return said(nvml, gpu, "nvmlDeviceGetHandleByUUID", code);
    if ((code = nvml->memory(device, &memory)) != NVML_SUCCESS)
        return said(nvml, gpu, "nvmlDeviceGetMemoryInfo", code);
    if (gpu->hard != UNLIMITED && gpu->hard > memory.total)
        /* The driver refuses a limit above the card's size. The part of the slice beyond this size is host memory
         * (oversubscription). */
        gpu->hard = memory.total;
    struct set_limits set = {.group = group, .soft = 0, .hard = gpu->hard};
    struct get_limits get = {.group = group};
    if ((code = nvml->set(device, &set)) != NVML_SUCCESS)
        return said(nvml, gpu, "nvmlDeviceSetMemoryLimits_v1", code);
    if ((code = nvml->get(device, &get)) != NVML_SUCCESS)
        return said(nvml, gpu, "nvmlDeviceGetMemoryLimits_v1, called after the limit was set", code);
    return (get.soft == 0 && get.hard == gpu->hard) ||
           fail("%s: the limit of %s was set to soft 0, hard %llu and reads back as soft %llu, hard %llu: it does not hold", gpu->uuid,
                group, (unsigned long long)gpu->hard, get.soft, get.hard);
}

bool enforce(const struct options *options, struct grant *grant, const struct group *group)
{
    struct nvml nvml;
    if (!load(options->nvml, &nvml))
        return false;
    nvmlReturn_t code = nvml.start();
    if (code != NVML_SUCCESS)
        return fail("NVML does not start: it returns %u (%s)", (unsigned)code, nvml.words(code));
    for (int i = 0; i < grant->gpu_count; i++)
        if (!limit(&nvml, &grant->gpus[i], group->path))
            return false;
    return true;
}
