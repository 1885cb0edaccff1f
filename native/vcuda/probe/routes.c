/* SPDX-License-Identifier: Apache-2.0 */
/* Checks of the routes, which are the ways to look up a driver function (dlsym, cuGetProcAddress, …). By each route the
 * driver must show the slice's limit as the size of the GPU and refuse more memory. If it does not, the route is
 * open. */
#include "loader.h"
#include "probe.h"

#include <stdio.h>
#include <string.h>

typedef void *(*lookup)(void *handle, const char *name);
typedef CUresult (*proc_v1)(const char *symbol, void **function, int version, cuuint64_t flags);
typedef CUresult (*proc_v2)(const char *symbol, void **function, int version, cuuint64_t flags, int *status);
typedef CUresult (*total_mem)(size_t *bytes, CUdevice device);
typedef CUresult (*mem_alloc)(CUdeviceptr *pointer, size_t bytes);
typedef CUresult (*mem_alloc_async)(CUdeviceptr *pointer, size_t bytes, CUstream stream);

struct score {
    struct result *result;
    uint64_t limit, routes, held;
    char first[160]; /* Description of the first route that does not enforce the limit. */
};

/* Judges one route. If its functions are NULL, this driver does not have the route, so the route cannot be open. */
static void judge(struct score *score, const char *route, total_mem total, mem_alloc alloc, mem_alloc_async async)
{
    size_t shown = score->limit;
    CUdeviceptr pointer;
    CUresult past = CUDA_ERROR_OUT_OF_MEMORY;
    if (total)
        total(&shown, 0);
    if (alloc)
        past = alloc(&pointer, score->limit + 1);
    else if (async)
        past = async(&pointer, score->limit + 1, NULL);
    score->routes++;
    if (shown == score->limit && past != CUDA_SUCCESS)
        score->held++;
    else if (!score->first[0])
        snprintf(score->first, sizeof score->first, "by %s: the total is %zu, a request of %llu bytes returns %d", route, shown,
                 (unsigned long long)score->limit + 1, past);
}

static const struct cuda *begin(const struct slice *slice, struct board *board, struct score *score, CUcontext *context)
{
    char reason[200], uuid[VGPU_UUID_SIZE];
    CUuuid bytes;
    int count = 0;
    size_t total = 0;
    memset(score, 0, sizeof *score);
    const struct cuda *cuda = cuda_open(reason, sizeof reason);
    if (!cuda || cuda->device_count(&count) != CUDA_SUCCESS || count == 0) {
        result_set(&board->result, NOT_RUN, 0, 0, "routes", "%s", cuda ? "the driver shows no GPU" : reason);
        return NULL;
    }
    cuda->total_mem(&total, 0);
    const struct vgpu_limits_device *limit = NULL;
    if (slice->found && cuda->device_uuid(&bytes, 0) == CUDA_SUCCESS) {
        uuid_spell(&bytes, uuid);
        limit = slice_device(slice, uuid);
    }
    if (!limit) {
        result_set(&board->result, VIOLATED, 0, total, "bytes", "the slice has no limit: %s",
                   slice->found ? "the limits file does not name the device" : slice->reason);
        return NULL;
    }
    if (cuda->ctx_create(context, 0, 0) != CUDA_SUCCESS) {
        result_set(&board->result, VIOLATED, 0, 0, "routes", "no context can be created on %s", uuid);
        return NULL;
    }
    score->limit = limit->memory_bytes;
    return cuda;
}

static void finish(struct board *board, const struct score *score)
{
    result_set(&board->result, score->held == score->routes ? PASSED : VIOLATED, score->routes, score->held, "routes", "%s",
               score->first[0] ? score->first : "each route shows the limit and refuses one byte more");
}

static void by_lookup(struct score *score, const char *route, void *handle, lookup look)
{
    if (look)
        judge(score, route, (total_mem)look(handle, "cuDeviceTotalMem_v2"), (mem_alloc)look(handle, "cuMemAlloc_v2"), NULL);
}

/* Tests the loader's functions found by dlvsym, and by a dlvsym that was itself looked up. */
static void by_version(struct score *score, const char *name, void *library)
{
    typedef void *(*versioned)(void *handle, const char *name, const char *version);
    char route[64];
    if (!library)
        return;
    snprintf(route, sizeof route, "dlsym of %s, found by dlvsym", name);
    by_lookup(score, route, cuda_handle(), (lookup)dlvsym(library, "dlsym", OLDEST));
    versioned second = (versioned)dlsym(library, "dlvsym");
    snprintf(route, sizeof route, "dlsym, found by dlvsym of %s", name);
    by_lookup(score, route, cuda_handle(), second ? (lookup)second(library, "dlsym", OLDEST) : NULL);
}

void check_dlsym(const struct slice *slice, struct board *board)
{
    struct score score;
    CUcontext context;
    const struct cuda *cuda = begin(slice, board, &score, &context);
    if (!cuda)
        return;
    void *libc = dlopen("libc.so.6", RTLD_LAZY), *libdl = dlopen("libdl.so.2", RTLD_LAZY);
    by_lookup(&score, "the library's handle", cuda_handle(), dlsym);
    by_lookup(&score, "RTLD_DEFAULT", RTLD_DEFAULT, dlsym);
    by_lookup(&score, "RTLD_NEXT", RTLD_NEXT, dlsym);
    by_lookup(&score, "the program's handle", dlopen(NULL, RTLD_LAZY), dlsym);
    if (libc)
        by_lookup(&score, "libc's dlsym", cuda_handle(), (lookup)dlsym(libc, "dlsym"));
    if (libdl)
        by_lookup(&score, "libdl's dlsym", cuda_handle(), (lookup)dlsym(libdl, "dlsym"));
    by_version(&score, "libc", libc);
    by_version(&score, "libdl", libdl);
    cuda->ctx_destroy(context);
    finish(board, &score);
}

void check_getprocaddress(const struct slice *slice, struct board *board)
{
    static const int versions[] = {3020, 9000, 11020, 11030, 12000, 12020, 13000};
    struct score score;
    CUcontext context;
    char route[96];
    const struct cuda *cuda = begin(slice, board, &score, &context);
    if (!cuda)
        return;
    proc_v1 old = (proc_v1)dlsym(cuda_handle(), "cuGetProcAddress");
    proc_v2 new = (proc_v2)dlsym(cuda_handle(), "cuGetProcAddress_v2");
    void *of_itself = NULL;
    if (new)
        new ("cuGetProcAddress", &of_itself, 12000, 0, NULL);
    for (size_t i = 0; i < sizeof versions / sizeof *versions; i++)
        for (cuuint64_t flags = 0; flags <= 2; flags++)
            for (int form = 0; form < 3; form++) {
                proc_v2 get = form == 1 ? new : form == 2 ? (proc_v2)of_itself : NULL;
                static const char *const names[] = {"cuDeviceTotalMem", "cuMemAlloc", "cuMemAllocAsync"};
                void *found[3] = {NULL, NULL, NULL};
                if (form == 0 ? !old : !get)
                    continue;
                for (int n = 0; n < 3; n++)
                    if ((form == 0 ? old(names[n], &found[n], versions[i], flags)
                                   : get(names[n], &found[n], versions[i], flags, NULL)) != CUDA_SUCCESS)
                        found[n] = NULL;
                snprintf(route, sizeof route, "%s for version %d, flags %d",
                         form == 0 ? "cuGetProcAddress" : form == 1 ? "cuGetProcAddress_v2" : "a looked-up cuGetProcAddress",
                         versions[i], (int)flags);
                if (found[0] || found[1])
                    judge(&score, route, (total_mem)found[0], (mem_alloc)found[1], NULL);
                if (found[2])
                    judge(&score, route, NULL, NULL, (mem_alloc_async)found[2]);
            }
    cuda->ctx_destroy(context);
    if (!score.routes)
        result_set(&board->result, NOT_RUN, 0, 0, "routes", "this driver has no cuGetProcAddress");
    else
        finish(board, &score);
}
