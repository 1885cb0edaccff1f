/* SPDX-License-Identifier: Apache-2.0 */
/* Bypasses of the memory limit by new programs that run with another environment, another owner or another libcuda. */
#include "bypass.h"
#include "loader.h"

#include <link.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define SELF "/proc/self/exe"

enum attempt without_preload(const struct fill *fill)
{
    const char *const added[] = {NULL};
    return ask_as_program(SELF, added, fill->device);
}

enum attempt with_other_preload(const struct fill *fill)
{
    const char *const added[] = {"LD_PRELOAD=libdl.so.2", "LD_BIND_NOW=1", NULL};
    return ask_as_program(SELF, added, fill->device);
}

enum attempt with_own_limits(const struct fill *fill)
{
    const char *const added[] = {
        "CUDA_DEVICE_MEMORY_LIMIT=1024g",   "CUDA_DEVICE_MEMORY_LIMIT_0=1024g",
        "CUDA_DEVICE_SM_LIMIT=100",         "CUDA_DISABLE_CONTROL=true",
        "CUDA_OVERSUBSCRIBE=true",          "GPU_CORE_UTILIZATION_POLICY=disable",
        "ACTIVE_OOM_KILLER=false",          "CUDA_TASK_PRIORITY=0",
        NULL,
    };
    return ask_as_program(SELF, added, fill->device);
}

enum attempt with_setuid(const struct fill *fill)
{
    const char *const added[] = {NULL};
    const char *copy = scratch_file("setuid");
    if (!copy || !copy_file(SELF, copy, 04755))
        return UNABLE;
    enum attempt attempt = ask_as_program(copy, added, fill->device);
    unlink(copy);
    return attempt;
}

/* Puts a folder first in the search path. The folder contains a copy of the driver's library under the same name. */
enum attempt with_other_libcuda(const struct fill *fill)
{
    struct link_map *map = NULL;
    void *handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    const char *folder = scratch_file("lib");
    char copy[200], variable[200];
    if (!handle || dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0 || !folder || mkdir(folder, 0700) != 0)
        return UNABLE;
    snprintf(copy, sizeof copy, "%s/libcuda.so.1", folder);
    snprintf(variable, sizeof variable, "LD_LIBRARY_PATH=%s", folder);
    const char *const added[] = {variable, NULL};
    enum attempt attempt = copy_file(map->l_name, copy, 0700) ? ask_as_program(SELF, added, fill->device) : UNABLE;
    unlink(copy);
    rmdir(folder);
    return attempt;
}

/* Requests the device after the last device of the slice, which must not exist. */
enum attempt with_more_devices(const struct fill *fill)
{
    const char *const added[] = {
        "NVIDIA_VISIBLE_DEVICES=all", "CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7",
        "CUDA_DEVICE_ORDER=PCI_BUS_ID", NULL,
    };
    return ask_as_program(SELF, added, fill->board->report.device_count);
}
