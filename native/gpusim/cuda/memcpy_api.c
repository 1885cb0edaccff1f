/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Defines the entry points for copies. Each entry point converts its arguments to one 3D copy. As in the real driver,
 * synchronous calls wait if host memory is involved. The first versions take 32-bit pointers and sizes.
 */
#include "op.h"

struct place {
    int type;
    const void *host;
    CUdeviceptr device;
    CUarray array;
    size_t x;
};

#define HOST(p) ((struct place){.type = CU_MEMORYTYPE_HOST, .host = (p)})
#define DEVICE(p) ((struct place){.type = CU_MEMORYTYPE_DEVICE, .device = (p)})
#define UNIFIED(p) ((struct place){.type = CU_MEMORYTYPE_UNIFIED, .device = (p)})
#define ARRAY(a, offset) ((struct place){.type = CU_MEMORYTYPE_ARRAY, .array = (a), .x = (offset)})

static CUresult issue3d(const CUDA_MEMCPY3D *copy, CUstream stream, bool wait)
{
    struct op op = {.kind = OP_COPY, .as.copy = *copy};
    CUresult result = op_issue(stream, &op);
    if (result != CUDA_SUCCESS || !wait)
        return result;
    /* A copy from device to device returns at once. */
    if (copy->src_type != CU_MEMORYTYPE_HOST && copy->dst_type != CU_MEMORYTYPE_HOST &&
        copy->src_type != CU_MEMORYTYPE_UNIFIED && copy->dst_type != CU_MEMORYTYPE_UNIFIED)
        return CUDA_SUCCESS;
    CUstream resolved;
    result = stream_resolve(context_current(), stream, &resolved);
    return result == CUDA_SUCCESS ? stream_wait(resolved) : result;
}

static CUresult linear(struct place to, struct place from, size_t bytes, CUstream stream, bool wait)
{
    if (bytes == 0) {
        ENTER_CONTEXT(context);
        (void)context;
        return CUDA_SUCCESS;
    }
    CUDA_MEMCPY3D copy = {.src_type = from.type, .src_host = from.host, .src_device = from.device,
                          .src_array = from.array, .src_x = from.x, .dst_type = to.type,
                          .dst_host = (void *)(uintptr_t)to.host, .dst_device = to.device, .dst_array = to.array,
                          .dst_x = to.x, .width = bytes, .height = 1, .depth = 1};
    return issue3d(&copy, stream, wait);
}

#define SYNC CU_STREAM_LEGACY, true
#define SYNC_PER_THREAD CU_STREAM_PER_THREAD, true
#define ARGS(...) __VA_ARGS__

/* Defines the entry point name(parameters), which copies from `from` to `to` in the given stream. */
#define COPY(name, parameters, to, from, bytes, ...)     \
    EXPORT CUresult name(parameters)                     \
    {                                                    \
        return linear(to, from, bytes, __VA_ARGS__);     \
    }
#define SYNC_PAIR(name, thread_name, parameters, to, from)                   \
    COPY(name, ARGS(parameters), to, from, n, SYNC)                          \
    COPY(thread_name, ARGS(parameters), to, from, n, SYNC_PER_THREAD)
#define ASYNC_PAIR(name, parameters, to, from)                                               \
    COPY(name, ARGS(parameters, CUstream s), to, from, n, LEGACY_STREAM(s), false)           \
    COPY(name##_ptsz, ARGS(parameters, CUstream s), to, from, n, PER_THREAD_STREAM(s), false)

SYNC_PAIR(cuMemcpy, cuMemcpy_ptds, ARGS(CUdeviceptr d, CUdeviceptr p, size_t n), UNIFIED(d), UNIFIED(p))
SYNC_PAIR(cuMemcpyHtoD_v2, cuMemcpyHtoD_v2_ptds, ARGS(CUdeviceptr d, const void *p, size_t n), DEVICE(d), HOST(p))
SYNC_PAIR(cuMemcpyDtoH_v2, cuMemcpyDtoH_v2_ptds, ARGS(void *d, CUdeviceptr p, size_t n), HOST(d), DEVICE(p))
SYNC_PAIR(cuMemcpyDtoD_v2, cuMemcpyDtoD_v2_ptds, ARGS(CUdeviceptr d, CUdeviceptr p, size_t n), DEVICE(d), DEVICE(p))
SYNC_PAIR(cuMemcpyDtoA_v2, cuMemcpyDtoA_v2_ptds, ARGS(CUarray d, size_t o, CUdeviceptr p, size_t n), ARRAY(d, o), DEVICE(p))
SYNC_PAIR(cuMemcpyAtoD_v2, cuMemcpyAtoD_v2_ptds, ARGS(CUdeviceptr d, CUarray p, size_t o, size_t n), DEVICE(d), ARRAY(p, o))
SYNC_PAIR(cuMemcpyHtoA_v2, cuMemcpyHtoA_v2_ptds, ARGS(CUarray d, size_t o, const void *p, size_t n), ARRAY(d, o), HOST(p))
SYNC_PAIR(cuMemcpyAtoH_v2, cuMemcpyAtoH_v2_ptds, ARGS(void *d, CUarray p, size_t o, size_t n), HOST(d), ARRAY(p, o))
SYNC_PAIR(cuMemcpyAtoA_v2, cuMemcpyAtoA_v2_ptds, ARGS(CUarray d, size_t o, CUarray p, size_t q, size_t n), ARRAY(d, o), ARRAY(p, q))

ASYNC_PAIR(cuMemcpyAsync, ARGS(CUdeviceptr d, CUdeviceptr p, size_t n), UNIFIED(d), UNIFIED(p))
ASYNC_PAIR(cuMemcpyHtoDAsync_v2, ARGS(CUdeviceptr d, const void *p, size_t n), DEVICE(d), HOST(p))
ASYNC_PAIR(cuMemcpyDtoHAsync_v2, ARGS(void *d, CUdeviceptr p, size_t n), HOST(d), DEVICE(p))
ASYNC_PAIR(cuMemcpyDtoDAsync_v2, ARGS(CUdeviceptr d, CUdeviceptr p, size_t n), DEVICE(d), DEVICE(p))
ASYNC_PAIR(cuMemcpyHtoAAsync_v2, ARGS(CUarray d, size_t o, const void *p, size_t n), ARRAY(d, o), HOST(p))
ASYNC_PAIR(cuMemcpyAtoHAsync_v2, ARGS(void *d, CUarray p, size_t o, size_t n), HOST(d), ARRAY(p, o))

COPY(cuMemcpyHtoD, ARGS(unsigned d, const void *p, unsigned n), DEVICE(d), HOST(p), n, SYNC)
COPY(cuMemcpyDtoH, ARGS(void *d, unsigned p, unsigned n), HOST(d), DEVICE(p), n, SYNC)
COPY(cuMemcpyDtoD, ARGS(unsigned d, unsigned p, unsigned n), DEVICE(d), DEVICE(p), n, SYNC)
COPY(cuMemcpyDtoA, ARGS(CUarray d, unsigned o, unsigned p, unsigned n), ARRAY(d, o), DEVICE(p), n, SYNC)
COPY(cuMemcpyAtoD, ARGS(unsigned d, CUarray p, unsigned o, unsigned n), DEVICE(d), ARRAY(p, o), n, SYNC)
COPY(cuMemcpyHtoA, ARGS(CUarray d, unsigned o, const void *p, unsigned n), ARRAY(d, o), HOST(p), n, SYNC)
COPY(cuMemcpyAtoH, ARGS(void *d, CUarray p, unsigned o, unsigned n), HOST(d), ARRAY(p, o), n, SYNC)
COPY(cuMemcpyAtoA, ARGS(CUarray d, unsigned o, CUarray p, unsigned q, unsigned n), ARRAY(d, o), ARRAY(p, q), n, SYNC)
COPY(cuMemcpyHtoDAsync, ARGS(unsigned d, const void *p, unsigned n, CUstream s), DEVICE(d), HOST(p), n, LEGACY_STREAM(s), false)
COPY(cuMemcpyDtoHAsync, ARGS(void *d, unsigned p, unsigned n, CUstream s), HOST(d), DEVICE(p), n, LEGACY_STREAM(s), false)
COPY(cuMemcpyDtoDAsync, ARGS(unsigned d, unsigned p, unsigned n, CUstream s), DEVICE(d), DEVICE(p), n, LEGACY_STREAM(s), false)
COPY(cuMemcpyHtoAAsync, ARGS(CUarray d, unsigned o, const void *p, unsigned n, CUstream s), ARRAY(d, o), HOST(p), n, LEGACY_STREAM(s), false)
COPY(cuMemcpyAtoHAsync, ARGS(void *d, CUarray p, unsigned o, unsigned n, CUstream s), HOST(d), ARRAY(p, o), n, LEGACY_STREAM(s), false)

/* Defines a copy between devices. The contexts are not needed, because addresses are unique across devices. */
#define PEER(name, parameters, ...)                                                        \
    EXPORT CUresult name(CUdeviceptr d, CUcontext dc, CUdeviceptr p, CUcontext pc, parameters) \
    {                                                                                      \
        ENTER();                                                                           \
        REQUIRE(context_check(dc) == CUDA_SUCCESS && context_check(pc) == CUDA_SUCCESS, CUDA_ERROR_INVALID_CONTEXT); \
        return linear(DEVICE(d), DEVICE(p), n, __VA_ARGS__);                               \
    }
PEER(cuMemcpyPeer, size_t n, CU_STREAM_LEGACY, false)
PEER(cuMemcpyPeer_ptds, size_t n, CU_STREAM_PER_THREAD, false)
PEER(cuMemcpyPeerAsync, ARGS(size_t n, CUstream s), LEGACY_STREAM(s), false)
PEER(cuMemcpyPeerAsync_ptsz, ARGS(size_t n, CUstream s), PER_THREAD_STREAM(s), false)

/* ---- 2D and 3D ---------------------------------------------------------------------------------------------------- */

static CUresult two(const CUDA_MEMCPY2D *c, CUstream stream, bool wait)
{
    REQUIRE(c, CUDA_ERROR_INVALID_VALUE);
    CUDA_MEMCPY3D copy = {.src_x = c->src_x, .src_y = c->src_y, .src_type = c->src_type, .src_host = c->src_host,
                          .src_device = c->src_device, .src_array = c->src_array, .src_pitch = c->src_pitch,
                          .dst_x = c->dst_x, .dst_y = c->dst_y, .dst_type = c->dst_type, .dst_host = c->dst_host,
                          .dst_device = c->dst_device, .dst_array = c->dst_array, .dst_pitch = c->dst_pitch,
                          .width = c->width, .height = c->height, .depth = 1};
    return issue3d(&copy, stream, wait);
}

static CUresult three(const CUDA_MEMCPY3D *copy, CUstream stream, bool wait)
{
    REQUIRE(copy, CUDA_ERROR_INVALID_VALUE);
    return issue3d(copy, stream, wait);
}

#define SHAPED(name, type, body, ...)              \
    EXPORT CUresult name(const type *copy)         \
    {                                              \
        return body(copy, __VA_ARGS__);            \
    }
#define SHAPED_ASYNC(name, type, body, stream)                 \
    EXPORT CUresult name(const type *copy, CUstream s)         \
    {                                                          \
        return body(copy, stream, false);                      \
    }
SHAPED(cuMemcpy2D_v2, CUDA_MEMCPY2D, two, SYNC)
SHAPED(cuMemcpy2D_v2_ptds, CUDA_MEMCPY2D, two, SYNC_PER_THREAD)
SHAPED(cuMemcpy2DUnaligned_v2, CUDA_MEMCPY2D, two, SYNC)
SHAPED(cuMemcpy2DUnaligned_v2_ptds, CUDA_MEMCPY2D, two, SYNC_PER_THREAD)
SHAPED_ASYNC(cuMemcpy2DAsync_v2, CUDA_MEMCPY2D, two, LEGACY_STREAM(s))
SHAPED_ASYNC(cuMemcpy2DAsync_v2_ptsz, CUDA_MEMCPY2D, two, PER_THREAD_STREAM(s))
SHAPED(cuMemcpy3D_v2, CUDA_MEMCPY3D, three, SYNC)
SHAPED(cuMemcpy3D_v2_ptds, CUDA_MEMCPY3D, three, SYNC_PER_THREAD)
SHAPED_ASYNC(cuMemcpy3DAsync_v2, CUDA_MEMCPY3D, three, LEGACY_STREAM(s))
SHAPED_ASYNC(cuMemcpy3DAsync_v2_ptsz, CUDA_MEMCPY3D, three, PER_THREAD_STREAM(s))
SHAPED(cuMemcpy3DPeer, CUDA_MEMCPY3D, three, CU_STREAM_LEGACY, false)
SHAPED(cuMemcpy3DPeer_ptds, CUDA_MEMCPY3D, three, CU_STREAM_PER_THREAD, false)
SHAPED_ASYNC(cuMemcpy3DPeerAsync, CUDA_MEMCPY3D, three, LEGACY_STREAM(s))
SHAPED_ASYNC(cuMemcpy3DPeerAsync_ptsz, CUDA_MEMCPY3D, three, PER_THREAD_STREAM(s))
