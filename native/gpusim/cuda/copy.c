/* SPDX-License-Identifier: Apache-2.0 */
/* Checks the addresses of copies and memsets, and moves or sets the bytes in host memory and simulated device
 * memory. */
#include "op.h"

#include <string.h>

CUresult copy_queue(CUstream stream, uint64_t bytes, bool over_bus)
{
    struct sim_work work = {.kind = SIM_WORK_COPY, .remaining = copy_cost(bytes, over_bus)};
    return stream_submit(stream, &work, NULL);
}

/* True if [address, address + bytes) is device memory or host memory known to the driver. */
bool range_valid(uintptr_t address, uint64_t bytes)
{
    struct block block;
    int device;
    CUdeviceptr base;
    uintptr_t host;
    size_t length;
    if (address + bytes < address)
        return false;
    if (memory_find(address, &block, &device))
        return address + bytes <= block.base + block.bytes;
    if (vmm_find(address, &base, &length, &device))
        return address + bytes <= base + length;
    return host_find(address, &host, &length, NULL, NULL) && address + bytes <= host + length;
}

static void written(uintptr_t address)
{
    int device;
    struct arena *arena = memory_arena(address, &device);
    if (arena)
        arena_touch(arena, address);
}

struct side {
    /* Address of element (0, 0, 0), with the offsets x, y, z applied. */
    unsigned char *base;
    /* Bytes from row to row and from slice to slice. */
    size_t row, slice;
    bool device;
};

static CUresult resolve(int type, const void *host, CUdeviceptr device, CUarray array, size_t x, size_t y, size_t z,
                        size_t pitch, size_t height, const CUDA_MEMCPY3D *copy, struct side *out)
{
    uintptr_t base = 0;
    size_t depth;
    if (type == CU_MEMORYTYPE_ARRAY) {
        REQUIRE(array && array_address(array, &base, &pitch, &height, &depth), CUDA_ERROR_INVALID_HANDLE);
        REQUIRE(x + copy->width <= pitch && y + copy->height <= height && z + copy->depth <= depth,
                CUDA_ERROR_INVALID_VALUE);
    } else {
        REQUIRE(type >= CU_MEMORYTYPE_HOST && type <= CU_MEMORYTYPE_UNIFIED, CUDA_ERROR_INVALID_VALUE);
        base = type == CU_MEMORYTYPE_HOST ? (uintptr_t)host : (uintptr_t)device;
        REQUIRE(base, CUDA_ERROR_INVALID_VALUE);
        if (copy->height <= 1 && copy->depth <= 1 && pitch == 0)
            pitch = copy->width + x;
        if (copy->depth <= 1 && height == 0)
            height = copy->height + y;
        REQUIRE(copy->height <= 1 || pitch >= x + copy->width, CUDA_ERROR_INVALID_VALUE);
        REQUIRE(copy->depth <= 1 || height >= y + copy->height, CUDA_ERROR_INVALID_VALUE);
    }
    out->row = pitch;
    out->slice = pitch * height;
    out->base = (unsigned char *)base + z * out->slice + y * out->row + x;
    out->device = type == CU_MEMORYTYPE_ARRAY || type == CU_MEMORYTYPE_DEVICE;
    if (copy->width && copy->height && copy->depth && (type == CU_MEMORYTYPE_DEVICE || type == CU_MEMORYTYPE_UNIFIED)) {
        size_t span = (copy->depth - 1) * out->slice + (copy->height - 1) * out->row + copy->width;
        struct block block;
        int on;
        bool known = range_valid((uintptr_t)out->base, span);
        /* A unified address may be ordinary host memory. A device address must be memory that the driver knows. */
        REQUIRE(known || type == CU_MEMORYTYPE_UNIFIED, CUDA_ERROR_INVALID_VALUE);
        if (type == CU_MEMORYTYPE_UNIFIED)
            out->device = memory_find((uintptr_t)out->base, &block, &on) ||
                          vmm_find((uintptr_t)out->base, &(CUdeviceptr){0}, &(size_t){0}, &on);
    }
    return CUDA_SUCCESS;
}

static CUresult both(const CUDA_MEMCPY3D *c, struct side *from, struct side *to)
{
    CUresult result = resolve(c->src_type, c->src_host, c->src_device, c->src_array, c->src_x, c->src_y, c->src_z,
                              c->src_pitch, c->src_height, c, from);
    if (result == CUDA_SUCCESS)
        result = resolve(c->dst_type, c->dst_host, c->dst_device, c->dst_array, c->dst_x, c->dst_y, c->dst_z,
                         c->dst_pitch, c->dst_height, c, to);
    return result;
}

CUresult copy_check(const CUDA_MEMCPY3D *copy)
{
    struct side from, to;
    return both(copy, &from, &to);
}

CUresult copy_move(const CUDA_MEMCPY3D *copy, bool *over_bus)
{
    struct side from, to;
    CUresult result = both(copy, &from, &to);
    if (result != CUDA_SUCCESS)
        return result;
    for (size_t z = 0; z < copy->depth; z++)
        for (size_t y = 0; y < copy->height; y++)
            memmove(to.base + z * to.slice + y * to.row, from.base + z * from.slice + y * from.row, copy->width);
    if (to.device && copy->width)
        written((uintptr_t)to.base);
    *over_bus = !from.device || !to.device;
    return CUDA_SUCCESS;
}

CUresult set_check(const CUDA_MEMSET_NODE_PARAMS *set)
{
    size_t unit = set->element_size, row = set->width * unit;
    REQUIRE((unit == 1 || unit == 2 || unit == 4) && set->dst % unit == 0, CUDA_ERROR_INVALID_VALUE);
    if (!set->width || !set->height)
        return CUDA_SUCCESS;
    REQUIRE(set->height == 1 || set->pitch >= row, CUDA_ERROR_INVALID_VALUE);
    return range_valid(set->dst, (set->height - 1) * set->pitch + row) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

void set_fill(const CUDA_MEMSET_NODE_PARAMS *set)
{
    if (!set->width || !set->height)
        return;
    for (size_t y = 0; y < set->height; y++) {
        unsigned char *row = (unsigned char *)(uintptr_t)set->dst + y * set->pitch;
        if (set->element_size == 1)
            memset(row, (int)set->value, set->width);
        for (size_t x = 0; set->element_size == 2 && x < set->width; x++)
            ((uint16_t *)row)[x] = (uint16_t)set->value;
        for (size_t x = 0; set->element_size == 4 && x < set->width; x++)
            ((uint32_t *)row)[x] = set->value;
    }
    written((uintptr_t)set->dst);
}
