/* SPDX-License-Identifier: Apache-2.0 */
/* Implements NVML's functions for the constant properties of a GPU: name, UUID, serial, PCI address, architecture,
 * capability, board. */
#include "nvml_internal.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define IDENTITY (NVML_ANY_DEVICE | NVML_EVEN_LOST)

static void mig_name(const struct nvml_target *target, char *text, size_t room)
{
    sim_lock();
    const struct sim_mig_gi *gi = &target->gpu->gi[target->gi];
    const struct sim_mig_profile *profile = nvml_mig_profile(target, gi->profile_id);
    unsigned slices = gi->ci[target->ci].slices;
    const char *shape = profile ? profile->name : "?";
    if (profile != NULL && slices != profile->slices)
        snprintf(text, room, "%s MIG %uc.%s", target->gpu->name, slices, shape);
    else
        snprintf(text, room, "%s MIG %s", target->gpu->name, shape);
    sim_unlock();
}

NVML_API nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned length)
{
    struct nvml_target target;
    char text[160];
    NVML_TRY(nvml_open(device, IDENTITY, &target));
    if (target.gi < 0)
        return nvml_text(target.gpu->name, name, length);
    mig_name(&target, text, sizeof text);
    return nvml_text(text, name, length);
}

NVML_API nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned length)
{
    struct nvml_target target;
    char text[SIM_UUID];
    NVML_TRY(nvml_open(device, IDENTITY, &target));
    if (target.gi < 0)
        return nvml_text(target.gpu->uuid, uuid, length);
    sim_lock();
    snprintf(text, sizeof text, "%s", target.gpu->gi[target.gi].ci[target.ci].uuid);
    sim_unlock();
    return nvml_text(text, uuid, length);
}

/* Consumer boards have no serial number. */
NVML_API nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned length)
{
    struct nvml_target target;
    NVML_TRY(nvml_open(device, NVML_WHOLE_GPU | NVML_EVEN_LOST, &target));
    if (target.model->brand == NVML_BRAND_GEFORCE || target.gpu->serial_number[0] == '\0')
        return NVML_ERROR_NOT_SUPPORTED;
    return nvml_text(target.gpu->serial_number, serial, length);
}

NVML_WORD(nvmlDeviceGetMinorNumber, NVML_WHOLE_GPU | NVML_EVEN_LOST, target.gpu->minor)

static void pci_text(const struct sim_gpu *gpu, char legacy[16], char full[32])
{
    snprintf(legacy, 16, "%04X:%02X:%02X.0", gpu->pci_domain & 0xffffu, gpu->pci_bus & 0xffu, gpu->pci_device & 0x1fu);
    snprintf(full, 32, "%08X:%02X:%02X.0", gpu->pci_domain, gpu->pci_bus & 0xffu, gpu->pci_device & 0x1fu);
}

NVML_API nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    struct nvml_target target;
    NVML_TRY(nvml_open(device, NVML_WHOLE_GPU | NVML_EVEN_LOST, &target));
    NVML_NEED(pci != NULL);
    memset(pci, 0, sizeof *pci);
    pci->domain = target.gpu->pci_domain;
    pci->bus = target.gpu->pci_bus;
    pci->device = target.gpu->pci_device;
    pci->pciDeviceId = target.model->pci_device_id;
    pci->pciSubSystemId = target.model->pci_subsystem_id;
    pci_text(target.gpu, pci->busIdLegacy, pci->busId);
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_v2_t *pci)
{
    nvmlPciInfo_t whole;
    NVML_TRY(nvmlDeviceGetPciInfo_v3(device, &whole));
    NVML_NEED(pci != NULL);
    memset(pci, 0, sizeof *pci);
    memcpy(pci->busId, whole.busIdLegacy, sizeof pci->busId);
    pci->domain = whole.domain;
    pci->bus = whole.bus;
    pci->device = whole.device;
    pci->pciDeviceId = whole.pciDeviceId;
    pci->pciSubSystemId = whole.pciSubSystemId;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t device, nvmlPciInfo_v2_t *pci)
{
    return nvmlDeviceGetPciInfo_v2(device, pci);
}

NVML_API nvmlReturn_t nvmlDeviceGetPciInfoExt(nvmlDevice_t device, nvmlPciInfoExt_t *pci)
{
    nvmlPciInfo_t whole;
    NVML_TRY(nvmlDeviceGetPciInfo_v3(device, &whole));
    NVML_NEED(pci != NULL);
    if (pci->version != NVML_STRUCT_VERSION(nvmlPciInfoExt_t, 1))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    pci->domain = whole.domain;
    pci->bus = whole.bus;
    pci->device = whole.device;
    pci->pciDeviceId = whole.pciDeviceId;
    pci->pciSubSystemId = whole.pciSubSystemId;
    /* PCI class 3: display controller. */
    pci->baseClass = 3;
    /* PCI subclass 2: 3D controller. */
    pci->subClass = 2;
    memcpy(pci->busId, whole.busId, sizeof pci->busId);
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    struct nvml_target target;
    NVML_TRY(nvml_open(device, IDENTITY, &target));
    NVML_NEED(major != NULL && minor != NULL);
    *major = (int)target.gpu->cc_major;
    *minor = (int)target.gpu->cc_minor;
    return NVML_SUCCESS;
}

NVML_WORD(nvmlDeviceGetArchitecture, IDENTITY, target.gpu->arch)
NVML_WORD(nvmlDeviceGetBrand, IDENTITY, target.model->brand)
NVML_WORD(nvmlDeviceGetBoardId, NVML_WHOLE_GPU, target.gpu->pci_bus << 8 | target.gpu->pci_device)
NVML_WORD(nvmlDeviceGetMultiGpuBoard, NVML_WHOLE_GPU, 0)
NVML_WORD(nvmlDeviceGetNumGpuCores, NVML_WHOLE_GPU, target.gpu->sm_count * target.model->cores_per_sm)
NVML_WORD(nvmlDeviceGetMemoryBusWidth, NVML_WHOLE_GPU, target.model->bus_width_bits)
NVML_WORD(nvmlDeviceGetBusType, NVML_WHOLE_GPU, 2)
NVML_WORD(nvmlDeviceGetIrqNum, NVML_WHOLE_GPU, 64 + target.number)
NVML_WORD(nvmlDeviceGetModuleId, NVML_WHOLE_GPU, target.number + 1)
NVML_WORD(nvmlDeviceGetDisplayMode, NVML_WHOLE_GPU, NVML_FEATURE_DISABLED)
NVML_WORD(nvmlDeviceGetDisplayActive, NVML_WHOLE_GPU, NVML_FEATURE_DISABLED)
NVML_WORD(nvmlDeviceGetVirtualizationMode, NVML_WHOLE_GPU, NVML_GPU_VIRTUALIZATION_MODE_NONE)
NVML_WORD(nvmlDeviceGetMaxPcieLinkGeneration, NVML_WHOLE_GPU, target.model->pcie_gen)
NVML_WORD(nvmlDeviceGetGpuMaxPcieLinkGeneration, NVML_WHOLE_GPU, target.model->pcie_gen)
NVML_WORD(nvmlDeviceGetCurrPcieLinkGeneration, NVML_WHOLE_GPU, target.model->pcie_gen)
NVML_WORD(nvmlDeviceGetMaxPcieLinkWidth, NVML_WHOLE_GPU, 16)
NVML_WORD(nvmlDeviceGetCurrPcieLinkWidth, NVML_WHOLE_GPU, 16)
NVML_WORD(nvmlDeviceGetPcieReplayCounter, NVML_WHOLE_GPU, 0)

static unsigned link_mbps(unsigned generation)
{
    static const unsigned mbps[] = {0, 2500, 5000, 8000, 16000, 32000, 64000};
    return generation < sizeof mbps / sizeof mbps[0] ? mbps[generation] : 0;
}

NVML_WORD(nvmlDeviceGetPcieSpeed, NVML_WHOLE_GPU, link_mbps(target.model->pcie_gen))
/* A value of NVML_PCIE_LINK_MAX_SPEED_*. */
NVML_WORD(nvmlDeviceGetPcieLinkMaxSpeed, NVML_WHOLE_GPU, target.model->pcie_gen)

NVML_API nvmlReturn_t nvmlDeviceGetVbiosVersion(nvmlDevice_t device, char *version, unsigned length)
{
    struct nvml_target target;
    char text[32];
    NVML_TRY(nvml_open(device, NVML_WHOLE_GPU, &target));
    snprintf(text, sizeof text, "9%u.00.00.00.01", target.gpu->arch % 10);
    return nvml_text(text, version, length);
}

/* Returns "simulated", which cannot be mistaken for a real part number. */
NVML_API nvmlReturn_t nvmlDeviceGetBoardPartNumber(nvmlDevice_t device, char *number, unsigned length)
{
    struct nvml_target target;
    NVML_TRY(nvml_open(device, NVML_WHOLE_GPU, &target));
    return nvml_text("simulated", number, length);
}

/* This check succeeds, because otherwise nvidia-smi would warn of a corrupted infoROM. */
NVML_API nvmlReturn_t nvmlDeviceValidateInforom(nvmlDevice_t device)
{
    struct nvml_target target;
    return nvml_open(device, NVML_WHOLE_GPU, &target);
}

/* The host has one socket, so every processor is near every GPU. */
NVML_API nvmlReturn_t nvmlDeviceGetCpuAffinity(nvmlDevice_t device, unsigned words, unsigned long *set)
{
    struct nvml_target target;
    NVML_TRY(nvml_open(device, NVML_ANY_DEVICE, &target));
    NVML_NEED(set != NULL && words > 0);
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    memset(set, 0, words * sizeof *set);
    for (unsigned i = 0; i < words * 64 && (long)i < processors; i++)
        set[i / 64] |= 1ul << (i % 64);
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetCpuAffinityWithinScope(nvmlDevice_t device, unsigned words, unsigned long *set,
                                                          unsigned scope)
{
    NVML_NEED(scope <= 1);
    return nvmlDeviceGetCpuAffinity(device, words, set);
}

NVML_API nvmlReturn_t nvmlDeviceGetMemoryAffinity(nvmlDevice_t device, unsigned words, unsigned long *set,
                                                  unsigned scope)
{
    struct nvml_target target;
    NVML_TRY(nvml_open(device, NVML_ANY_DEVICE, &target));
    NVML_NEED(set != NULL && words > 0 && scope <= 1);
    memset(set, 0, words * sizeof *set);
    set[0] = 1;
    return NVML_SUCCESS;
}

/* Two GPUs of a host are connected by its bridge (PHB), without NVLink. The level of a GPU and itself is INTERNAL. */
NVML_API nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t first, nvmlDevice_t second, unsigned *level)
{
    struct nvml_target a, b;
    NVML_TRY(nvml_open(first, NVML_WHOLE_GPU, &a));
    NVML_TRY(nvml_open(second, NVML_WHOLE_GPU, &b));
    NVML_NEED(level != NULL);
    *level = a.number == b.number ? 0 : 30;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceOnSameBoard(nvmlDevice_t first, nvmlDevice_t second, int *same)
{
    struct nvml_target a, b;
    NVML_TRY(nvml_open(first, NVML_WHOLE_GPU, &a));
    NVML_TRY(nvml_open(second, NVML_WHOLE_GPU, &b));
    NVML_NEED(same != NULL);
    *same = a.number == b.number;
    return NVML_SUCCESS;
}

/* Two GPUs of one generation can access each other's memory over PCIe, others cannot, as in the simulated libcuda.
 * index is the kind of access (read, write, …) and makes no difference. */
NVML_API nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t first, nvmlDevice_t second, unsigned index, unsigned *status)
{
    enum { P2P_OK = 0, P2P_GPU_NOT_SUPPORTED = 2, CAPABILITIES = 6 };
    struct nvml_target a, b;
    NVML_TRY(nvml_open(first, NVML_WHOLE_GPU, &a));
    NVML_TRY(nvml_open(second, NVML_WHOLE_GPU, &b));
    NVML_NEED(status != NULL && index < CAPABILITIES && a.number != b.number);
    *status = a.gpu->arch == b.gpu->arch ? P2P_OK : P2P_GPU_NOT_SUPPORTED;
    return NVML_SUCCESS;
}
