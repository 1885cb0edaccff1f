/* SPDX-License-Identifier: Apache-2.0 */
/* Private to the files nvml_*.c and query.c. These files replace functions of NVML, so that a program sees the
 * container's share of a GPU instead of the whole GPU. */
#ifndef VGPU_NVML_SHOWN_H
#define VGPU_NVML_SHOWN_H

#include "account/account.h"
#include "process.h"

/* The first lines of every NVML hook (replacement of an NVML function). If no limits apply, the hook only calls the
 * driver. Otherwise `control` says whether the limits can be read. */
#define ENTER_NVML(symbol, arguments) \
    enum control control = vgpu_enter_nvml(); \
    if (!REAL_HAS(symbol)) \
        return NVML_ERROR_FUNCTION_NOT_FOUND; \
    if (control == CONTROL_OFF) \
        return REAL(symbol) arguments; \
    vgpu_log(LOG_CALLS, "%s", #symbol)

/* A device of the container that an NVML handle stands for. gi and ci are the GPU instance and compute instance of a
 * MIG device. For other devices they are NVML_INSTANCE_NONE. */
struct part {
    char uuid[VGPU_UUID_SIZE];
    int nvml_index;
    unsigned gi, ci;
};
/* Lists the container's devices that a handle stands for. Returns 1 for the device itself, 1 or more for the
 * container's MIG devices on that GPU, 0 if the container may use nothing there, -1 if the driver does not know the
 * handle. */
int nvml_parts(enum control control, nvmlDevice_t handle, struct part parts[VGPU_MAX_DEVICES]);

/* Lists the container's processes on a device and returns their number; -1: the device is unknown or there is no
 * memory. The caller frees `list`. */
struct own_process {
    unsigned pid, gi, ci;
    uint64_t bytes;
};
int nvml_own_processes(enum control control, nvmlDevice_t handle, struct own_process **list);


#endif
