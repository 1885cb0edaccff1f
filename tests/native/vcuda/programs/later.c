/* SPDX-License-Identifier: Apache-2.0 */
/* Replaces the simulated driver's cuGetProcAddress by that of a later CUDA. In this CUDA some functions have versions,
 * with the suffix _v9, that the tested library does not know. */
#include <stdio.h>
#include <string.h>

#include "driver/cuda_abi.h"

#define FORM(symbol) \
    CUresult symbol(void); \
    CUresult symbol(void) { return (CUresult)strlen(#symbol); }

FORM(cuInit)
FORM(cuCtxSynchronize)
FORM(cuCtxSynchronize_v2)
FORM(cuMemAlloc_v2)
FORM(cuMemAlloc_v9)
FORM(cuMemGetInfo_v2)
FORM(cuMemGetInfo_v9)
FORM(cuMemFree_v2)
FORM(cuMemFree_v9)
FORM(cuCtxCreate_v2)
FORM(cuCtxCreate_v9)
FORM(cuLaunchKernel_v9)
FORM(cuGetProcAddress_v9)

static CUresult get(const char *name, void **function, int version)
{
    static const struct {
        const char *name;
        int since;
        CUresult (*function)(void);
    } forms[] = {
        {"cuCtxSynchronize", 13000, cuCtxSynchronize_v2}, {"cuCtxSynchronize", 2000, cuCtxSynchronize},
        {"cuMemAlloc", 19000, cuMemAlloc_v9},             {"cuMemAlloc", 3020, cuMemAlloc_v2},
        {"cuMemGetInfo", 19000, cuMemGetInfo_v9},         {"cuMemGetInfo", 3020, cuMemGetInfo_v2},
        {"cuMemFree", 19000, cuMemFree_v9},               {"cuMemFree", 3020, cuMemFree_v2},
        {"cuCtxCreate", 19000, cuCtxCreate_v9},           {"cuCtxCreate", 3020, cuCtxCreate_v2},
        {"cuLaunchKernel", 19000, cuLaunchKernel_v9},
        {"cuGetProcAddress", 19000, cuGetProcAddress_v9},
    };
    *function = NULL;
    for (unsigned i = 0; i < sizeof forms / sizeof *forms && !*function; i++)
        if (strcmp(forms[i].name, name) == 0 && version >= forms[i].since)
            *function = (void *)forms[i].function;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuGetProcAddress(const char *name, void **function, int version, cuuint64_t flags);
CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags, int *result);

CUresult cuGetProcAddress(const char *name, void **function, int version, cuuint64_t flags)
{
    (void)flags;
    return get(name, function, version);
}

CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags, int *result)
{
    (void)flags;
    CUresult status = get(name, function, version);
    if (result)
        *result = status == CUDA_SUCCESS ? 0 : 1;
    /* The real driver also returns success here. The pointer and *result say whether the function was found. */
    return CUDA_SUCCESS;
}
