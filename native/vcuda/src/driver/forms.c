/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Classifies names of functions of a driver that is newer than this library. Such a driver has unknown versions of
 * hooked functions (functions that this library replaces), for example cuMemAlloc_v3 next to cuMemAlloc_v2. Their
 * parameters are unknown, so the hook of an older version cannot replace them, and refusing them would only make
 * programs fail. Programs get the driver's own function. The memory that it uses is found by a comparison with NVML's
 * figures (routes/newer.c).
 */
#include "real.h"

#include <ctype.h>
#include <string.h>

_Atomic bool vgpu_forms_linked;

static const struct {
    const char *symbol, *name;
} hooked[] = {
#define HOOK(symbol, name, since, stream, result, parameters) {#symbol, name},
#define NVML(symbol, result, parameters)
#include "hooks.def"
#undef HOOK
#undef NVML
};
#define HOOKED (sizeof hooked / sizeof *hooked)

/* Returns true for the name of a function that allocates nothing. A new version of such a function needs no measures.
 * If it frees memory, the memory stays charged only until the next comparison with NVML's figures. */
static bool harmless(const char *name, size_t length)
{
    static const char *const names[] = {
        "cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize", "cuMemGetInfo", "cuDeviceTotalMem", "cuMemFree",
        "cuMemFreeAsync", "cuMemRelease", "cuMemUnmap", "cuMemPoolDestroy", "cuMemPoolTrimTo", "cuArrayDestroy",
        "cuMipmappedArrayDestroy", "cuModuleUnload", "cuCtxDestroy", "cuCtxDetach", "cuDevicePrimaryCtxRelease",
        "cuDevicePrimaryCtxReset", "cuGreenCtxDestroy", "cuCtxSetCurrent", "cuCtxPushCurrent", "cuCtxPopCurrent",
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strlen(names[i]) == length && memcmp(names[i], name, length) == 0)
            return true;
    return false;
}

/* Returns the length of a name without its version suffixes, which are _v and a number, then _ptds or _ptsz. */
static size_t base_length(const char *symbol)
{
    size_t length = strlen(symbol);
    if (length > 5 && (strcmp(symbol + length - 5, "_ptsz") == 0 || strcmp(symbol + length - 5, "_ptds") == 0))
        length -= 5;
    size_t digits = length;
    while (digits > 2 && isdigit((unsigned char)symbol[digits - 1]))
        digits--;
    return digits < length && symbol[digits - 1] == 'v' && symbol[digits - 2] == '_' ? digits - 2 : length;
}

static enum form form_of_base(const char *symbol, size_t length)
{
    static const char route[] = "cuGetProcAddress";
    for (size_t i = 0; i < HOOKED; i++)
        if (strlen(hooked[i].name) == length && memcmp(hooked[i].name, symbol, length) == 0)
            return length == sizeof route - 1 && memcmp(symbol, route, length) == 0 ? FORM_REFUSED
                   : harmless(symbol, length)                                        ? FORM_KNOWN
                                                                                     : FORM_NEWER;
    return FORM_KNOWN;
}

enum form form_of(const char *symbol)
{
    if (symbol[0] != 'c' || symbol[1] != 'u')
        return FORM_KNOWN;
    size_t length = base_length(symbol);
    if (!symbol[length])
        return FORM_KNOWN;
    for (size_t i = 0; i < HOOKED; i++)
        if (strcmp(hooked[i].symbol, symbol) == 0)
            return FORM_KNOWN;
    return form_of_base(symbol, length);
}

enum form form_of_name(const char *name)
{
    return form_of_base(name, base_length(name));
}

static bool newer(const char *symbol)
{
    return form_of(symbol) == FORM_NEWER;
}

static int links(const struct object *object, void *unused)
{
    (void)unused;
    return object_links(object, "libcuda.so.1", newer);
}

void forms_look(void)
{
    if (object_each(links, NULL))
        atomic_store_explicit(&vgpu_forms_linked, true, memory_order_relaxed);
}
