/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Executes the commands of its standard input, one a line, and prints for each a line of numbers that begins with the
 * CUresult.
 *
 *   init | pid | info | total | sync | unit        unit: result of cuMemGetAllocationGranularity
 *   ctx | ctx-destroy ID | retain | release         contexts on device 0
 *   module BYTES | unload ID                        a module with so many bytes of globals, plus the kernels
 *   load                                            loads the kernels and launches one, so that lazy code is loaded
 *   limit WHICH BYTES                               cuCtxSetLimit
 *   get ROUTE BYTES                                 allocates once → status, id, requested bytes
 *   drop ID                                         frees an allocation
 *   take ROUTE BYTES UNIT                           allocates until refused, halving the size down to UNIT → status of
 *                                                   the last refusal, granted bytes, number of allocations
 *   lend ID                                         exports an IPC handle of an allocation → status, eight numbers
 *   borrow NUMBERS                                  opens an IPC handle of another process
 *   drop-all                                        frees all allocations, in order
 *   data ID SEED                                    fills by a kernel, reads back → status, number of wrong words
 *   bytes ID                                        fills by cuMemset, which the simulated driver executes too
 *
 * Routes: alloc, pitch, managed, async, pool (a pool of its own), vmm (created, mapped, made accessible), array, mipmap.
 */
#include "gpu.h"

enum { PIECES = 1 << 14 };

struct piece {
    char route;
    size_t bytes;
    CUdeviceptr pointer;
    CUmemGenericAllocationHandle handle;
};

static struct piece piece[PIECES];
static int pieces;
static CUmemoryPool pool;
static CUmodule module[64];
static int modules;

static const CUmemAllocationProp on_device = {.type = PINNED, .location = {ON_DEVICE, 0}};

static CUresult map(struct piece *one)
{
    const CUmemAccessDesc access = {{ON_DEVICE, 0}, ACCESS_READ_WRITE};
    CUresult status = CALL(cuMemCreate, &one->handle, one->bytes, &on_device, 0);
    if (status != CUDA_SUCCESS)
        return status;
    if ((status = CALL(cuMemAddressReserve, &one->pointer, one->bytes, 0, 0, 0)) == CUDA_SUCCESS &&
        (status = CALL(cuMemMap, one->pointer, one->bytes, 0, one->handle, 0)) == CUDA_SUCCESS)
        status = CALL(cuMemSetAccess, one->pointer, one->bytes, &access, 1);
    return status;
}

static CUresult get(const char *route, size_t bytes)
{
    struct piece *one = &piece[pieces];
    size_t pitch;
    CUresult status;
    if (pieces == PIECES)
        return CUDA_ERROR_INVALID_VALUE;
    *one = (struct piece){.route = route[0], .bytes = bytes};
    CUDA_ARRAY_DESCRIPTOR flat = {bytes / 4 < 4096 ? bytes / 4 : 4096, bytes / 16384 ? bytes / 16384 : 1, FORMAT_FLOAT, 1};
    CUDA_ARRAY3D_DESCRIPTOR levels = {flat.Width, flat.Height, 0, FORMAT_FLOAT, 1, 0};
    if (strcmp(route, "alloc") == 0)
        status = CALL(cuMemAlloc_v2, &one->pointer, bytes);
    else if (strcmp(route, "pitch") == 0) {
        one->route = 'a';
        size_t height = bytes / 4096 ? bytes / 4096 : 1;
        status = CALL(cuMemAllocPitch_v2, &one->pointer, &pitch, bytes / height, height, 4);
    } else if (strcmp(route, "managed") == 0) {
        one->route = 'a';
        status = CALL(cuMemAllocManaged, &one->pointer, bytes, MANAGED_GLOBAL);
    } else if (strcmp(route, "async") == 0) {
        one->route = 's';
        status = CALL(cuMemAllocAsync, &one->pointer, bytes, NULL);
    } else if (strcmp(route, "pool") == 0) {
        const CUmemPoolProps here = {.allocType = PINNED, .location = {ON_DEVICE, 0}};
        one->route = 's';
        status = pool ? CUDA_SUCCESS : CALL(cuMemPoolCreate, &pool, &here);
        if (status == CUDA_SUCCESS)
            status = CALL(cuMemAllocFromPoolAsync, &one->pointer, bytes, pool, NULL);
    } else if (strcmp(route, "vmm") == 0)
        status = map(one);
    else if (strcmp(route, "array") == 0) {
        one->route = 'r';
        status = CALL(cuArrayCreate_v2, (CUarray *)&one->pointer, &flat);
    } else if (strcmp(route, "mipmap") == 0)
        status = CALL(cuMipmappedArrayCreate, (CUmipmappedArray *)&one->pointer, &levels, 4);
    else
        return -1;
    if (status == CUDA_SUCCESS)
        pieces++;
    return status;
}

static CUresult drop(struct piece *one)
{
    CUresult status = CUDA_ERROR_INVALID_VALUE;
    switch (one->route) {
    case 'a': status = CALL(cuMemFree_v2, one->pointer); break;
    case 's': status = CALL(cuMemFreeAsync, one->pointer, NULL); break;
    case 'r': status = CALL(cuArrayDestroy, (CUarray)(uintptr_t)one->pointer); break;
    case 'm': status = CALL(cuMipmappedArrayDestroy, (CUmipmappedArray)(uintptr_t)one->pointer); break;
    case 'v':
        status = CALL(cuMemUnmap, one->pointer, one->bytes);
        if (status == CUDA_SUCCESS)
            status = CALL(cuMemRelease, one->handle);
        if (status == CUDA_SUCCESS)
            status = CALL(cuMemAddressFree, one->pointer, one->bytes);
        break;
    default: break;
    }
    if (status == CUDA_SUCCESS)
        one->route = 0;
    return status;
}

static CUresult drop_all(void)
{
    CUresult first = CUDA_SUCCESS;
    for (int i = 0; i < pieces; i++) {
        CUresult status = piece[i].route ? drop(&piece[i]) : CUDA_SUCCESS;
        first = first ? first : status;
    }
    pieces = 0;
    CUresult status = CALL(cuCtxSynchronize);
    if (pool && status == CUDA_SUCCESS) {
        status = CALL(cuMemPoolDestroy, pool);
        pool = NULL;
    }
    return first ? first : status;
}

static CUresult take(const char *route, size_t bytes, size_t unit, unsigned long long *granted, int *count)
{
    CUresult status = CUDA_SUCCESS;
    *granted = 0;
    *count = 0;
    for (size_t next = bytes / unit * unit; next >= unit; next = next / 2 / unit * unit)
        for (int times = 0; times < 256; times++) {
            status = get(route, next);
            if (status != CUDA_SUCCESS)
                break;
            *granted += next;
            ++*count;
        }
    return status;
}

static CUresult load(CUmodule *into)
{
    CUfunction function;
    int header;
    CUresult status = gpu_module(into, 10, &header);
    if (status == CUDA_SUCCESS)
        status = CALL(cuModuleGetFunction, &function, *into, "vgpu_empty");
    if (status == CUDA_SUCCESS)
        status = CALL(cuLaunchKernel, function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
    return status == CUDA_SUCCESS ? CALL(cuCtxSynchronize) : status;
}

/* Loads a module. The simulated driver charges the bytes in the comment, a real driver the size of the global. */
static CUresult module_of(size_t bytes)
{
    char text[512];
    CUresult status = CUDA_ERROR_NOT_FOUND;
    for (int i = 0; i < 4 && status != CUDA_SUCCESS && status != CUDA_ERROR_OUT_OF_MEMORY; i++) {
        snprintf(text, sizeof text,
                 "%s// .gpusim bytes %zu\n.address_size 64\n.visible .global .align 8 .b8 held[%zu];\n"
                 ".visible .entry none()\n{\n    ret;\n}\n", ptx_headers[i], bytes, bytes);
        status = CALL(cuModuleLoadData, &module[modules], text);
    }
    if (status == CUDA_SUCCESS)
        modules++;
    return status;
}

/* Checks the first and the last MiB of an allocation. */
static CUresult look(const struct piece *one, int kernel, unsigned seed, unsigned long long *wrong)
{
    size_t words = one->bytes / 4, part = words < (1 << 18) ? words : 1 << 18;
    uint32_t *seen = malloc(part * 4 + 4);
    CUresult status = CUDA_SUCCESS;
    *wrong = 0;
    for (int end = 0; end < 2 && seen && status == CUDA_SUCCESS; end++) {
        size_t from = end ? words - part : 0;
        status = CALL(cuMemcpyDtoH_v2, seen, one->pointer + from * 4, part * 4);
        for (size_t i = 0; i < part && status == CUDA_SUCCESS; i++)
            *wrong += seen[i] != (kernel ? (uint32_t)(from + i) * 2654435761u + seed : seed * 0x01010101u);
    }
    free(seen);
    return status;
}

static CUresult data(const struct piece *one, unsigned seed, unsigned long long *wrong)
{
    CUfunction touch;
    unsigned long long words = one->bytes / 4;
    CUdeviceptr pointer = one->pointer;
    void *parameters[] = {&pointer, &words, &seed};
    CUresult status = modules ? CUDA_SUCCESS : load(&module[modules++]);
    if (status == CUDA_SUCCESS)
        status = CALL(cuModuleGetFunction, &touch, module[0], "vgpu_touch");
    if (status == CUDA_SUCCESS)
        status = CALL(cuLaunchKernel, touch, 1024, 1, 1, 256, 1, 1, 0, NULL, parameters, NULL);
    if (status == CUDA_SUCCESS)
        status = CALL(cuCtxSynchronize);
    return status == CUDA_SUCCESS ? look(one, 1, seed, wrong) : status;
}

static CUresult answer(const char *verb, char *words)
{
    char route[16] = "";
    unsigned long long a = 0, b = 0, granted = 0;
    size_t free_bytes = 0, total = 0;
    int count = 0;
    CUcontext context = NULL;
    CUresult status = CUDA_ERROR_INVALID_VALUE;
    if (strcmp(verb, "get") == 0 || strcmp(verb, "take") == 0)
        sscanf(words, "%15s %llu %llu", route, &a, &b);
    else
        sscanf(words, "%llu %llu", &a, &b);
    const int known = a < (unsigned long long)pieces;
    if (strcmp(verb, "init") == 0)
        return CALL(cuInit, 0);
    if (strcmp(verb, "pid") == 0) {
        printf("0 %d\n", (int)getpid());
        return -1;
    }
    if (strcmp(verb, "info") == 0) {
        status = CALL(cuMemGetInfo_v2, &free_bytes, &total);
        printf("%d %zu %zu\n", status, free_bytes, total);
        return -1;
    }
    if (strcmp(verb, "total") == 0) {
        status = CALL(cuDeviceTotalMem_v2, &total, 0);
        printf("%d %zu\n", status, total);
        return -1;
    }
    if (strcmp(verb, "unit") == 0) {
        status = CALL(cuMemGetAllocationGranularity, &total, &on_device, 0);
        printf("%d %zu\n", status, total);
        return -1;
    }
    if (strcmp(verb, "sync") == 0)
        return CALL(cuCtxSynchronize);
    if (strcmp(verb, "ctx") == 0 || strcmp(verb, "retain") == 0) {
        status = verb[0] == 'c' ? CALL(cuCtxCreate_v2, &context, 0, 0) : CALL(cuDevicePrimaryCtxRetain, &context, 0);
        if (status == CUDA_SUCCESS)
            status = CALL(cuCtxSetCurrent, context);
        printf("%d %llu\n", status, (unsigned long long)(uintptr_t)context);
        return -1;
    }
    if (strcmp(verb, "ctx-destroy") == 0)
        return CALL(cuCtxDestroy_v2, (CUcontext)(uintptr_t)a);
    if (strcmp(verb, "release") == 0)
        return CALL(cuDevicePrimaryCtxRelease_v2, 0);
    if (strcmp(verb, "module") == 0)
        return modules < 64 ? module_of(a) : CUDA_ERROR_INVALID_VALUE;
    if (strcmp(verb, "load") == 0)
        return modules < 64 ? load(&module[modules++]) : CUDA_ERROR_INVALID_VALUE;
    if (strcmp(verb, "unload") == 0)
        return modules ? CALL(cuModuleUnload, module[--modules]) : CUDA_ERROR_INVALID_VALUE;
    if (strcmp(verb, "limit") == 0)
        return CALL(cuCtxSetLimit, (int)a, b);
    if (strcmp(verb, "get") == 0) {
        status = get(route, a);
        printf("%d %d %llu\n", status, pieces - 1, a);
        return -1;
    }
    if (strcmp(verb, "take") == 0) {
        status = take(route, a, b ? b : 1, &granted, &count);
        printf("%d %llu %d\n", status, granted, count);
        return -1;
    }
    if (strcmp(verb, "lend") == 0 && known) {
        CUipcMemHandle handle = {{0}};
        status = CALL(cuIpcGetMemHandle, &handle, piece[a].pointer);
        printf("%d", status);
        for (int i = 0; i < 8; i++)
            printf(" %llu", handle.words[i]);
        printf("\n");
        return -1;
    }
    if (strcmp(verb, "borrow") == 0) {
        CUipcMemHandle handle = {{0}};
        CUdeviceptr pointer;
        for (int i = 0; i < 8; i++)
            handle.words[i] = strtoull(words, &words, 10);
        return CALL(cuIpcOpenMemHandle_v2, &pointer, handle, IPC_LAZY_PEER_ACCESS);
    }
    if (strcmp(verb, "drop") == 0)
        return known ? drop(&piece[a]) : status;
    if (strcmp(verb, "drop-all") == 0)
        return drop_all();
    if (strcmp(verb, "data") == 0 || strcmp(verb, "bytes") == 0) {
        if (known && verb[0] == 'd')
            status = data(&piece[a], (unsigned)b, &granted);
        else if (known && (status = CALL(cuMemsetD8_v2, piece[a].pointer, (unsigned char)b, piece[a].bytes)) == CUDA_SUCCESS)
            status = look(&piece[a], 0, (unsigned)b & 0xff, &granted);
        printf("%d %llu\n", status, granted);
        return -1;
    }
    printf("-2 unknown word %s\n", verb);
    return -1;
}

int main(void)
{
    char line[256], verb[32];
    gpu_open();
    while (fgets(line, sizeof line, stdin)) {
        int offset = 0;
        if (sscanf(line, "%31s %n", verb, &offset) < 1)
            continue;
        CUresult status = answer(verb, line + offset);
        if (status >= 0)
            printf("%d\n", status);
        fflush(stdout);
    }
    return 0;
}
