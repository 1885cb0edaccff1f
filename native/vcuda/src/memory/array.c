/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Defines the hooks (replacements) of the functions for CUDA arrays. The hooks charge arrays to the container's limit.
 * An array is charged for all its elements, a mipmapped array for all its levels. Sparse arrays and arrays with
 * deferred mapping have no memory of their own: the memory that is mapped into them was charged when cuMemCreate
 * created it.
 */
#include "memory.h"

#include "process.h"

/* Computes the bytes of `width` x `height` elements in one slice of a format. Returns false for a format that this
 * library does not know. */
static bool slice_bytes(int format, unsigned channels, uint64_t width, uint64_t height, uint64_t *bytes)
{
    uint64_t element = 0, block = 0;
    switch (format) {
    case 0x01: case 0x08: element = channels; break;                 /* Formats with 8 bits. */
    case 0x02: case 0x09: case 0x10: element = 2ull * channels; break; /* Formats with 16 bits, half included. */
    case 0x03: case 0x0a: case 0x20: element = 4ull * channels; break; /* Formats with 32 bits, float included. */
    case 0xb0: /* NV12 has a luma plane and a chroma plane of half the height. */
        return !__builtin_mul_overflow(width, height + height / 2 + height % 2, bytes);
    case 0xc0: case 0xc6: element = 1; break;
    case 0xc1: case 0xc7: case 0xc3: case 0xc9: element = 2; break;
    case 0xc2: case 0xc8: case 0xc4: case 0xca: element = 4; break;
    case 0xc5: case 0xcb: element = 8; break;
    case 0x91: case 0x92: case 0x97: case 0x98: block = 8; break; /* The block-compressed formats BC1 and BC4. */
    default:
        if (format < 0x93 || format > 0x9e)
            return false;
        block = 16; /* All other block-compressed formats. */
    }
    if (block) {
        width = (width + 3) / 4;
        height = (height + 3) / 4;
        element = block;
    }
    return !__builtin_mul_overflow(width, height, bytes) && !__builtin_mul_overflow(*bytes, element, bytes);
}

static bool array_bytes(const CUDA_ARRAY3D_DESCRIPTOR *array, unsigned levels, uint64_t *bytes)
{
    uint64_t width = array->Width, height = array->Height ? array->Height : 1, depth = array->Depth ? array->Depth : 1;
    /* In a layered array (flag 0x01) the depth is the number of layers, which is the same at all levels. */
    bool layered = (array->Flags & (0x01 | CUDA_ARRAY3D_CUBEMAP)) != 0;
    *bytes = 0;
    for (unsigned level = 0; level < levels; level++) {
        uint64_t slice;
        if (!slice_bytes(array->Format, array->NumChannels, width, height, &slice) ||
            __builtin_mul_overflow(slice, depth, &slice) || __builtin_add_overflow(*bytes, slice, bytes))
            return false;
        width = width > 1 ? width / 2 : 1;
        height = height > 1 ? height / 2 : 1;
        if (!layered)
            depth = depth > 1 ? depth / 2 : 1;
    }
    return true;
}

/* Begins the allocation of an array. *unknown is true if this library cannot compute the size. Then the driver is
 * called without a charge, and if it accepts the array, make_end destroys it. */
static CUresult make_begin(enum control control, struct allocation *making, const CUDA_ARRAY3D_DESCRIPTOR *array, unsigned levels,
                           bool *unknown)
{
    uint64_t bytes;
    bool sized = array && !(array->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING));
    *unknown = sized && !array_bytes(array, levels, &bytes);
    return sized && !*unknown ? allocation_begin(control, making, bytes) : allocation_target(control, making);
}

static CUresult make_end(struct allocation *making, CUresult status, void *array, CUresult (*destroy)(void *array), bool unknown)
{
    if (unknown && status == CUDA_SUCCESS) {
        destroy(array);
        status = memory_refuse("an array of a format or size that this library does not know");
    }
    return allocation_end(making, status, &vgpu_arrays, (uintptr_t)array);
}

static CUresult destroy_array(void *array)
{
    return REAL_HAS(cuArrayDestroy) ? REAL(cuArrayDestroy)(array) : CUDA_ERROR_NOT_FOUND;
}

static CUresult destroy_mipmapped(void *array)
{
    return REAL_HAS(cuMipmappedArrayDestroy) ? REAL(cuMipmappedArrayDestroy)(array) : CUDA_ERROR_NOT_FOUND;
}

static CUDA_ARRAY3D_DESCRIPTOR flat(const CUDA_ARRAY_DESCRIPTOR *array)
{
    return (CUDA_ARRAY3D_DESCRIPTOR){
        .Width = array->Width, .Height = array->Height, .Format = array->Format, .NumChannels = array->NumChannels};
}

static CUDA_ARRAY3D_DESCRIPTOR flat_v1(const CUDA_ARRAY_DESCRIPTOR_v1 *array)
{
    return (CUDA_ARRAY3D_DESCRIPTOR){
        .Width = array->Width, .Height = array->Height, .Format = array->Format, .NumChannels = array->NumChannels};
}

static CUDA_ARRAY3D_DESCRIPTOR deep(const CUDA_ARRAY3D_DESCRIPTOR *array)
{
    return *array;
}

static CUDA_ARRAY3D_DESCRIPTOR deep_v1(const CUDA_ARRAY3D_DESCRIPTOR_v1 *array)
{
    return (CUDA_ARRAY3D_DESCRIPTOR){.Width = array->Width,
                                     .Height = array->Height,
                                     .Depth = array->Depth,
                                     .Format = array->Format,
                                     .NumChannels = array->NumChannels,
                                     .Flags = array->Flags};
}

#define CREATE(symbol, type, full) \
    EXPORT CUresult symbol(CUarray *array, const type *description) \
    { \
        ENTER(symbol, (array, description)); \
        struct allocation making; \
        bool unknown; \
        CUDA_ARRAY3D_DESCRIPTOR all = description ? full(description) : (CUDA_ARRAY3D_DESCRIPTOR){0}; \
        CUresult status = make_begin(control, &making, description ? &all : NULL, 1, &unknown); \
        if (status != CUDA_SUCCESS) \
            return status; \
        status = REAL(symbol)(array, description); \
        return make_end(&making, status, status ? NULL : *array, destroy_array, unknown); \
    }

CREATE(cuArrayCreate, CUDA_ARRAY_DESCRIPTOR_v1, flat_v1)
CREATE(cuArrayCreate_v2, CUDA_ARRAY_DESCRIPTOR, flat)
CREATE(cuArray3DCreate, CUDA_ARRAY3D_DESCRIPTOR_v1, deep_v1)
CREATE(cuArray3DCreate_v2, CUDA_ARRAY3D_DESCRIPTOR, deep)

EXPORT CUresult cuMipmappedArrayCreate(CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *description, unsigned int levels)
{
    ENTER(cuMipmappedArrayCreate, (array, description, levels));
    struct allocation making;
    bool unknown;
    /* The driver creates at most one level more than the number of times that the largest side can be halved. */
    unsigned possible = 1;
    if (description)
        for (uint64_t side = description->Width | description->Height | description->Depth; side > 1; side >>= 1)
            possible++;
    unsigned made = levels < 1 ? 1 : levels < possible ? levels : possible;
    CUresult status = make_begin(control, &making, description, made, &unknown);
    if (status != CUDA_SUCCESS)
        return status;
    status = REAL(cuMipmappedArrayCreate)(array, description, levels);
    return make_end(&making, status, status ? NULL : *array, destroy_mipmapped, unknown);
}

#define DESTROY(symbol, type) \
    EXPORT CUresult symbol(type array) \
    { \
        ENTER(symbol, (array)); \
        struct block block; \
        bool ours = block_take(&vgpu_arrays, (uintptr_t)array, &block); \
        FLIGHT(ours ? block.device : -1); \
        CUresult status = REAL(symbol)(array); \
        if (ours && status != CUDA_SUCCESS) \
            block_put(&vgpu_arrays, &block); \
        else if (ours) \
            ledger_uncharge(block.device, ACCOUNT_USED, block.bytes); \
        return status; \
    }

DESTROY(cuArrayDestroy, CUarray)
DESTROY(cuMipmappedArrayDestroy, CUmipmappedArray)
