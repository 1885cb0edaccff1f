/* SPDX-License-Identifier: Apache-2.0 */
/* Opens the driver's libraries, libcuda and NVML, at run time, and reads NVML's figures of a GPU. */
#include "loader.h"
#include "probe.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void *handle;

void *cuda_handle(void)
{
    return handle;
}

const struct cuda *cuda_open(char *reason, size_t room)
{
    static struct cuda cuda;
    const struct {
        void **function;
        const char *symbol;
    } table[] = {
        {(void **)&cuda.init, "cuInit"},
        {(void **)&cuda.device_count, "cuDeviceGetCount"},
        {(void **)&cuda.device_uuid, "cuDeviceGetUuid"},
        {(void **)&cuda.total_mem, "cuDeviceTotalMem_v2"},
        {(void **)&cuda.ctx_create, "cuCtxCreate_v2"},
        {(void **)&cuda.ctx_destroy, "cuCtxDestroy_v2"},
        {(void **)&cuda.mem_alloc, "cuMemAlloc_v2"},
        {(void **)&cuda.mem_free, "cuMemFree_v2"},
        {(void **)&cuda.mem_info, "cuMemGetInfo_v2"},
    };
    handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!handle) {
        const char *error = dlerror();
        snprintf(reason, room, "%s", error ? error : "libcuda.so.1 cannot be opened");
        return NULL;
    }
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        *table[i].function = dlsym(handle, table[i].symbol);
        if (!*table[i].function) {
            snprintf(reason, room, "libcuda.so.1 has no %s", table[i].symbol);
            return NULL;
        }
    }
    CUresult status = cuda.init(0);
    if (status != CUDA_SUCCESS) {
        snprintf(reason, room, "cuInit returns %d", status);
        return NULL;
    }
    return &cuda;
}

struct nvml {
    nvmlReturn_t (*by_uuid)(const char *uuid, nvmlDevice_t *device);
    nvmlReturn_t (*memory)(nvmlDevice_t device, nvmlMemory_t *memory);
    nvmlReturn_t (*memory_v2)(nvmlDevice_t device, nvmlMemory_v2_t *memory);
    nvmlReturn_t (*processes)(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *processes);
};

static const struct nvml *nvml_open(void)
{
    static struct nvml nvml;
    static bool tried, works;
    if (!tried) {
        tried = true;
        void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
        nvmlReturn_t (*init)(void) = library ? (nvmlReturn_t(*)(void))dlsym(library, "nvmlInit_v2") : NULL;
        if (!init || init() != NVML_SUCCESS)
            return NULL;
        *(void **)&nvml.by_uuid = dlsym(library, "nvmlDeviceGetHandleByUUID");
        *(void **)&nvml.memory = dlsym(library, "nvmlDeviceGetMemoryInfo");
        *(void **)&nvml.memory_v2 = dlsym(library, "nvmlDeviceGetMemoryInfo_v2");
        *(void **)&nvml.processes = dlsym(library, "nvmlDeviceGetComputeRunningProcesses_v3");
        works = nvml.by_uuid && nvml.memory;
    }
    return works ? &nvml : NULL;
}

static uint64_t own_bytes(const char *uuid)
{
    const struct nvml *nvml = nvml_open();
    nvmlDevice_t device;
    unsigned room = 1024;
    uint64_t bytes = 0;
    if (!nvml || !nvml->processes || nvml->by_uuid(uuid, &device) != NVML_SUCCESS)
        return 0;
    nvmlProcessInfo_t *list = calloc(room, sizeof *list);
    if (list && nvml->processes(device, &room, list) == NVML_SUCCESS)
        for (unsigned i = 0; i < room; i++)
            if (list[i].pid == (unsigned)getpid() && list[i].usedGpuMemory != NVML_VALUE_NOT_AVAILABLE)
                bytes += list[i].usedGpuMemory;
    free(list);
    return bytes;
}

bool nvml_figures(const char *uuid, struct nvml_figures *figures)
{
    const struct nvml *nvml = nvml_open();
    nvmlDevice_t device;
    nvmlMemory_t memory;
    nvmlMemory_v2_t second = {.version = (unsigned)sizeof second | 2u << 24};
    memset(figures, 0, sizeof *figures);
    if (!nvml || nvml->by_uuid(uuid, &device) != NVML_SUCCESS || nvml->memory(device, &memory) != NVML_SUCCESS)
        return false;
    figures->total = figures->total_v2 = memory.total;
    figures->used = memory.used;
    if (nvml->memory_v2 && nvml->memory_v2(device, &second) == NVML_SUCCESS)
        figures->total_v2 = second.total;
    figures->own = own_bytes(uuid);
    return true;
}
