/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Shared declarations of the simulated libnvidia-ml: handles, and the functions that every entry point calls first.
 *
 * An entry point calls nvml_open() first. nvml_open() checks that the library is initialized, that the handle is valid
 * and that the GPU is still on the bus, and it registers a forked child. Entry points that change the host also call
 * nvml_root(), because the driver allows them to root only.
 */
#ifndef GPUSIM_NVML_INTERNAL_H
#define GPUSIM_NVML_INTERNAL_H

#include "../core/sim.h"
#include "nvml_types.h"

/* Handles point into static storage, so a client may keep a handle for any time and even read the memory behind it. A
 * future nvidia-smi might read it, although handles are opaque pointers. */
struct nvml_device {
    unsigned char opaque[512];
    /* Index in sim_state.gpus. */
    int gpu;
    /* Indices in the GPU's tables for a MIG device, -1 for a whole GPU. */
    int gi, ci;
};

struct nvml_gpu_instance {
    unsigned char opaque[64];
    int gpu, gi;
};

struct nvml_compute_instance {
    unsigned char opaque[64];
    int gpu, gi, ci;
};

enum nvml_accepts {
    NVML_WHOLE_GPU,     /* Flag of an entry point that returns NOT_SUPPORTED for a MIG device. */
    NVML_ANY_DEVICE,
    /* This flag marks an entry point that also works on a GPU that has fallen off the bus, because the driver
     * remembers the value. */
    NVML_EVEN_LOST = 2,
};

struct nvml_target {
    struct sim_gpu *gpu;
    const struct sim_model *model;
    int number; /* The GPU's index in sim_state.gpus. */
    int gi, ci;
};

/* Defined in system.c: */
nvmlReturn_t nvml_enter(void);
nvmlReturn_t nvml_root(void);
nvmlReturn_t nvml_status(enum sim_status status);
nvmlReturn_t nvml_text(const char *text, char *buffer, unsigned length);
void nvml_process_name(unsigned pid, char *buffer, unsigned length);
void nvml_trace(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Defined in handles.c: */
void nvml_enumerate(void);
int nvml_index_of(int gpu); /* Returns NVML's index of a GPU, or -1 if this process does not see the GPU. */
nvmlReturn_t nvml_open(nvmlDevice_t handle, unsigned accepts, struct nvml_target *target);
nvmlDevice_t nvml_gpu_handle(int gpu);
nvmlDevice_t nvml_mig_handle(int gpu, int gi, int ci);

/* Defined in mig_gi.c: */
const struct sim_mig_profile *nvml_mig_profile(const struct nvml_target *target, unsigned profile_id);
nvmlReturn_t nvml_open_instance(nvmlGpuInstance_t instance, struct nvml_target *target);
nvmlGpuInstance_t nvml_instance_handle(int gpu, int gi);

/* Defined in memory.c: */
void nvml_memory(const struct nvml_target *target, nvmlMemory_v2_t *memory);

/* Defined in processes.c: */
struct nvml_process {
    unsigned pid, gi, ci;
    unsigned long long bytes;
};
/* Fills up to `room` entries and returns the total number of processes. Takes the lock. */
unsigned nvml_processes(const struct nvml_target *target, struct nvml_process *list, unsigned room);

/* utilization.c: returns the percentage over the newest sample period; takes the lock */
void nvml_utilization(const struct nvml_target *target, unsigned *gpu_percent, unsigned *memory_percent);

/* Defined in sensors.c: */
unsigned nvml_power_mw(const struct nvml_target *target);
unsigned nvml_celsius(const struct nvml_target *target);

/* Defined in reset.c: */

/* Returns true if a process has a context on the GPU. The caller must hold the lock. */
bool nvml_has_processes(int gpu);
nvmlReturn_t nvml_reset(unsigned count, const nvmlDevice_t *devices);

/* Defined in field_values.c: */
unsigned long long nvml_energy_mj(const struct nvml_target *target);

#define NVML_MAX_GPUS SIM_MAX_GPUS
#define NVML_TRY(call)                                                                                                 \
    do {                                                                                                               \
        nvmlReturn_t try_result = (call);                                                                              \
        if (try_result != NVML_SUCCESS)                                                                                \
            return try_result;                                                                                         \
    } while (0)
#define NVML_NEED(condition)                                                                                           \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            return NVML_ERROR_INVALID_ARGUMENT;                                                                        \
    } while (0)

/* Defines a getter of one value; it returns an error if the GPU does not support the value. */
#define NVML_GETTER(name, type, opened, supported, expression)                                                         \
    NVML_API nvmlReturn_t name(nvmlDevice_t device, type *value)                                                       \
    {                                                                                                                  \
        struct nvml_target target;                                                                                     \
        NVML_TRY(opened);                                                                                              \
        NVML_NEED(value != NULL);                                                                                      \
        if (!(supported))                                                                                              \
            return NVML_ERROR_NOT_SUPPORTED;                                                                           \
        *value = (type)(expression);                                                                                   \
        return NVML_SUCCESS;                                                                                           \
    }
#define NVML_WORD(name, accepts, expression)                                                                           \
    NVML_GETTER(name, unsigned, nvml_open(device, accepts, &target), true, expression)

#endif
