/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ways to keep a GPU's memory in use after its owner freed it: an open IPC handle, a shareable handle of physical
 * memory or of a pool (in a process or a socket message), and a tile of a sparse array. A multicast object also keeps
 * memory but is not tried, because it needs several GPUs.
 */
#include "kept.h"

#include <string.h>
#include <unistd.h>

#include "loader.h"

#define WORD 0x76677075u
#define USED_FOR_TILES 1 /* USED_FOR_TILES is CU_MEM_CREATE_USAGE_TILE_POOL. */
#define FLOATS 0x20      /* FLOATS is CU_AD_FORMAT_FLOAT. */

#define FUNCTIONS(F) \
    F(get_ipc, cuIpcGetMemHandle, (CUipcMemHandle *handle, CUdeviceptr pointer)) \
    F(open_ipc, cuIpcOpenMemHandle_v2, (CUdeviceptr *pointer, CUipcMemHandle handle, unsigned flags)) \
    F(create, cuMemCreate, (CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties, \
                            unsigned long long flags)) \
    F(release, cuMemRelease, (CUmemGenericAllocationHandle handle)) \
    F(export, cuMemExportToShareableHandle, (void *shareable, CUmemGenericAllocationHandle handle, int type, \
                                             unsigned long long flags)) \
    F(import, cuMemImportFromShareableHandle, (CUmemGenericAllocationHandle *handle, void *shareable, int type)) \
    F(reserve, cuMemAddressReserve, (CUdeviceptr *pointer, size_t bytes, size_t alignment, CUdeviceptr address, \
                                     unsigned long long flags)) \
    F(map, cuMemMap, (CUdeviceptr pointer, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, \
                      unsigned long long flags)) \
    F(access, cuMemSetAccess, (CUdeviceptr pointer, size_t bytes, const void *accesses, size_t count)) \
    F(pool, cuMemPoolCreate, (CUmemoryPool *pool, const CUmemPoolProps *properties)) \
    F(from_pool, cuMemAllocFromPoolAsync, (CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream)) \
    F(export_pool, cuMemPoolExportToShareableHandle, (void *shareable, CUmemoryPool pool, int type, unsigned long long flags)) \
    F(import_pool, cuMemPoolImportFromShareableHandle, (CUmemoryPool *pool, void *shareable, int type, \
                                                        unsigned long long flags)) \
    F(access_pool, cuMemPoolSetAccess, (CUmemoryPool pool, const void *accesses, size_t count)) \
    F(export_place, cuMemPoolExportPointer, (void *place, CUdeviceptr pointer)) \
    F(import_place, cuMemPoolImportPointer, (CUdeviceptr *pointer, CUmemoryPool pool, void *place)) \
    F(array, cuArray3DCreate_v2, (CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *description)) \
    F(tiles, cuArrayGetSparseProperties, (void *properties, CUarray array)) \
    F(map_tiles, cuMemMapArrayAsync, (CUarrayMapInfo *tiles, unsigned count, CUstream stream)) \
    F(write, cuMemcpyHtoD_v2, (CUdeviceptr pointer, const void *bytes, size_t count)) \
    F(read, cuMemcpyDtoH_v2, (void *bytes, CUdeviceptr pointer, size_t count)) \
    F(wait, cuCtxSynchronize, (void))
static struct {
    FUNCTIONS(FIELD)
} call;
static const struct cuda *cuda;
static CUdevice device;

/* CUmemAccessDesc: this device may read and write. */
static struct {
    CUmemLocation location;
    int flags;
} access_here = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, 3};

void kept_begin(const struct cuda *opened, CUdevice of)
{
    FUNCTIONS(LOOK_UP)
    cuda = opened;
    device = access_here.location.id = of;
}

/* --- the ways ------------------------------------------------------------------------------------------ */

static CUresult export_ipc(struct piece *piece, struct note *note)
{
    if (!call.get_ipc || !call.open_ipc)
        return NO_FUNCTION;
    CUresult status = cuda->mem_alloc(&piece->pointer, piece->bytes);
    return status == CUDA_SUCCESS ? call.get_ipc(&note->exported, piece->pointer) : status;
}

static CUresult free_ipc(struct piece *piece)
{
    return cuda->mem_free(piece->pointer);
}

static CUresult open_ipc(struct piece *piece, const struct note *note)
{
    return call.open_ipc(&piece->pointer, note->exported, 1);
}

static CUresult export(struct piece *piece, struct note *note)
{
    const CUmemAllocationProp properties = {.type = 1, .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                            .location = {CU_MEM_LOCATION_TYPE_DEVICE, device}};
    (void)note;
    if (!call.create || !call.release || !call.export)
        return NO_FUNCTION;
    CUresult status = call.create(&piece->handle, piece->bytes, &properties, 0);
    return status == CUDA_SUCCESS
               ? call.export(&piece->descriptor, piece->handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)
               : status;
}

static CUresult release(struct piece *piece)
{
    close(piece->descriptor);
    return call.release(piece->handle);
}

/* The descriptor keeps the memory. The test also imports the memory, only to write a word into it. */
static CUresult import(struct piece *piece, const struct note *note)
{
    CUdeviceptr pointer = 0;
    void *shareable = (void *)(intptr_t)piece->descriptor;
    (void)note;
    if (call.import && call.reserve && call.map && call.access &&
        call.import(&piece->handle, shareable, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) == CUDA_SUCCESS &&
        call.reserve(&pointer, piece->bytes, 0, 0, 0) == CUDA_SUCCESS &&
        call.map(pointer, piece->bytes, 0, piece->handle, 0) == CUDA_SUCCESS &&
        call.access(pointer, piece->bytes, &access_here, 1) == CUDA_SUCCESS)
        piece->pointer = pointer;
    return piece->descriptor >= 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult export_pool(struct piece *piece, struct note *note)
{
    const CUmemPoolProps properties = {.allocType = 1, .handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                       .location = {CU_MEM_LOCATION_TYPE_DEVICE, device}};
    if (!call.pool || !call.from_pool || !call.export_pool || !call.wait)
        return NO_FUNCTION;
    CUresult status = call.pool(&piece->pool, &properties);
    if (status == CUDA_SUCCESS)
        status = call.from_pool(&piece->pointer, piece->bytes, piece->pool, NULL);
    if (status == CUDA_SUCCESS)
        status = call.wait();
    if (status == CUDA_SUCCESS)
        status = call.export_pool(&piece->descriptor, piece->pool, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    note->placed = status == CUDA_SUCCESS && call.export_place &&
                   call.export_place(note->place, piece->pointer) == CUDA_SUCCESS;
    return status;
}

static CUresult import_pool(struct piece *piece, const struct note *note)
{
    char place[sizeof note->place];
    void *shareable = (void *)(intptr_t)piece->descriptor;
    memcpy(place, note->place, sizeof place);
    if (call.import_pool && call.import_place && note->placed &&
        call.import_pool(&piece->pool, shareable, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) == CUDA_SUCCESS) {
        if (call.access_pool)
            call.access_pool(piece->pool, &access_here, 1);
        if (call.import_place(&piece->pointer, piece->pool, place) != CUDA_SUCCESS)
            piece->pointer = 0;
    }
    return piece->descriptor >= 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Maps one tile of a sparse array to the piece. The tile keeps the whole piece. */
static CUresult map_tile(struct piece *piece, struct note *note)
{
    const CUmemAllocationProp properties = {.type = 1, .location = {CU_MEM_LOCATION_TYPE_DEVICE, device},
                                            .allocFlags = {.usage = USED_FOR_TILES}};
    const CUDA_ARRAY3D_DESCRIPTOR description = {4096, 4096, 0, FLOATS, 1, CUDA_ARRAY3D_SPARSE};
    struct {
        unsigned width, height, depth, first_of_tail;
        unsigned long long tail;
        unsigned flags, reserved[4];
    } extent;
    CUarray array;
    (void)note;
    if (!call.create || !call.release || !call.array || !call.tiles || !call.map_tiles || !call.wait)
        return NO_FUNCTION;
    CUresult status = call.create(&piece->handle, piece->bytes, &properties, 0);
    if (status == CUDA_SUCCESS)
        status = call.array(&array, &description);
    if (status != CUDA_SUCCESS)
        return status;
    memset(&extent, 0, sizeof extent);
    if (call.tiles(&extent, array) != CUDA_SUCCESS) /* Assume 64 KiB, the size of a tile in every known driver. */
        extent.width = extent.height = 128;
    CUarrayMapInfo tile = {.resource = array, .memOperationType = CU_MEM_OPERATION_TYPE_MAP, .memHandle.memHandle = piece->handle};
    tile.subresource.sparseLevel.extentWidth = extent.width;
    tile.subresource.sparseLevel.extentHeight = extent.height;
    tile.subresource.sparseLevel.extentDepth = extent.depth ? extent.depth : 1;
    tile.deviceBitMask = 1u << device;
    status = call.map_tiles(&tile, 1, NULL);
    return status == CUDA_SUCCESS ? call.wait() : status;
}

static CUresult release_tile(struct piece *piece)
{
    return call.release(piece->handle);
}

const struct kept kept_by_ipc = {"memory that another process had open", export_ipc, free_ipc, open_ipc};
const struct kept kept_by_handle = {"memory of which another process had a handle", export, release, import};
const struct kept kept_by_pool = {"a pool of which another process had a handle", export_pool, NULL, import_pool};
const struct kept kept_by_array = {"memory that a sparse array used", map_tile, release_tile, NULL};

/* --- checks whether the memory exists ------------------------------------------------------------------------- */

bool kept_write(struct piece *piece)
{
    const unsigned word = WORD;
    piece->written = piece->pointer && call.write && call.read &&
                     call.write(piece->pointer, &word, sizeof word) == CUDA_SUCCESS && kept_lives(piece);
    return piece->written || !piece->pointer;
}

bool kept_lives(const struct piece *piece)
{
    unsigned word = 0;
    return !piece->pointer || (call.read(&word, piece->pointer, sizeof word) == CUDA_SUCCESS && word == WORD);
}
