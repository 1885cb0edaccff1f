/* SPDX-License-Identifier: Apache-2.0 */
/* Lists the GPUs that this process sees in NVML, and converts between their names (index, UUID, serial, PCI address)
 * and handles. */
#include "nvml_internal.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

static struct nvml_device gpus[NVML_MAX_GPUS];
static struct nvml_device mig_devices[NVML_MAX_GPUS][SIM_MAX_GI][SIM_MAX_CI];
static int visible[NVML_MAX_GPUS]; /* The GPU's index in sim_state.gpus for each NVML index. */
static unsigned visible_count;

/* Lists the visible GPUs. As in the driver, only nvmlInit updates this list. So if a device node appears later, the
 * process sees its GPU only after a new nvmlInit. */
void nvml_enumerate(void)
{
    visible_count = 0;
    for (unsigned gpu = 0; gpu < NVML_MAX_GPUS; gpu++) {
        gpus[gpu].gpu = (int)gpu;
        gpus[gpu].gi = gpus[gpu].ci = -1;
        for (int gi = 0; gi < SIM_MAX_GI; gi++)
            for (int ci = 0; ci < SIM_MAX_CI; ci++) {
                struct nvml_device *device = &mig_devices[gpu][gi][ci];
                device->gpu = (int)gpu;
                device->gi = gi;
                device->ci = ci;
            }
        if (gpu < sim_state()->gpu_count && sim_gpu_visible((int)gpu))
            visible[visible_count++] = (int)gpu;
    }
}

int nvml_index_of(int gpu)
{
    for (unsigned i = 0; i < visible_count; i++)
        if (visible[i] == gpu)
            return (int)i;
    return -1;
}

nvmlDevice_t nvml_gpu_handle(int gpu)
{
    return &gpus[gpu];
}

nvmlDevice_t nvml_mig_handle(int gpu, int gi, int ci)
{
    return &mig_devices[gpu][gi][ci];
}

static bool is_ours(const struct nvml_device *handle)
{
    uintptr_t address = (uintptr_t)handle, whole = (uintptr_t)gpus, mig = (uintptr_t)mig_devices;
    if (address >= whole && address < whole + sizeof gpus)
        return (address - whole) % sizeof gpus[0] == 0;
    return address >= mig && address < mig + sizeof mig_devices && (address - mig) % sizeof gpus[0] == 0;
}

/* Checks a handle and describes its device in *target. The handle of a MIG device can outlive its instance, so each use
 * checks that the instance still exists. */
nvmlReturn_t nvml_open(nvmlDevice_t handle, unsigned accepts, struct nvml_target *target)
{
    NVML_TRY(nvml_enter());
    NVML_NEED(handle != NULL && is_ours(handle) && nvml_index_of(handle->gpu) >= 0);
    struct sim_state *state = sim_state();
    target->number = handle->gpu;
    target->gpu = &state->gpus[handle->gpu];
    target->model = sim_model_find(target->gpu->model);
    target->gi = handle->gi;
    target->ci = handle->ci;
    if (target->model == NULL)
        return NVML_ERROR_UNKNOWN;
    bool mig = handle->gi >= 0;
    if (mig && !(accepts & NVML_ANY_DEVICE))
        return NVML_ERROR_NOT_SUPPORTED;
    sim_lock();
    bool lost = target->gpu->lost;
    bool gone = mig && !(target->gpu->gi[handle->gi].used && target->gpu->gi[handle->gi].ci[handle->ci].used);
    sim_unlock();
    if (gone)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (lost && !(accepts & NVML_EVEN_LOST))
        return NVML_ERROR_GPU_IS_LOST;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count)
{
    NVML_TRY(nvml_enter());
    NVML_NEED(count != NULL);
    *count = visible_count;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetCount(unsigned *count)
{
    return nvmlDeviceGetCount_v2(count);
}

/* Sets *device to the GPU's handle. A GPU that has fallen off the bus is counted but gets no handle. */
static nvmlReturn_t give(int gpu, nvmlDevice_t *device)
{
    sim_lock();
    bool lost = sim_state()->gpus[gpu].lost;
    sim_unlock();
    if (lost)
        return NVML_ERROR_GPU_IS_LOST;
    *device = &gpus[gpu];
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device)
{
    NVML_TRY(nvml_enter());
    NVML_NEED(device != NULL && index < visible_count);
    return give(visible[index], device);
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice_t *device)
{
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

static nvmlReturn_t mig_by_uuid(const char *uuid, nvmlDevice_t *device)
{
    nvmlReturn_t result = NVML_ERROR_NOT_FOUND;
    sim_lock();
    for (unsigned i = 0; i < visible_count; i++) {
        const struct sim_gpu *gpu = &sim_state()->gpus[visible[i]];
        for (int gi = 0; gi < SIM_MAX_GI; gi++)
            for (int ci = 0; gpu->gi[gi].used && ci < SIM_MAX_CI; ci++)
                if (gpu->gi[gi].ci[ci].used && strcasecmp(gpu->gi[gi].ci[ci].uuid, uuid) == 0) {
                    *device = &mig_devices[visible[i]][gi][ci];
                    result = NVML_SUCCESS;
                }
    }
    sim_unlock();
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    NVML_TRY(nvml_enter());
    NVML_NEED(uuid != NULL && device != NULL);
    if (strncasecmp(uuid, "MIG-", 4) == 0)
        return mig_by_uuid(uuid, device);
    for (unsigned i = 0; i < visible_count; i++)
        if (strcasecmp(sim_state()->gpus[visible[i]].uuid, uuid) == 0)
            return give(visible[i], device);
    return NVML_ERROR_NOT_FOUND;
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device)
{
    NVML_TRY(nvml_enter());
    NVML_NEED(serial != NULL && device != NULL);
    for (unsigned i = 0; i < visible_count; i++)
        if (strcmp(sim_state()->gpus[visible[i]].serial_number, serial) == 0)
            return give(visible[i], device);
    return NVML_ERROR_NOT_FOUND;
}

/* Accepts the same forms of a PCI address as the driver: the domain has 4 or 8 digits or is left out, and the function
 * may be left out. */
NVML_API nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *address, nvmlDevice_t *device)
{
    NVML_TRY(nvml_enter());
    NVML_NEED(address != NULL && device != NULL);
    unsigned domain, bus, number, function = 0;
    if (sscanf(address, "%x:%x:%x.%x", &domain, &bus, &number, &function) < 3) {
        domain = 0;
        if (sscanf(address, "%x:%x.%x", &bus, &number, &function) < 2)
            return NVML_ERROR_INVALID_ARGUMENT;
    }
    for (unsigned i = 0; i < visible_count; i++) {
        const struct sim_gpu *gpu = &sim_state()->gpus[visible[i]];
        if (gpu->pci_domain == domain && gpu->pci_bus == bus && gpu->pci_device == number && function == 0)
            return give(visible[i], device);
    }
    return NVML_ERROR_NOT_FOUND;
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *address, nvmlDevice_t *device)
{
    return nvmlDeviceGetHandleByPciBusId_v2(address, device);
}

NVML_API nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index)
{
    struct nvml_target target;
    NVML_TRY(nvml_open(device, NVML_ANY_DEVICE | NVML_EVEN_LOST, &target));
    NVML_NEED(index != NULL);
    if (target.gi < 0) {
        *index = (unsigned)nvml_index_of(target.number);
        return NVML_SUCCESS;
    }
    unsigned position = 0; /* Index of this MIG device among the MIG devices of its GPU. */
    sim_lock();
    for (int gi = 0; gi <= target.gi; gi++)
        for (int ci = 0; target.gpu->gi[gi].used && ci < (gi == target.gi ? target.ci : SIM_MAX_CI); ci++)
            position += target.gpu->gi[gi].ci[ci].used != 0;
    sim_unlock();
    *index = position;
    return NVML_SUCCESS;
}
