/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Allocates host memory in place of device memory (oversubscription). A node may promise more memory to its containers
 * than a card has (factor S above 1), so the card can be full while a container is still below its limit. Then device
 * memory is allocated as unified memory that stays in host memory, and the GPU reads it over the bus. The program gets
 * an ordinary device pointer, the memory is charged to the limit as usual, and any call that may free device memory
 * frees it.
 *
 * A reserve on the card is left for other containers. Contexts and code can only be on the card, and a container
 * without a context could not use any of its memory.
 *
 * Hazards: a real driver can hang if it must evict memory from a full card, so the unified memory is placed on the host
 * and never migrates. Every byte that is written needs a byte of host memory.
 */
#include "account.h"

#define CU_MEM_ATTACH_GLOBAL 1u
#define CU_MEM_ADVISE_SET_PREFERRED_LOCATION 3
#define CU_MEM_ADVISE_SET_ACCESSED_BY 5
#define CU_DEVICE_CPU ((CUdevice)-1)
#define CONTEXT_UNMEASURED (512 * MIB)
#define LARGEST_SCALING 2 /* Largest oversubscription factor S for which the reserve is sufficient. */

static _Atomic uint64_t held[VGPU_MAX_DEVICES];
/* Whether this driver can create physical host memory: 0 means not tried yet, 1 means yes, 2 means no. */
static _Atomic int complete;

uint64_t host_memory_held(int device)
{
    return atomic_load_explicit(&held[device], memory_order_relaxed);
}

void host_memory_freed(int device, uint64_t bytes)
{
    atomic_fetch_sub_explicit(&held[device], bytes, memory_order_relaxed);
}

void host_memory_reset(void)
{
    for (int device = 0; device < VGPU_MAX_DEVICES; device++)
        atomic_store_explicit(&held[device], 0, memory_order_relaxed);
    atomic_store_explicit(&complete, 0, memory_order_relaxed);
}

/* Returns the reserve: the bytes of the card that requests must leave free, because contexts and code can only be on
 * the card. The reserve is two contexts for each container, if as many containers with this limit as fit use the card,
 * but at most a quarter of the card. */
static uint64_t reserve(const struct device *device, uint64_t card)
{
    bool known;
    uint64_t limit = device_limit(device, &known), context = ledger_context_bytes(device->ledger);
    uint64_t slices = limit && limit < card ? (card + limit - 1) / limit : 1;
    uint64_t bytes = LARGEST_SCALING * slices * (context ? context : CONTEXT_UNMEASURED);
    return bytes < card / 4 ? bytes : card / 4;
}

/* Reads the free bytes of the whole card from NVML, because a driver that enforces the limit itself reports only the
 * limit. Returns false if NVML does not show the whole card. */
static bool free_of_card(const struct device *device, uint64_t card, uint64_t *unused)
{
    nvmlDevice_t handle;
    nvmlMemory_t memory;
    bool known = nvml_load() && REAL_HAS(nvmlDeviceGetHandleByUUID) && REAL_HAS(nvmlDeviceGetMemoryInfo) &&
                 REAL(nvmlDeviceGetHandleByUUID)(device->uuid, &handle) == NVML_SUCCESS &&
                 REAL(nvmlDeviceGetMemoryInfo)(handle, &memory) == NVML_SUCCESS && memory.total >= card;
    if (known)
        *unused = memory.free;
    return known;
}

static bool fits(uint64_t bytes, uint64_t unused, uint64_t kept)
{
    return unused >= kept && bytes <= unused - kept;
}

bool host_memory_wanted(const struct device *device, uint64_t bytes)
{
    size_t unused, shown;
    uint64_t of_card;
    if (!limits_oversubscribe() || REAL(cuMemGetInfo_v2)(&unused, &shown) != CUDA_SUCCESS)
        return false;
    uint64_t card = limits_card(device->uuid), kept = reserve(device, card ? card : shown);
    if (fits(bytes, unused, kept))
        return false;
    /* A driver that enforces the limit reports as free (`unused`) only what the limit leaves. Then the request must fit
     * into this figure, and request and reserve together into the free memory of the whole card. If NVML does not show
     * the whole card, host memory is used as soon as the driver's figure does not leave the reserve. */
    return !card || bytes > unused || !free_of_card(device, card, &of_card) || !fits(bytes, of_card, kept);
}

/* --- for cuMemCreate --------------------------------------------------------------------------------------- */

/* Creates physical host memory. Needs a driver of CUDA 12.2 or later. The GPU reads it over the bus after the program
 * has called cuMemSetAccess. */
static CUresult create(CUmemGenericAllocationHandle *handle, uint64_t bytes, const CUmemAllocationProp *properties)
{
    CUmemAllocationProp host = {.type = properties->type, .location = {CU_MEM_LOCATION_TYPE_HOST_NUMA, 0}};
    int node;
    if (properties->requestedHandleTypes)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (REAL_HAS(cuDeviceGetAttribute) && properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
        REAL(cuDeviceGetAttribute)(&node, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, properties->location.id) == CUDA_SUCCESS && node > 0)
        host.location.id = node;
    return REAL(cuMemCreate)(handle, bytes, &host, 0) == CUDA_SUCCESS ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

bool host_memory_complete(void)
{
    static const CUmemAllocationProp here = {.type = CU_MEM_ALLOCATION_TYPE_PINNED};
    CUmemGenericAllocationHandle handle;
    if (!atomic_load_explicit(&complete, memory_order_relaxed)) {
        bool made = REAL_HAS(cuMemCreate) && REAL_HAS(cuMemRelease) && create(&handle, 2 * MIB, &here) == CUDA_SUCCESS;
        if (made)
            REAL(cuMemRelease)(handle);
        atomic_store_explicit(&complete, made ? 1 : 2, memory_order_relaxed);
    }
    return atomic_load_explicit(&complete, memory_order_relaxed) == 1;
}

bool host_memory_physical_wanted(const struct device *device, const CUmemAllocationProp *properties, uint64_t bytes)
{
    CUdevice current; /* cuMemGetInfo reports free memory only for the device of the current context. */
    return limits_oversubscribe() && !properties->requestedHandleTypes &&
           properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE && REAL(cuCtxGetDevice)(&current) == CUDA_SUCCESS &&
           current == properties->location.id && host_memory_wanted(device, bytes);
}

CUresult host_memory_create(const struct device *device, CUmemGenericAllocationHandle *handle, uint64_t bytes,
                            const CUmemAllocationProp *properties)
{
    CUresult status = create(handle, bytes, properties);
    if (status == CUDA_SUCCESS)
        atomic_fetch_add_explicit(&held[device->ledger], bytes, memory_order_relaxed);
    return status;
}

CUresult host_memory_take(const struct device *device, CUdeviceptr *pointer, uint64_t bytes)
{
    CUdevice ordinal;
    if (!REAL_HAS(cuMemAllocManaged) || !REAL_HAS(cuMemAdvise) || REAL(cuCtxGetDevice)(&ordinal) != CUDA_SUCCESS)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult status = REAL(cuMemAllocManaged)(pointer, bytes, CU_MEM_ATTACH_GLOBAL);
    if (status != CUDA_SUCCESS)
        return status;
    /* Without this advice pages would migrate to the card when a kernel touches them, and evict other containers'
     * memory. */
    status = REAL(cuMemAdvise)(*pointer, bytes, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, CU_DEVICE_CPU);
    if (status == CUDA_SUCCESS)
        status = REAL(cuMemAdvise)(*pointer, bytes, CU_MEM_ADVISE_SET_ACCESSED_BY, ordinal);
    if (status != CUDA_SUCCESS) {
        REAL(cuMemFree_v2)(*pointer);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    atomic_fetch_add_explicit(&held[device->ledger], bytes, memory_order_relaxed);
    vgpu_log(LOG_INFO, "%llu bytes of %s lie in host memory: the card has no room", (unsigned long long)bytes, device->uuid);
    return CUDA_SUCCESS;
}
