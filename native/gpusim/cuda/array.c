/* SPDX-License-Identifier: Apache-2.0 */
/* Implements CUDA arrays and mipmapped arrays. An array takes format * channels * width * height * depth bytes, without
 * padding, because the padding of hardware is not public. */
#include "hostile.h"
#include "op.h"
#include "vmm.h"

#include <stdlib.h>

#define ARRAY_MAGIC 0x41525231u
#define LAYERED 0x01u
#define CUBEMAP 0x04u
#define SPARSE 0x40u
#define DEFERRED_MAPPING 0x80u
#define MAX_LEVELS 32

struct CUarray_st {
    uint32_t magic;
    CUcontext context;
    uintptr_t base;
    size_t element, row;
    /* Descriptor as the program passed it. */
    CUDA_ARRAY3D_DESCRIPTOR shape;
    /* At least 1 each; the depth of a cube map is 6. */
    size_t height, depth;
    /* The mipmapped array of which this array is a level, and which frees this array; NULL if there is none. */
    CUmipmappedArray of;
};

struct CUmipmappedArray_st {
    uint32_t magic;
    CUcontext context;
    unsigned levels;
    uintptr_t base;
    struct CUarray_st level[MAX_LEVELS];
};

/* Returns the bytes of one element of a CUarray_format. */
static size_t format_size(int format)
{
    switch (format) {
    case 0x01: case 0x08: return 1;              /* Integers of 8 bits. */
    case 0x02: case 0x09: case 0x10: return 2;   /* Integers of 16 bits, and half. */
    case 0x03: case 0x0a: case 0x20: return 4;   /* Integers of 32 bits, and float. */
    default: return 0;
    }
}

static CUresult shape(struct CUarray_st *array, const CUDA_ARRAY3D_DESCRIPTOR *d, size_t *bytes)
{
    size_t unit = format_size(d->format), all;
    REQUIRE(unit && (d->channels == 1 || d->channels == 2 || d->channels == 4) && d->width, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(!(d->flags & CUBEMAP) || (d->width == d->height && d->depth % 6 == 0), CUDA_ERROR_INVALID_VALUE);
    *array = (struct CUarray_st){.magic = ARRAY_MAGIC, .element = unit * d->channels, .shape = *d,
                                 .height = d->height ? d->height : 1, .depth = d->depth ? d->depth : 1};
    if (__builtin_mul_overflow(d->width, array->element, &array->row) ||
        __builtin_mul_overflow(array->row, array->height, &all) || __builtin_mul_overflow(all, array->depth, &all))
        return CUDA_ERROR_OUT_OF_MEMORY;
    *bytes = all;
    return CUDA_SUCCESS;
}

static CUresult create(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *descriptor)
{
    ENTER_CONTEXT(context);
    size_t bytes;
    CUdeviceptr base;
    REQUIRE(out && descriptor, CUDA_ERROR_INVALID_VALUE);
    CUarray array = calloc(1, sizeof *array);
    REQUIRE(array, CUDA_ERROR_OUT_OF_MEMORY);
    CUresult result = shape(array, descriptor, &bytes);
    if (result == CUDA_SUCCESS && descriptor->flags & (SPARSE | DEFERRED_MAPPING))
        base = 0; /* A sparse array has no memory at first: cuMemMapArrayAsync binds memory to it later. */
    else if (result == CUDA_SUCCESS)
        result = memory_alloc(context, bytes, BLOCK_ARRAY, &base);
    if (result != CUDA_SUCCESS) {
        free(array);
        return result;
    }
    array->context = context;
    array->base = base;
    *out = array;
    return CUDA_SUCCESS;
}

static bool valid(CUarray array)
{
    return array && array->magic == ARRAY_MAGIC;
}

bool array_sparse(const void *array)
{
    return valid((CUarray)(uintptr_t)array) && ((CUarray)(uintptr_t)array)->base == 0;
}

bool array_address(CUarray array, uintptr_t *base, size_t *pitch, size_t *height, size_t *depth)
{
    if (!valid(array) || array->base == 0)
        return false;
    *base = array->base;
    *pitch = array->row;
    *height = array->height;
    *depth = array->depth;
    return true;
}

EXPORT CUresult cuArray3DCreate_v2(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *descriptor)
{
    return create(array, descriptor);
}

EXPORT CUresult cuArrayCreate_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *d)
{
    REQUIRE(d, CUDA_ERROR_INVALID_VALUE);
    return create(array, &(CUDA_ARRAY3D_DESCRIPTOR){.width = d->width, .height = d->height, .format = d->format,
                                                    .channels = d->channels});
}

/* Descriptor of the first versions of the functions, with 32-bit sizes. */
struct descriptor_v1 {
    unsigned width, height;
    int format;
    unsigned channels;
};
struct descriptor3d_v1 {
    unsigned width, height, depth;
    int format;
    unsigned channels, flags;
};

EXPORT CUresult cuArrayCreate(CUarray *array, const struct descriptor_v1 *d)
{
    REQUIRE(d, CUDA_ERROR_INVALID_VALUE);
    return create(array, &(CUDA_ARRAY3D_DESCRIPTOR){.width = d->width, .height = d->height, .format = d->format,
                                                    .channels = d->channels});
}

EXPORT CUresult cuArray3DCreate(CUarray *array, const struct descriptor3d_v1 *d)
{
    REQUIRE(d, CUDA_ERROR_INVALID_VALUE);
    return create(array, &(CUDA_ARRAY3D_DESCRIPTOR){.width = d->width, .height = d->height, .depth = d->depth,
                                                    .format = d->format, .channels = d->channels, .flags = d->flags});
}

EXPORT CUresult cuArrayDestroy(CUarray array)
{
    ENTER();
    REQUIRE(valid(array) && !array->of, CUDA_ERROR_INVALID_HANDLE);
    CUresult result = atomic_load(&array->context->alive) ? free_wait(array->context) : CUDA_SUCCESS;
    if (result != CUDA_SUCCESS)
        return result;
    bool freed = true;
    if (array_sparse(array))
        bindings_end(array);
    else
        freed = memory_free_owned(array->base, 1u << BLOCK_ARRAY);
    array->magic = 0;
    free(array);
    return freed ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

EXPORT CUresult cuArray3DGetDescriptor_v2(CUDA_ARRAY3D_DESCRIPTOR *descriptor, CUarray array)
{
    ENTER();
    REQUIRE(descriptor, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(valid(array), CUDA_ERROR_INVALID_HANDLE);
    *descriptor = array->shape;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuArrayGetDescriptor_v2(CUDA_ARRAY_DESCRIPTOR *descriptor, CUarray array)
{
    ENTER();
    REQUIRE(descriptor, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(valid(array), CUDA_ERROR_INVALID_HANDLE);
    *descriptor = (CUDA_ARRAY_DESCRIPTOR){.width = array->shape.width, .height = array->shape.height,
                                          .format = array->shape.format, .channels = array->shape.channels};
    return CUDA_SUCCESS;
}

/* ---- mipmapped --------------------------------------------------------------------------------------------------------- */

static size_t half(size_t value, unsigned level)
{
    return value >> level ? value >> level : (value ? 1 : 0);
}

EXPORT CUresult cuMipmappedArrayCreate(CUmipmappedArray *out, const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned levels)
{
    ENTER_CONTEXT(context);
    REQUIRE(out && d, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(!(d->flags & (SPARSE | DEFERRED_MAPPING)), CUDA_ERROR_NOT_SUPPORTED);
    /* A number of levels outside the valid range is no error: it is raised to 1, or lowered to the largest number that
     * the sizes allow. */
    levels = levels < 1 ? 1 : levels > MAX_LEVELS ? MAX_LEVELS : levels;
    CUmipmappedArray mipmap = calloc(1, sizeof *mipmap);
    REQUIRE(mipmap, CUDA_ERROR_OUT_OF_MEMORY);
    size_t offset[MAX_LEVELS], all = 0, bytes = 0, largest = d->width > d->height ? d->width : d->height;
    CUresult result = CUDA_SUCCESS;
    if (d->depth > largest && !(d->flags & LAYERED))
        largest = d->depth;
    unsigned made = 0;
    for (; made < levels && (made == 0 || largest >> made) && result == CUDA_SUCCESS; made++) {
        CUDA_ARRAY3D_DESCRIPTOR level = *d;
        level.width = half(d->width, made);
        level.height = half(d->height, made);
        level.depth = d->flags & (LAYERED | CUBEMAP) ? d->depth : half(d->depth, made);
        result = shape(&mipmap->level[made], &level, &bytes);
        offset[made] = all;
        if (__builtin_add_overflow(all, bytes, &all))
            result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    CUdeviceptr base = 0;
    if (result == CUDA_SUCCESS)
        result = memory_alloc(context, all, BLOCK_ARRAY, &base);
    if (result != CUDA_SUCCESS) {
        free(mipmap);
        return result;
    }
    mipmap->magic = ARRAY_MAGIC;
    mipmap->context = context;
    mipmap->levels = made;
    mipmap->base = base;
    for (unsigned i = 0; i < made; i++) {
        mipmap->level[i].base = base + offset[i];
        mipmap->level[i].context = context;
        mipmap->level[i].of = mipmap;
    }
    *out = mipmap;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMipmappedArrayGetLevel(CUarray *array, CUmipmappedArray mipmap, unsigned level)
{
    ENTER();
    REQUIRE(array, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(mipmap && mipmap->magic == ARRAY_MAGIC, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(level < mipmap->levels, CUDA_ERROR_INVALID_VALUE);
    *array = &mipmap->level[level];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMipmappedArrayDestroy(CUmipmappedArray mipmap)
{
    ENTER();
    REQUIRE(mipmap && mipmap->magic == ARRAY_MAGIC, CUDA_ERROR_INVALID_HANDLE);
    CUresult result = atomic_load(&mipmap->context->alive) ? free_wait(mipmap->context) : CUDA_SUCCESS;
    if (result != CUDA_SUCCESS)
        return result;
    mipmap->magic = 0;
    bool freed = memory_free_owned(mipmap->base, 1u << BLOCK_ARRAY);
    free(mipmap);
    return freed ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}
