/* SPDX-License-Identifier: Apache-2.0 */
/* Private to the files nvml_*.c, which show the slice through NVML. */
#ifndef VGPU_NVML_SHOWN_H
#define VGPU_NVML_SHOWN_H

#include "account/account.h"
#include "process.h"

/* The first line of every NVML hook. It calls the driver and returns if no limits apply, and otherwise sets
 * `control`. */
#define ENTER_NVML(symbol, arguments) \
    enum control control = vgpu_enter_nvml(); \
    if (!REAL_HAS(symbol)) \
        return NVML_ERROR_FUNCTION_NOT_FOUND; \
    if (control == CONTROL_OFF) \
        return REAL(symbol) arguments; \
    vgpu_log(LOG_CALLS, "%s", #symbol)

/* A device of the slice that belongs to an NVML handle. gi and ci are NVML_INSTANCE_NONE unless it is a MIG device. */
struct part {
    char uuid[VGPU_UUID_SIZE];
    int nvml_index;
    unsigned gi, ci;
};
/* Lists the devices behind a handle. Returns 1 for the device itself, 1 or more for the slice's MIG devices on that
 * GPU, 0 if the container may use nothing there, -1 if the driver does not know the handle. */
int nvml_parts(enum control control, nvmlDevice_t handle, struct part parts[VGPU_MAX_DEVICES]);

/* Lists the container's processes on a device and returns their number; -1: unknown. The caller frees `list`. */
struct own_process {
    unsigned pid, gi, ci;
    uint64_t bytes;
};
int nvml_own_processes(enum control control, nvmlDevice_t handle, struct own_process **list);


#endif
