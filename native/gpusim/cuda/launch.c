/* SPDX-License-Identifier: Apache-2.0 */
/* Implements kernel launches in all forms of the driver API. Each launch becomes one operation of a stream. */
#include "module.h"
#include "op.h"

/* Returns a random duration for a launch. Each octave of the range (from a time to twice that time) is equally likely,
 * and durations are evenly distributed within an octave. */
static uint64_t draw(const struct kernel_cost *cost)
{
    static __thread uint64_t state;
    unsigned octaves = 1;
    if (!state)
        state = sim_now() ^ (uint64_t)(uintptr_t)&state;
    state = state * 6364136223846793005u + 1442695040888963407u;
    uint64_t random = state >> 33;
    while (cost->ns << octaves < cost->most && octaves < 32)
        octaves++;
    uint64_t low = cost->ns << random % octaves, ns = low + (random / octaves) * low / ((UINT64_C(1) << 31) / octaves);
    return ns < cost->most ? ns : cost->most;
}

CUresult launch_submit(CUstream stream, CUfunction function, const unsigned grid[3], const unsigned block[3])
{
    (void)block;
    uint64_t blocks = (uint64_t)grid[0] * grid[1] * grid[2];
    unsigned sms = sim_state()->gpus[stream->context->gpu].sm_count;
    unsigned need = function->cost.sms;
    if (need == 0 || need > sms)
        need = function->declared ? sms : blocks < sms ? (unsigned)blocks : sms;
    uint64_t ns = function->cost.most ? draw(&function->cost) : function->cost.ns;
    if (stream->green && need > stream->green->sms) { /* With fewer SMs the kernel takes proportionally longer. */
        ns = ns >= SIM_COST_FOREVER ? ns : ns * need / stream->green->sms;
        need = stream->green->sms;
    }
    struct sim_work work = {.kind = SIM_WORK_KERNEL, .remaining = ns, .sms = (uint16_t)need};
    return stream_submit(stream, &work, NULL);
}

static CUresult launch(const void *handle, const unsigned grid[3], const unsigned block[3], unsigned shared,
                       CUstream stream, bool cooperative)
{
    ENTER_CONTEXT(context);
    struct op op = {.kind = OP_KERNEL, .as.kernel = {.grid = {grid[0], grid[1], grid[2]},
                                                     .block = {block[0], block[1], block[2]}, .shared = shared}};
    CUresult result = function_of(handle, &op.as.kernel.function);
    if (result != CUDA_SUCCESS)
        return result;
    uint64_t threads = (uint64_t)block[0] * block[1] * block[2], blocks = (uint64_t)grid[0] * grid[1] * grid[2];
    REQUIRE(threads && blocks && block[0] <= 1024 && block[1] <= 1024 && block[2] <= 64 && grid[0] <= 0x7fffffffu &&
                grid[1] <= 65535 && grid[2] <= 65535,
            CUDA_ERROR_INVALID_VALUE);
    REQUIRE(threads <= 1024, CUDA_ERROR_INVALID_VALUE);
    REQUIRE((int64_t)shared <= op.as.kernel.function->attributes[8], CUDA_ERROR_INVALID_VALUE);
    const struct sim_gpu *gpu = &sim_state()->gpus[context->gpu];
    uint64_t resident = sim_model_find(gpu->model)->threads_per_sm / ((threads + 31) / 32 * 32) * gpu->sm_count;
    REQUIRE(!cooperative || blocks <= resident, CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
    return op_issue(stream, &op);
}

#define DIMS unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz
#define GRID ((const unsigned[]){gx, gy, gz})
#define BLOCK ((const unsigned[]){bx, by, bz})

#define LAUNCH(name, stream)                                                                                          \
    EXPORT CUresult name(CUfunction f, DIMS, unsigned shared, CUstream s, void **params, void **extra)                \
    {                                                                                                                 \
        if (params && extra)                                                                                          \
            return CUDA_ERROR_INVALID_VALUE;                                                                          \
        return launch(f, GRID, BLOCK, shared, stream, false);                                                         \
    }
LAUNCH(cuLaunchKernel, LEGACY_STREAM(s))
LAUNCH(cuLaunchKernel_ptsz, PER_THREAD_STREAM(s))

#define LAUNCH_COOPERATIVE(name, stream)                                                        \
    EXPORT CUresult name(CUfunction f, DIMS, unsigned shared, CUstream s, void **params)        \
    {                                                                                           \
        (void)params;                                                                           \
        return launch(f, GRID, BLOCK, shared, stream, true);                                    \
    }
LAUNCH_COOPERATIVE(cuLaunchCooperativeKernel, LEGACY_STREAM(s))
LAUNCH_COOPERATIVE(cuLaunchCooperativeKernel_ptsz, PER_THREAD_STREAM(s))

static CUresult launch_ex(const CUlaunchConfig *c, const void *function, CUstream stream)
{
    enum { ATTRIBUTE_COOPERATIVE = 2 };
    bool cooperative = false;
    for (unsigned i = 0; i < c->attribute_count; i++)
        if (c->attributes[i].id == ATTRIBUTE_COOPERATIVE)
            cooperative = *(const int *)c->attributes[i].value != 0;
    return launch(function, (const unsigned[]){c->grid_x, c->grid_y, c->grid_z},
                  (const unsigned[]){c->block_x, c->block_y, c->block_z}, c->shared, stream, cooperative);
}

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params, void **extra)
{
    REQUIRE(config && !(params && extra), CUDA_ERROR_INVALID_VALUE);
    return launch_ex(config, function, LEGACY_STREAM(config->stream));
}

EXPORT CUresult cuLaunchKernelEx_ptsz(const CUlaunchConfig *config, CUfunction function, void **params, void **extra)
{
    REQUIRE(config && !(params && extra), CUDA_ERROR_INVALID_VALUE);
    return launch_ex(config, function, PER_THREAD_STREAM(config->stream));
}

EXPORT CUresult cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *list, unsigned count, unsigned flags)
{
    REQUIRE(list && count && count <= (unsigned)driver.count && flags <= 3, CUDA_ERROR_INVALID_VALUE);
    for (unsigned i = 0; i < count; i++) {
        const CUDA_LAUNCH_PARAMS *p = &list[i];
        const unsigned grid[3] = {p->grid_x, p->grid_y, p->grid_z}, block[3] = {p->block_x, p->block_y, p->block_z};
        CUresult result = launch(p->function, grid, block, p->shared, p->stream, true);
        if (result != CUDA_SUCCESS)
            return result;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *data)
{
    struct op op = {.kind = OP_HOST, .as.host = {.function = function, .data = data}};
    return op_issue(LEGACY_STREAM(stream), &op);
}

EXPORT CUresult cuLaunchHostFunc_ptsz(CUstream stream, CUhostFn function, void *data)
{
    struct op op = {.kind = OP_HOST, .as.host = {.function = function, .data = data}};
    return op_issue(PER_THREAD_STREAM(stream), &op);
}

/* ---- the calls before CUDA 4: shape and parameters are kept in the function -------------------------------------------- */

EXPORT CUresult cuFuncSetBlockShape(CUfunction function, int x, int y, int z)
{
    ENTER();
    CUresult result = function_of(function, &function);
    if (result != CUDA_SUCCESS)
        return result;
    REQUIRE(x > 0 && y > 0 && z > 0, CUDA_ERROR_INVALID_VALUE);
    function->block[0] = (unsigned)x;
    function->block[1] = (unsigned)y;
    function->block[2] = (unsigned)z;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncSetSharedSize(CUfunction function, unsigned bytes)
{
    ENTER();
    CUresult result = function_of(function, &function);
    if (result == CUDA_SUCCESS)
        function->shared = bytes;
    return result;
}

static CUresult launch_old(CUfunction function, int width, int height, CUstream stream)
{
    ENTER();
    CUresult result = function_of(function, &function);
    if (result != CUDA_SUCCESS)
        return result;
    REQUIRE(width > 0 && height > 0, CUDA_ERROR_INVALID_VALUE);
    const unsigned grid[3] = {(unsigned)width, (unsigned)height, 1};
    return launch(function, grid, function->block, function->shared, stream, false);
}

EXPORT CUresult cuLaunch(CUfunction function)
{
    return launch_old(function, 1, 1, CU_STREAM_LEGACY);
}

EXPORT CUresult cuLaunchGrid(CUfunction function, int width, int height)
{
    return launch_old(function, width, height, CU_STREAM_LEGACY);
}

EXPORT CUresult cuLaunchGridAsync(CUfunction function, int width, int height, CUstream stream)
{
    return launch_old(function, width, height, LEGACY_STREAM(stream));
}
