/* SPDX-License-Identifier: Apache-2.0 */
/* Implements NVML's functions of branch 615 for the video memory limits that the driver enforces for control groups
 * (CUDA 13.4). The return codes are those of 615's header. */
#include "nvml_internal.h"

#include <linux/capability.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The fields have the order of NVML's header. The structure has no version word. Limits are in bytes. */
typedef struct {
    const char *nameSpace;
    unsigned long long softLimit, hardLimit;
} nvmlSetMemoryLimits_v1_t;

typedef struct {
    const char *nameSpace;
    unsigned long long softLimit, hardLimit, currentUsed;
} nvmlGetMemoryLimits_v1_t;

static nvmlReturn_t code(enum sim_group_answer answer)
{
    switch (answer) {
    case SIM_GROUP_OK: return NVML_SUCCESS;
    case SIM_GROUP_ARGUMENT: return NVML_ERROR_INVALID_ARGUMENT;
    case SIM_GROUP_UNSUPPORTED: return NVML_ERROR_NOT_SUPPORTED;
    case SIM_GROUP_NOT_FOUND: return NVML_ERROR_NOT_FOUND;
    case SIM_GROUP_PATH: return NVML_ERROR_OPERATING_SYSTEM;
    case SIM_GROUP_REFUSED: break;
    }
    return NVML_ERROR_UNKNOWN;
}

/* True if the process has CAP_SYS_ADMIN, which the driver requires. Root in an ordinary container does not have this
 * capability. */
static bool is_administrator(void)
{
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[_LINUX_CAPABILITY_U32S_3] = {{0}};
    return syscall(SYS_capget, &header, data) == 0 && (data[0].effective & 1u << CAP_SYS_ADMIN);
}

NVML_API nvmlReturn_t nvmlDeviceSetMemoryLimits_v1(nvmlDevice_t device, nvmlSetMemoryLimits_v1_t *limits)
{
    struct nvml_target target;
    NVML_TRY(nvml_open(device, NVML_WHOLE_GPU, &target));
    NVML_NEED(limits != NULL);
    if (!is_administrator() && !sim_state()->anybody_limits)
        return NVML_ERROR_NO_PERMISSION;
    return code(sim_group_set(target.number, limits->nameSpace, limits->softLimit, limits->hardLimit));
}

NVML_API nvmlReturn_t nvmlDeviceGetMemoryLimits_v1(nvmlDevice_t device, nvmlGetMemoryLimits_v1_t *limits)
{
    struct nvml_target target;
    struct sim_limit found;
    uint64_t used;
    NVML_TRY(nvml_open(device, NVML_WHOLE_GPU, &target));
    NVML_NEED(limits != NULL);
    NVML_TRY(code(sim_group_get(target.number, limits->nameSpace, &found, &used)));
    limits->softLimit = found.soft;
    limits->hardLimit = found.hard;
    limits->currentUsed = used;
    return NVML_SUCCESS;
}
