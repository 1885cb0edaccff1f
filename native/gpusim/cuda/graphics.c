/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Contexts that are made for use with OpenGL or VDPAU. They cost and do what others do; nothing is shared with graphics. An
 * OpenGL context is the program's own: it has one if it defines glXGetCurrentContext, alone or by a libGL that it is linked
 * with, and that says so.
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

/* What VDPAU's function would answer is not asked. */
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
