/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Creates contexts for use with OpenGL or VDPAU. They behave as other contexts; nothing is shared with graphics. The
 * driver asks the program for its OpenGL context by glXGetCurrentContext, if the program or a libGL linked to it
 * defines this function.
 */
#include "driver.h"

extern void *glXGetCurrentContext(void) __attribute__((weak));

static CUresult for_gl(CUcontext *context, unsigned flags, CUdevice device, unsigned version)
{
    ENTER();
    REQUIRE(context, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_valid(device), CUDA_ERROR_INVALID_DEVICE);
    REQUIRE(glXGetCurrentContext && glXGetCurrentContext(), CUDA_ERROR_INVALID_GRAPHICS_CONTEXT);
    return context_create(context, flags, device, version);
}

EXPORT CUresult cuGLCtxCreate(CUcontext *context, unsigned flags, CUdevice device)
{
    return for_gl(context, flags, device, 3010);
}

EXPORT CUresult cuGLCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device)
{
    return for_gl(context, flags, device, 3020);
}

/* Creates the context but does not call VDPAU's `get_proc_address`. */
static CUresult for_vdpau(CUcontext *context, unsigned flags, CUdevice device, const void *get_proc_address, unsigned version)
{
    ENTER();
    REQUIRE(context && get_proc_address, CUDA_ERROR_INVALID_VALUE);
    return context_create(context, flags, device, version);
}

EXPORT CUresult cuVDPAUCtxCreate(CUcontext *context, unsigned flags, CUdevice device, unsigned vdpau, void *get_proc_address)
{
    (void)vdpau;
    return for_vdpau(context, flags, device, get_proc_address, 3010);
}

EXPORT CUresult cuVDPAUCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device, unsigned vdpau, void *get_proc_address)
{
    (void)vdpau;
    return for_vdpau(context, flags, device, get_proc_address, 3020);
}
