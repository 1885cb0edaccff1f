/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Implements green contexts (CUDA 12.4). A green context is a part of a device's SMs. It owns only its SMs and its
 * streams; all else belongs to the device's primary context. CUDA 12.4's functions for events and waits of green
 * contexts return NOT_SUPPORTED.
 */
#include "driver.h"

#include <stdlib.h>
#include <string.h>

#define GREEN_MAGIC 0x47524e31u
#define DESC_MAGIC 0x44534331u
#define RESOURCE_SM 1
#define FLAG_DEFAULT_STREAM 1u

typedef struct {
    int type;
    unsigned char internal[92];
    union {
        unsigned sms;
        unsigned char room[48];
    } as;
} CUdevResource;
_Static_assert(sizeof(CUdevResource) == 144, "CUdevResource_v1");

/* Content of the field `internal` of a CUdevResource. */
struct part {
    int device;
    unsigned sms;
};

struct desc {
    uint32_t magic;
    struct part part;
};

typedef struct CUgreenCtx_st {
    uint32_t magic;
    CUcontext context;
} *CUgreenCtx;

/* Returns the smallest number of SMs that a device can split off: two from Pascal to Ampere, eight from Hopper on. */
static unsigned group(int device)
{
    return sim_state()->gpus[driver.devices[device].gpu].cc_major >= 9 ? 8 : 2;
}

static CUresult describe(CUdevResource *resource, int type, int device, unsigned sms)
{
    REQUIRE(resource, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(type == RESOURCE_SM, CUDA_ERROR_INVALID_VALUE);
    memset(resource, 0, sizeof *resource);
    resource->type = type;
    resource->as.sms = sms;
    memcpy(resource->internal, &(struct part){device, sms}, sizeof(struct part));
    return CUDA_SUCCESS;
}

static unsigned all_sms(int device)
{
    return sim_state()->gpus[driver.devices[device].gpu].sm_count;
}

EXPORT CUresult cuDeviceGetDevResource(CUdevice device, CUdevResource *resource, int type)
{
    ENTER();
    REQUIRE(device_valid(device), CUDA_ERROR_INVALID_DEVICE);
    return describe(resource, type, device, all_sms(device));
}

EXPORT CUresult cuCtxGetDevResource(CUcontext context, CUdevResource *resource, int type)
{
    ENTER();
    REQUIRE(context && context->magic == CONTEXT_MAGIC && atomic_load(&context->alive), CUDA_ERROR_INVALID_CONTEXT);
    return describe(resource, type, context->device, context->home ? context->sms : all_sms(context->device));
}

EXPORT CUresult cuDevSmResourceSplitByCount(CUdevResource *result, unsigned *groups, const CUdevResource *input,
                                            CUdevResource *remaining, unsigned flags, unsigned least)
{
    ENTER();
    REQUIRE(groups && input && input->type == RESOURCE_SM, CUDA_ERROR_INVALID_VALUE);
    (void)flags;
    struct part part;
    memcpy(&part, input->internal, sizeof part);
    unsigned unit = group(part.device), each = least ? (least + unit - 1) / unit * unit : unit;
    REQUIRE(each <= part.sms, CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
    unsigned most = part.sms / each, wanted = result && *groups < most ? *groups : most;
    for (unsigned i = 0; result && i < wanted; i++)
        describe(&result[i], RESOURCE_SM, part.device, each);
    *groups = wanted;
    if (remaining) {
        describe(remaining, RESOURCE_SM, part.device, part.sms - wanted * each);
        remaining->type = part.sms == wanted * each ? 0 : RESOURCE_SM;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevResourceGenerateDesc(struct desc **out, CUdevResource *resources, unsigned count)
{
    ENTER();
    REQUIRE(out && resources && count, CUDA_ERROR_INVALID_VALUE);
    /* The descriptor is never freed, because CUDA has no call to free it. */
    struct desc *desc = calloc(1, sizeof *desc);
    REQUIRE(desc, CUDA_ERROR_OUT_OF_MEMORY);
    desc->magic = DESC_MAGIC;
    for (unsigned i = 0; i < count; i++) {
        struct part part;
        memcpy(&part, resources[i].internal, sizeof part);
        bool good = resources[i].type == RESOURCE_SM && device_valid(part.device) && (i == 0 || part.device == desc->part.device);
        if (!good) {
            free(desc);
            return CUDA_ERROR_INVALID_VALUE;
        }
        desc->part.device = part.device;
        desc->part.sms += part.sms;
    }
    *out = desc;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device);

static CUresult make(CUgreenCtx green, CUdevice device, unsigned sms)
{
    CUcontext home;
    CUresult result = cuDevicePrimaryCtxRetain(&home, device);
    if (result != CUDA_SUCCESS)
        return result;
    result = status_to_result(sim_charge(home->gpu, SIM_CONTEXT, GREEN_BYTES));
    if (result == CUDA_SUCCESS && !(green->context = context_green(home, sms))) {
        sim_uncharge(home->gpu, SIM_CONTEXT, GREEN_BYTES);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (result != CUDA_SUCCESS)
        cuDevicePrimaryCtxRelease_v2(device);
    return result;
}

EXPORT CUresult cuGreenCtxCreate(CUgreenCtx *out, struct desc *desc, CUdevice device, unsigned flags)
{
    ENTER();
    REQUIRE(device_valid(device), CUDA_ERROR_INVALID_DEVICE);
    REQUIRE(out && desc && desc->magic == DESC_MAGIC && desc->part.device == device && flags == FLAG_DEFAULT_STREAM,
            CUDA_ERROR_INVALID_VALUE);
    CUgreenCtx green = calloc(1, sizeof *green);
    REQUIRE(green, CUDA_ERROR_OUT_OF_MEMORY);
    green->magic = GREEN_MAGIC;
    CUresult result = make(green, device, desc->part.sms);
    if (result != CUDA_SUCCESS) {
        free(green);
        return result;
    }
    green->context->handle = green;
    *out = green;
    return CUDA_SUCCESS;
}

static bool valid(CUgreenCtx green)
{
    return green && green->magic == GREEN_MAGIC;
}

/* The record stays, so that a stale handle can be refused. */
EXPORT CUresult cuGreenCtxDestroy(CUgreenCtx green)
{
    ENTER();
    REQUIRE(valid(green), CUDA_ERROR_INVALID_CONTEXT);
    REQUIRE(context_green_end(green->context), CUDA_ERROR_CONTEXT_IS_DESTROYED);
    return cuDevicePrimaryCtxRelease_v2(green->context->device);
}

EXPORT CUresult cuCtxFromGreenCtx(CUcontext *context, CUgreenCtx green)
{
    ENTER();
    REQUIRE(context, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(valid(green) && atomic_load(&green->context->alive), CUDA_ERROR_INVALID_CONTEXT);
    *context = green->context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamGetGreenCtx(CUstream stream, CUgreenCtx *green)
{
    ENTER_CONTEXT(context);
    REQUIRE(green, CUDA_ERROR_INVALID_VALUE);
    CUresult result = stream_resolve(context, stream, &stream);
    if (result == CUDA_SUCCESS)
        *green = stream->green ? stream->green->handle : NULL;
    return result;
}

EXPORT CUresult cuGreenCtxGetDevResource(CUgreenCtx green, CUdevResource *resource, int type)
{
    ENTER();
    REQUIRE(valid(green), CUDA_ERROR_INVALID_CONTEXT);
    return cuCtxGetDevResource(green->context, resource, type);
}
