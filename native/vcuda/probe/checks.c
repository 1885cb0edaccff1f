/* SPDX-License-Identifier: Apache-2.0 */
/* Checks of vgpu-probe that need one process. Each examines every device of the slice (the container's part of its
 * GPUs) and reports the worst result. */
#include "probe.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void result_set(struct result *result, enum verdict verdict, uint64_t expected, uint64_t found, const char *unit,
                const char *format, ...)
{
    va_list arguments;
    result->verdict = verdict;
    result->left_out = false;
    result->expected = expected;
    result->found = found;
    snprintf(result->unit, sizeof result->unit, "%s", unit);
    va_start(arguments, format);
    vsnprintf(result->detail, sizeof result->detail, format, arguments);
    va_end(arguments);
}

/* Loads the driver and counts its devices. If that fails, returns NULL, and the result contains the reason. */
static const struct cuda *begin(const struct slice *slice, struct result *result, const char *unit, int *count)
{
    char reason[200];
    const struct cuda *cuda = cuda_open(reason, sizeof reason);
    if (!cuda) {
        result_set(result, NOT_RUN, 0, 0, unit, "%s", reason);
        return NULL;
    }
    if (cuda->device_count(count) != CUDA_SUCCESS || *count == 0) {
        result_set(result, NOT_RUN, (uint64_t)slice->count, 0, "devices", "the driver shows no GPU");
        return NULL;
    }
    if (!slice->found) {
        size_t total = 0;
        cuda->total_mem(&total, 0);
        result_set(result, VIOLATED, 0, total, unit, "the slice has no limit: %s", slice->reason);
        return NULL;
    }
    return cuda;
}

static const struct vgpu_limits_device *limit_of(const struct slice *slice, const struct cuda *cuda, CUdevice device,
                                                 char uuid[VGPU_UUID_SIZE], struct result *result)
{
    CUuuid bytes;
    uuid[0] = 0;
    if (cuda->device_uuid(&bytes, device) == CUDA_SUCCESS)
        uuid_spell(&bytes, uuid);
    const struct vgpu_limits_device *limit = slice_device(slice, uuid);
    if (!limit)
        result_set(result, VIOLATED, 0, 0, "bytes", "device %d (%s) is visible but missing in the limits file", device, uuid);
    return limit;
}

void list_devices(const struct slice *slice, struct board *board)
{
    char reason[200];
    int count = 0;
    (void)slice;
    const struct cuda *cuda = cuda_open(reason, sizeof reason);
    if (!cuda || cuda->device_count(&count) != CUDA_SUCCESS)
        return;
    for (CUdevice i = 0; i < count && i < VGPU_MAX_DEVICES; i++) {
        struct device_row *row = &board->report.devices[i];
        struct nvml_figures figures;
        CUcontext context;
        CUuuid uuid;
        size_t total = 0, free_bytes = 0;
        row->index = i;
        if (cuda->device_uuid(&uuid, i) == CUDA_SUCCESS)
            uuid_spell(&uuid, row->uuid);
        cuda->total_mem(&total, i);
        if (cuda->ctx_create(&context, 0, i) == CUDA_SUCCESS) {
            size_t unused;
            cuda->mem_info(&free_bytes, &unused);
            cuda->ctx_destroy(context);
        }
        nvml_figures(row->uuid, &figures);
        row->total_cuda = total;
        row->free_cuda = free_bytes;
        row->total_nvml = figures.total;
        row->used_nvml = figures.used;
        board->report.device_count = i + 1;
    }
}

void check_totals(const struct slice *slice, struct board *board)
{
    struct result *result = &board->result;
    int count;
    const struct cuda *cuda = begin(slice, result, "bytes", &count);
    for (CUdevice i = 0; cuda && i < count; i++) {
        char uuid[VGPU_UUID_SIZE];
        const struct vgpu_limits_device *limit = limit_of(slice, cuda, i, uuid, result);
        if (!limit)
            return;
        size_t total = 0, free_bytes = 0, info = 0;
        CUcontext context;
        struct nvml_figures figures;
        CUresult status = cuda->total_mem(&total, i);
        if (status == CUDA_SUCCESS && (status = cuda->ctx_create(&context, 0, i)) == CUDA_SUCCESS) {
            status = cuda->mem_info(&free_bytes, &info);
            cuda->ctx_destroy(context);
        }
        if (status != CUDA_SUCCESS) {
            result_set(result, VIOLATED, limit->memory_bytes, 0, "bytes", "%s: the driver returns %d", uuid, status);
            return;
        }
        bool nvml = nvml_figures(uuid, &figures);
        uint64_t wrong = total != limit->memory_bytes                        ? total
                         : info != limit->memory_bytes                       ? info
                         : nvml && figures.total != limit->memory_bytes      ? figures.total
                         : nvml && figures.total_v2 != limit->memory_bytes   ? figures.total_v2
                                                                             : limit->memory_bytes;
        result_set(result, wrong == limit->memory_bytes && free_bytes <= info ? PASSED : VIOLATED, limit->memory_bytes, wrong,
                   "bytes", "%s: total memory by cuDeviceTotalMem %zu, cuMemGetInfo %zu, NVML %llu and %llu%s", uuid, total, info,
                   (unsigned long long)figures.total, (unsigned long long)figures.total_v2, nvml ? "" : " (no NVML)");
        if (result->verdict != PASSED)
            return;
    }
}

void check_visible(const struct slice *slice, struct board *board)
{
    struct result *result = &board->result;
    int count;
    const struct cuda *cuda = begin(slice, result, "devices", &count);
    if (!cuda)
        return;
    for (CUdevice i = 0; i < count; i++) {
        char uuid[VGPU_UUID_SIZE];
        if (!limit_of(slice, cuda, i, uuid, result))
            return;
    }
    result_set(result, count == slice->count ? PASSED : VIOLATED, (uint64_t)slice->count, (uint64_t)count, "devices",
               "the limits file names every visible GPU");
}

void check_freed(const struct slice *slice, struct board *board)
{
    struct result *result = &board->result;
    int count;
    const struct cuda *cuda = begin(slice, result, "bytes", &count);
    if (!cuda)
        return;
    for (CUdevice i = 0; i < count; i++) {
        CUcontext context;
        CUdeviceptr pointers[8];
        int got = 0;
        int64_t at_first = ledger_live_bytes(), taken = 0;
        if (cuda->ctx_create(&context, 0, i) != CUDA_SUCCESS) {
            result_set(result, VIOLATED, 0, 0, "bytes", "no context can be created on device %d", i);
            return;
        }
        int64_t before = ledger_live_bytes();
        /* Request whole units of 2 MiB, because a driver rounds other sizes up and the library later charges the
         * additional bytes. */
        while (got < 8 && cuda->mem_alloc(&pointers[got], 2 * MIB * (size_t)(1 + got % 2)) == CUDA_SUCCESS)
            taken += (int64_t)(2 * MIB * (size_t)(1 + got++ % 2));
        int64_t held = ledger_live_bytes();
        while (got)
            cuda->mem_free(pointers[--got]);
        int64_t freed = ledger_live_bytes();
        cuda->ctx_destroy(context);
        int64_t left = ledger_live_bytes();
        const struct {
            int64_t expected, found;
            const char *what;
        } steps[] = {
            {0, at_first < 0, "there is no ledger"},
            {before + taken, held, "bytes in the ledger while eight pieces were allocated"},
            {before, freed, "bytes in the ledger after the pieces were freed"},
            {at_first, left, "bytes in the ledger after the context was destroyed"},
        };
        for (size_t step = 0; step < sizeof steps / sizeof *steps; step++)
            if (taken == 0 || steps[step].found != steps[step].expected) {
                result_set(result, VIOLATED, (uint64_t)steps[step].expected, (uint64_t)steps[step].found, "bytes", "%s, device %d",
                           taken ? steps[step].what : "no memory was granted", i);
                return;
            }
    }
    result_set(result, PASSED, 0, 0, "bytes", "the ledger charges and uncharges each piece and the context");
}
