/* SPDX-License-Identifier: Apache-2.0 */
/* Types and numbers of cuda.h, written independently of libvgpu's own declarations, so that tests find an error in
 * those. */
#ifndef DRIVER_API_H
#define DRIVER_API_H

#include <stddef.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUarray_st *CUarray;
typedef struct CUmipmappedArray_st *CUmipmappedArray;
typedef struct CUmemPoolHandle_st *CUmemoryPool;
typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphExec_st *CUgraphExec;

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_FOUND = 500,
};
/* Constants of cuda.h, each with its name there. */

enum {
    ATTRIBUTE_SM_COUNT = 16,   /* CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT */
    ON_DEVICE = 1,             /* CU_MEM_LOCATION_TYPE_DEVICE */
    PINNED = 1,                /* CU_MEM_ALLOCATION_TYPE_PINNED */
    MANAGED_GLOBAL = 1,        /* CU_MEM_ATTACH_GLOBAL */
    ACCESS_READ_WRITE = 3,     /* CU_MEM_ACCESS_FLAGS_PROT_READWRITE */
    FORMAT_FLOAT = 0x20,       /* CU_AD_FORMAT_FLOAT */
    STREAM_NON_BLOCKING = 1,   /* CU_STREAM_NON_BLOCKING */
    EVENT_DISABLE_TIMING = 2,  /* CU_EVENT_DISABLE_TIMING */
    IPC_LAZY_PEER_ACCESS = 1,  /* CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS */
    CAPTURE_RELAXED = 2,       /* CU_STREAM_CAPTURE_MODE_RELAXED */
};

typedef struct {
    unsigned long long words[8];
} CUipcMemHandle;
typedef struct {
    int type;
    int id;
} CUmemLocation;
typedef struct {
    int type;
    int requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    unsigned char allocFlags[8];
} CUmemAllocationProp;
typedef struct {
    int allocType;
    int handleTypes;
    CUmemLocation location;
    void *win32SecurityAttributes;
    size_t maxSize;
    unsigned char reserved[56];
} CUmemPoolProps;
typedef struct {
    CUmemLocation location;
    int flags;
} CUmemAccessDesc;
typedef struct {
    size_t Width, Height;
    int Format;
    unsigned NumChannels;
} CUDA_ARRAY_DESCRIPTOR;
typedef struct {
    size_t Width, Height, Depth;
    int Format;
    unsigned NumChannels, Flags;
} CUDA_ARRAY3D_DESCRIPTOR;

#endif
