/* SPDX-License-Identifier: Apache-2.0 */
/* Private to the files that show NVML of the slice: nvml_*.c. */
#ifndef VGPU_NVML_SHOWN_H
#define VGPU_NVML_SHOWN_H

#include "account/account.h"
#include "process.h"

/* Every NVML hook begins with this: the driver's own where the library is not there, `control` else. */
#define ENTER_NVML(symbol, arguments) \
    enum control control = vgpu_enter_nvml(); \
    if (!REAL_HAS(symbol)) \
        return NVML_ERROR_FUNCTION_NOT_FOUND; \
    if (control == CONTROL_OFF) \
        return REAL(symbol) arguments; \
    vgpu_log(LOG_CALLS, "%s", #symbol)

/* A device of the slice behind a handle; gi and ci are NVML_INSTANCE_NONE where it is no MIG device. */
struct part {
    char uuid[VGPU_UUID_SIZE];
    int nvml_index;
    unsigned gi, ci;
};
/* 1: the device itself; more or 1: the slice's MIG devices on that GPU; 0: nothing that this container may use; -1: the
 * handle is none of the driver's. */
int nvml_parts(enum control control, nvmlDevice_t handle, struct part parts[VGPU_MAX_DEVICES]);

/* The container's processes on a device. `list` is the caller's to free; the answer is their number, -1: unknown. */
struct own_process {
    unsigned pid, gi, ci;
    uint64_t bytes;
};
int nvml_own_processes(enum control control, nvmlDevice_t handle, struct own_process **list);


#endif
