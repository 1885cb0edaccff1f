/* SPDX-License-Identifier: Apache-2.0 */
/* Returns attributes of addresses (cuPointerGetAttribute). Handles advice for managed memory, and prefetches it. */
#include "op.h"

#include <string.h>

enum {
    ATTRIBUTE_CONTEXT = 1,
    ATTRIBUTE_MEMORY_TYPE = 2,
    ATTRIBUTE_DEVICE_POINTER = 3,
    ATTRIBUTE_HOST_POINTER = 4,
    ATTRIBUTE_P2P_TOKENS = 5,
    ATTRIBUTE_SYNC_MEMOPS = 6,
    ATTRIBUTE_BUFFER_ID = 7,
    ATTRIBUTE_IS_MANAGED = 8,
    ATTRIBUTE_DEVICE_ORDINAL = 9,
    ATTRIBUTE_IPC_CAPABLE = 10,
    ATTRIBUTE_RANGE_START = 11,
    ATTRIBUTE_RANGE_SIZE = 12,
    ATTRIBUTE_MAPPED = 13,
    ATTRIBUTE_ALLOWED_HANDLES = 14,
    ATTRIBUTE_RDMA = 15,
    ATTRIBUTE_ACCESS_FLAGS = 16,
    ATTRIBUTE_POOL = 17,
};

struct facts {
    bool known;
    unsigned type;
    int device;
    uintptr_t base;
    size_t bytes;
    struct block block; /* From memory_find; kind is 0 if it finds no block. */
    CUcontext context;
};

static struct facts facts_of(CUdeviceptr pointer)
{
    struct facts f = {.device = -1};
    CUdeviceptr base;
    if (memory_find(pointer, &f.block, &f.device)) {
        f.known = true;
        f.type = CU_MEMORYTYPE_DEVICE;
        f.base = f.block.base;
        f.bytes = f.block.bytes;
        f.context = f.block.kind == BLOCK_PLAIN || f.block.kind == BLOCK_MANAGED ? f.block.owner : NULL;
    } else if (vmm_find(pointer, &base, &f.bytes, &f.device)) {
        f.known = true;
        f.type = CU_MEMORYTYPE_DEVICE;
        f.base = base;
    } else if (host_find(pointer, &f.base, &f.bytes, NULL, &f.context)) {
        f.known = true;
        f.type = CU_MEMORYTYPE_HOST;
        f.device = f.context ? f.context->device : -1;
    }
    return f;
}

static CUresult answer(void *out, int attribute, CUdeviceptr pointer, const struct facts *f)
{
    bool managed = f->block.kind == BLOCK_MANAGED;
    switch (attribute) {
    case ATTRIBUTE_CONTEXT: *(CUcontext *)out = f->context; return f->known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case ATTRIBUTE_MEMORY_TYPE: *(unsigned *)out = f->type; return f->known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)out = pointer; break;
    case ATTRIBUTE_HOST_POINTER:
        REQUIRE(f->known && (f->type == CU_MEMORYTYPE_HOST || managed), CUDA_ERROR_INVALID_VALUE);
        *(void **)out = (void *)(uintptr_t)pointer;
        break;
    case ATTRIBUTE_SYNC_MEMOPS: *(unsigned *)out = 0; break;
    case ATTRIBUTE_BUFFER_ID: *(unsigned long long *)out = f->block.kind ? f->block.id : 0; break;
    case ATTRIBUTE_IS_MANAGED: *(unsigned *)out = managed; return CUDA_SUCCESS;
    case ATTRIBUTE_DEVICE_ORDINAL: *(int *)out = f->device; break;
    case ATTRIBUTE_IPC_CAPABLE: *(unsigned *)out = f->block.kind == BLOCK_PLAIN; break;
    case ATTRIBUTE_RANGE_START: *(CUdeviceptr *)out = f->base; break;
    case ATTRIBUTE_RANGE_SIZE: *(size_t *)out = f->bytes; break;
    case ATTRIBUTE_MAPPED: *(unsigned *)out = f->known; return CUDA_SUCCESS;
    case ATTRIBUTE_ALLOWED_HANDLES: *(unsigned long long *)out = 0; break;
    case ATTRIBUTE_RDMA: *(unsigned *)out = 0; break;
    case ATTRIBUTE_ACCESS_FLAGS: *(unsigned *)out = f->known ? 3 : 0; break;
    case ATTRIBUTE_POOL:
        REQUIRE(f->block.kind == BLOCK_POOL, CUDA_ERROR_INVALID_VALUE);
        *(CUmemoryPool *)out = f->block.owner;
        break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return f->known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuPointerGetAttribute(void *out, int attribute, CUdeviceptr pointer)
{
    ENTER();
    REQUIRE(out, CUDA_ERROR_INVALID_VALUE);
    struct facts f = facts_of(pointer);
    if (!f.known)
        return CUDA_ERROR_INVALID_VALUE;
    return answer(out, attribute, pointer, &f);
}

/* For an address unknown to the driver, this function, unlike cuPointerGetAttribute, returns success, and zeros (-2 as
 * the ordinal). Callers recognize such an address by these values. */
EXPORT CUresult cuPointerGetAttributes(unsigned count, int *attributes, void **out, CUdeviceptr pointer)
{
    ENTER();
    REQUIRE(attributes && out && count, CUDA_ERROR_INVALID_VALUE);
    struct facts f = facts_of(pointer);
    for (unsigned i = 0; i < count; i++) {
        static const unsigned char wide[ATTRIBUTE_POOL + 1] = {[ATTRIBUTE_CONTEXT] = 8, [ATTRIBUTE_DEVICE_POINTER] = 8,
            [ATTRIBUTE_HOST_POINTER] = 8, [ATTRIBUTE_BUFFER_ID] = 8, [ATTRIBUTE_RANGE_START] = 8,
            [ATTRIBUTE_RANGE_SIZE] = 8, [ATTRIBUTE_ALLOWED_HANDLES] = 8, [ATTRIBUTE_POOL] = 8};
        REQUIRE(attributes[i] >= 1 && attributes[i] <= ATTRIBUTE_POOL && attributes[i] != ATTRIBUTE_P2P_TOKENS && out[i],
                CUDA_ERROR_INVALID_VALUE);
        memset(out[i], 0, wide[attributes[i]] ? wide[attributes[i]] : 4);
        if (f.known)
            answer(out[i], attributes[i], pointer, &f);
        else if (attributes[i] == ATTRIBUTE_DEVICE_ORDINAL)
            *(int *)out[i] = -2;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuPointerSetAttribute(const void *value, int attribute, CUdeviceptr pointer)
{
    ENTER();
    REQUIRE(value && attribute == ATTRIBUTE_SYNC_MEMOPS && facts_of(pointer).known, CUDA_ERROR_INVALID_VALUE);
    return CUDA_SUCCESS;
}

/*
 * ---- managed memory ----
 *
 * Only a prefetch or a preferred location moves a block, and always the whole block: the GPU's use of a block in host
 * memory does not move it, but goes over the bus. Advice for a part of a block applies to the whole block.
 */
#define ADVISE_PREFERRED_LOCATION 3
#define LOCATION_DEVICE 1


static CUresult managed(CUdeviceptr pointer, size_t bytes)
{
    ENTER();
    struct block block;
    int device;
    REQUIRE(bytes && memory_find(pointer, &block, &device) && block.kind == BLOCK_MANAGED, CUDA_ERROR_INVALID_VALUE);
    return pointer + bytes <= block.base + block.bytes ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult advised(CUresult valid, CUdeviceptr pointer, int advice, bool host)
{
    if (valid == CUDA_SUCCESS && advice == ADVISE_PREFERRED_LOCATION)
        memory_migrate(pointer, host);
    return valid;
}

EXPORT CUresult cuMemAdvise(CUdeviceptr pointer, size_t bytes, int advice, CUdevice device)
{
    REQUIRE(advice >= 1 && advice <= 6 && device >= -1 && device < driver.count, CUDA_ERROR_INVALID_VALUE);
    return advised(managed(pointer, bytes), pointer, advice, device < 0);
}

EXPORT CUresult cuMemAdvise_v2(CUdeviceptr pointer, size_t bytes, int advice, CUmemLocation location)
{
    REQUIRE(advice >= 1 && advice <= 6 && location.type >= 1 && location.type <= 4, CUDA_ERROR_INVALID_VALUE);
    return advised(managed(pointer, bytes), pointer, advice, location.type != LOCATION_DEVICE);
}

static CUresult prefetch(CUdeviceptr pointer, size_t bytes, bool host, CUstream handle)
{
    ENTER_CONTEXT(context);
    CUstream stream;
    CUresult result = managed(pointer, bytes);
    if (result == CUDA_SUCCESS)
        result = stream_resolve(context, handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    REQUIRE(!stream->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    memory_migrate(pointer, host);
    return copy_queue(stream, bytes, true);
}

#define PREFETCH(name, target, check, stream)                                            \
    EXPORT CUresult name(CUdeviceptr p, size_t n, target, CUstream s)                    \
    {                                                                                    \
        return (check) ? prefetch(p, n, to < 0, stream) : CUDA_ERROR_INVALID_DEVICE;     \
    }
#define PREFETCH_V2(name, stream)                                                                  \
    EXPORT CUresult name(CUdeviceptr p, size_t n, CUmemLocation to, unsigned flags, CUstream s)    \
    {                                                                                              \
        REQUIRE(flags == 0, CUDA_ERROR_INVALID_VALUE);                                             \
        REQUIRE(to.type != 1 || device_valid(to.id), CUDA_ERROR_INVALID_DEVICE);                   \
        return prefetch(p, n, to.type != LOCATION_DEVICE, stream);                                 \
    }
PREFETCH(cuMemPrefetchAsync, CUdevice to, to == -1 || device_valid(to), LEGACY_STREAM(s))
PREFETCH(cuMemPrefetchAsync_ptsz, CUdevice to, to == -1 || device_valid(to), PER_THREAD_STREAM(s))
PREFETCH_V2(cuMemPrefetchAsync_v2, LEGACY_STREAM(s))
PREFETCH_V2(cuMemPrefetchAsync_v2_ptsz, PER_THREAD_STREAM(s))
