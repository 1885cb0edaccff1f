/* SPDX-License-Identifier: Apache-2.0 */
/* Defines the entry points for memsets: element sizes 1, 2 and 4; linear or 2D; with or without a stream. None of them
 * waits for the memset. */
#include "op.h"

static CUresult fill(CUdeviceptr dst, size_t pitch, unsigned value, unsigned element, size_t width, size_t height,
                     CUstream stream)
{
    struct op op = {.kind = OP_SET, .as.set = {.dst = dst, .pitch = pitch, .value = value, .element_size = element,
                                               .width = width, .height = height}};
    return op_issue(stream, &op);
}

#define SET(name, pointer, type, element, stream, ...)                              \
    EXPORT CUresult name(pointer d, type v, size_t n __VA_ARGS__)                   \
    {                                                                               \
        return fill(d, 0, v, element, n, 1, stream);                                \
    }
#define SET2D(name, pointer, type, element, stream, ...)                            \
    EXPORT CUresult name(pointer d, size_t p, type v, size_t w, size_t h __VA_ARGS__) \
    {                                                                               \
        return fill(d, p, v, element, w, h, stream);                                \
    }
#define STREAM_ARG , CUstream s

#define FAMILY(bits, type)                                                                                        \
    SET(cuMemsetD##bits##_v2, CUdeviceptr, type, bits / 8, CU_STREAM_LEGACY, )                                     \
    SET(cuMemsetD##bits##_v2_ptds, CUdeviceptr, type, bits / 8, CU_STREAM_PER_THREAD, )                            \
    SET(cuMemsetD##bits##Async, CUdeviceptr, type, bits / 8, LEGACY_STREAM(s), STREAM_ARG)                         \
    SET(cuMemsetD##bits##Async_ptsz, CUdeviceptr, type, bits / 8, PER_THREAD_STREAM(s), STREAM_ARG)                \
    SET2D(cuMemsetD2D##bits##_v2, CUdeviceptr, type, bits / 8, CU_STREAM_LEGACY, )                                 \
    SET2D(cuMemsetD2D##bits##_v2_ptds, CUdeviceptr, type, bits / 8, CU_STREAM_PER_THREAD, )                        \
    SET2D(cuMemsetD2D##bits##Async, CUdeviceptr, type, bits / 8, LEGACY_STREAM(s), STREAM_ARG)                     \
    SET2D(cuMemsetD2D##bits##Async_ptsz, CUdeviceptr, type, bits / 8, PER_THREAD_STREAM(s), STREAM_ARG)

FAMILY(8, unsigned char)
FAMILY(16, unsigned short)
FAMILY(32, unsigned)

/* Defines the first versions, with 32-bit pointers and sizes. */
#define OLD(bits, type)                                                                                     \
    EXPORT CUresult cuMemsetD##bits(unsigned d, type v, unsigned n)                                         \
    {                                                                                                       \
        return fill(d, 0, v, bits / 8, n, 1, CU_STREAM_LEGACY);                                             \
    }                                                                                                       \
    EXPORT CUresult cuMemsetD2D##bits(unsigned d, unsigned p, type v, unsigned w, unsigned h)               \
    {                                                                                                       \
        return fill(d, p, v, bits / 8, w, h, CU_STREAM_LEGACY);                                             \
    }
OLD(8, unsigned char)
OLD(16, unsigned short)
OLD(32, unsigned)
