/* SPDX-License-Identifier: Apache-2.0 */
/* Implements the GPU reset of `nvidia-smi --gpu-reset`: pending modes become current, and volatile counters are
 * cleared. */
#include "nvml_internal.h"

#include <string.h>

bool nvml_has_processes(int gpu)
{
    const struct sim_state *state = sim_state();
    sim_reap();
    for (unsigned slot = 0; slot < state->proc_high; slot++)
        if (state->procs[slot].role != SIM_ROLE_NONE && state->procs[slot].use[gpu].contexts > 0)
            return true;
    return false;
}

/* Resets all GPUs or none: a GPU in use prevents the reset of the others too. */
nvmlReturn_t nvml_reset(unsigned count, const nvmlDevice_t *devices)
{
    struct nvml_target targets[NVML_MAX_GPUS];
    NVML_NEED(count > 0 && count <= NVML_MAX_GPUS && devices != NULL);
    for (unsigned i = 0; i < count; i++)
        NVML_TRY(nvml_open(devices[i], NVML_WHOLE_GPU, &targets[i]));
    NVML_TRY(nvml_root());
    nvmlReturn_t result = NVML_SUCCESS;
    sim_lock();
    for (unsigned i = 0; i < count; i++)
        if (nvml_has_processes(targets[i].number))
            result = NVML_ERROR_IN_USE;
    for (unsigned i = 0; i < count && result == NVML_SUCCESS; i++) {
        struct sim_gpu *gpu = targets[i].gpu;
        memset(gpu->gi, 0, sizeof gpu->gi);
        gpu->mig_mode = gpu->mig_pending;
        gpu->ecc_mode = gpu->ecc_pending;
        gpu->ecc_single[NVML_VOLATILE_ECC] = gpu->ecc_double[NVML_VOLATILE_ECC] = 0;
    }
    sim_unlock();
    return result;
}
