/* SPDX-License-Identifier: Apache-2.0 */
/* What the driver itself says, asked from a process without the library: a line "GPU PID BYTES" for each user of a GPU. */
#include <stdio.h>
#include <stdlib.h>

#include "cuda_abi.h"

int nvmlInit_v2(void);
int nvmlDeviceGetCount_v2(unsigned *count);
int nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device);
int nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned length);
int nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *processes);

int main(void)
{
    unsigned gpus = 0;
    if (nvmlInit_v2() != NVML_SUCCESS || nvmlDeviceGetCount_v2(&gpus) != NVML_SUCCESS)
        return 1;
    for (unsigned gpu = 0; gpu < gpus; gpu++) {
        static nvmlProcessInfo_t processes[2048];
        unsigned count = 2048;
        nvmlDevice_t device;
        char uuid[96];
        if (nvmlDeviceGetHandleByIndex_v2(gpu, &device) != NVML_SUCCESS ||
            nvmlDeviceGetUUID(device, uuid, sizeof uuid) != NVML_SUCCESS ||
            nvmlDeviceGetComputeRunningProcesses_v3(device, &count, processes) != NVML_SUCCESS)
            return 1;
        printf("%s\n", uuid);
        for (unsigned i = 0; i < count; i++)
            printf("%u %u %llu\n", gpu, processes[i].pid, processes[i].usedGpuMemory);
    }
    return 0;
}
