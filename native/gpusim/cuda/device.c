/* SPDX-License-Identifier: Apache-2.0 */
/* Returns the number of devices, and their names, attributes and properties. */
#include "driver.h"

#include <stdio.h>
#include <string.h>

#define GPU(device) (&sim_state()->gpus[driver.devices[device].gpu])

EXPORT CUresult cuDeviceGetCount(int *count)
{
    ENTER();
    REQUIRE(count, CUDA_ERROR_INVALID_VALUE);
    *count = driver.count;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    ENTER();
    REQUIRE(device, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_valid(ordinal), CUDA_ERROR_INVALID_DEVICE);
    *device = ordinal;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char *name, int length, CUdevice device)
{
    ENTER();
    REQUIRE(name && length > 0, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_valid(device), CUDA_ERROR_INVALID_DEVICE);
    snprintf(name, (size_t)length, "%s", GPU(device)->name);
    return CUDA_SUCCESS;
}

static CUresult uuid_of(CUuuid *uuid, CUdevice device, bool instance)
{
    ENTER();
    REQUIRE(uuid, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_valid(device), CUDA_ERROR_INVALID_DEVICE);
    const struct device *d = &driver.devices[device];
    const char *text = (instance && d->gi >= 0 ? GPU(device)->gi[d->gi].ci[d->ci].uuid : GPU(device)->uuid) + 4;
    for (unsigned i = 0; i < sizeof uuid->bytes; i++) {
        unsigned byte = 0;
        while (*text == '-')
            text++;
        sscanf(text, "%2x", &byte);
        uuid->bytes[i] = (char)byte;
        text += *text && text[1] ? 2 : 0;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
    return uuid_of(uuid, device, false);
}

EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
    return uuid_of(uuid, device, true);
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    ENTER();
    REQUIRE(bytes, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_valid(device), CUDA_ERROR_INVALID_DEVICE);
    const struct device *d = &driver.devices[device];
    sim_lock();
    *bytes = d->gi >= 0 ? sim_instance_total(d->gpu, d->gi) : GPU(device)->total - GPU(device)->reserved_bytes;
    sim_unlock();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceTotalMem(unsigned *bytes, CUdevice device)
{
    size_t all;
    REQUIRE(bytes, CUDA_ERROR_INVALID_VALUE);
    CUresult result = cuDeviceTotalMem_v2(&all, device);
    if (result == CUDA_SUCCESS)
        *bytes = all > UINT32_MAX ? UINT32_MAX : (unsigned)all;
    return result;
}

EXPORT CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice device)
{
    ENTER();
    REQUIRE(major && minor, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_valid(device), CUDA_ERROR_INVALID_DEVICE);
    *major = (int)GPU(device)->cc_major;
    *minor = (int)GPU(device)->cc_minor;
    return CUDA_SUCCESS;
}

/* Attributes with the same value on every model: {CUdevice_attribute, value}. */
static const struct {
    int attribute, value;
} constant[] = {
    /* Maximum sizes of block and grid. */
    {1, 1024}, {2, 1024}, {3, 1024}, {4, 64}, {5, 2147483647}, {6, 65535}, {7, 65535},
    /* Shared memory, constant memory, warp size, maximum pitch, registers. */
    {8, 49152}, {9, 65536}, {10, 32}, {11, 2147483647}, {12, 65536},
    /* Attributes from texture alignment to the mapping of host memory. */
    {14, 512}, {15, 1}, {17, 0}, {18, 0}, {19, 1},
    {21, 131072}, {22, 131072}, {23, 65536}, {24, 16384}, {25, 16384}, {26, 16384}, {27, 32768}, {28, 32768},
    {29, 2048}, {30, 512}, {31, 1}, {35, 0}, {41, 1}, {42, 32768}, {43, 2048}, {44, 1}, {45, 32768}, {46, 32768},
    {47, 8192}, {48, 8192}, {49, 32768}, {51, 32}, {52, 32768}, {53, 32768}, {54, 2046}, {55, 32768}, {56, 131072},
    {57, 65536}, {58, 16384}, {59, 16384}, {60, 16384}, {61, 32768}, {62, 2048}, {63, 32768}, {64, 32768}, {65, 2048},
    {66, 32768}, {67, 32768}, {68, 2046}, {69, 268435456}, {70, 131072}, {71, 65000}, {72, 2097120}, {73, 32768},
    {74, 32768}, {77, 32768}, {78, 1}, {79, 1}, {80, 1}, {82, 65536}, {83, 1}, {84, 0}, {86, 0}, {87, 2}, {88, 0},
    {89, 1}, {90, 1}, {91, 1}, {92, 0}, {93, 0}, {94, 0}, {95, 1}, {96, 1}, {98, 0}, {99, 1}, {100, 0}, {101, 0},
    {102, 1}, {103, 1}, {104, 0}, {105, 0}, {107, 0}, {110, 0}, {112, 1}, {113, 1}, {114, 1}, {115, 1}, {116, 0},
    {117, 0}, {118, 0}, {119, 1}, {121, 0}, {122, 0}, {123, 0}, {124, 0}, {125, 1}, {129, 1}, {130, 0}, {131, -1},
    {134, -1},
};

static bool model_attribute(int attribute, const struct sim_gpu *gpu, const struct sim_model *model, int *value)
{
    unsigned cc = gpu->cc_major * 10 + gpu->cc_minor;
    switch (attribute) {
    case 132: *value = cc >= 90; break; /* Attribute 132 is the support of multicast objects. */
    case 13: *value = (int)model->clock_sm_mhz * 1000; break;
    case 16: *value = (int)gpu->sm_count; break;
    case 20: *value = (int)gpu->compute_mode; break;
    case 32: *value = (int)gpu->ecc_mode; break;
    case 33: *value = (int)gpu->pci_bus; break;
    case 34: *value = (int)gpu->pci_device; break;
    case 36: *value = (int)model->clock_mem_mhz * 1000; break;
    case 37: *value = (int)model->bus_width_bits; break;
    case 38: *value = (int)model->l2_bytes; break;
    case 39: *value = (int)model->threads_per_sm; break;
    case 40: *value = (int)model->copy_engines; break;
    case 50: *value = (int)gpu->pci_domain; break;
    case 75: *value = (int)gpu->cc_major; break;
    case 76: *value = (int)gpu->cc_minor; break;
    case 81: *value = (int)model->shared_per_sm; break;
    case 85: *value = (int)(gpu - sim_state()->gpus); break;
    case 97: *value = (int)model->shared_per_block_optin; break;
    case 106: *value = cc >= 80 || cc < 75 ? 32 : 16; break;
    case 108: *value = cc >= 80 ? (int)(model->l2_bytes / 4 * 3) : 0; break;
    case 109: *value = cc >= 80 ? 134213632 : 0; break;
    case 111: *value = cc >= 80 ? 1024 : 0; break;
    case 120:
    case 127: *value = cc >= 90; break;
    case 126: *value = cc >= 90 ? 4 : 1; break;
    default: return false;
    }
    return true;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    ENTER();
    REQUIRE(value, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_valid(device), CUDA_ERROR_INVALID_DEVICE);
    const struct sim_gpu *gpu = GPU(device);
    if (model_attribute(attribute, gpu, sim_model_find(gpu->model), value))
        return CUDA_SUCCESS;
    for (unsigned i = 0; i < sizeof constant / sizeof constant[0]; i++)
        if (constant[i].attribute == attribute) {
            *value = constant[i].value;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuDeviceGetProperties(CUdevprop *properties, CUdevice device)
{
    ENTER();
    REQUIRE(properties, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_valid(device), CUDA_ERROR_INVALID_DEVICE);
    int *fields = (int *)properties; /* The structure has fourteen ints, in the order of attributes 1 to 14. */
    static const int order[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14};
    for (unsigned i = 0; i < sizeof order / sizeof order[0]; i++)
        cuDeviceGetAttribute(&fields[i], order[i], device);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice device)
{
    ENTER();
    REQUIRE(text && length > 0, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_valid(device), CUDA_ERROR_INVALID_DEVICE);
    const struct sim_gpu *gpu = GPU(device);
    snprintf(text, (size_t)length, "%04x:%02x:%02x.0", gpu->pci_domain, gpu->pci_bus, gpu->pci_device);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *text)
{
    ENTER();
    REQUIRE(device && text, CUDA_ERROR_INVALID_VALUE);
    unsigned a = 0, b, c;
    if (sscanf(text, "%x:%x:%x", &a, &b, &c) != 3) {
        a = 0;
        REQUIRE(sscanf(text, "%x:%x", &b, &c) == 2, CUDA_ERROR_INVALID_VALUE);
    }
    for (int i = 0; i < driver.count; i++)
        if (GPU(i)->pci_domain == a && GPU(i)->pci_bus == b && GPU(i)->pci_device == c) {
            *device = i;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_DEVICE;
}

EXPORT CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer)
{
    ENTER();
    REQUIRE(can, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_valid(device) && device_valid(peer), CUDA_ERROR_INVALID_DEVICE);
    *can = device != peer && GPU(device)->arch == GPU(peer)->arch;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetP2PAttribute(int *value, int attribute, CUdevice source, CUdevice target)
{
    ENTER();
    REQUIRE(value && attribute >= 1 && attribute <= 4, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_valid(source) && device_valid(target) && source != target, CUDA_ERROR_INVALID_DEVICE);
    *value = attribute == 1 ? 0 : GPU(source)->arch == GPU(target)->arch; /* Attribute 1 is the performance rank. */
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetTexture1DLinearMaxWidth(size_t *width, int format, unsigned channels, CUdevice device)
{
    ENTER();
    (void)format;
    REQUIRE(width && channels, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_valid(device), CUDA_ERROR_INVALID_DEVICE);
    *width = 268435456;
    return CUDA_SUCCESS;
}

/* Execution affinity (SM shares) exists under MPS only. */
EXPORT CUresult cuDeviceGetExecAffinitySupport(int *supported, int type, CUdevice device)
{
    ENTER();
    (void)type;
    REQUIRE(supported, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_valid(device), CUDA_ERROR_INVALID_DEVICE);
    *supported = 0;
    return CUDA_SUCCESS;
}
