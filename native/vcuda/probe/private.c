/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The check private-context uses a context that no exported function of the driver created, so libvgpu does not see its
 * creation. NVIDIA's runtime gets its context in this way, from a private table. The check passes if the context is
 * charged like any other, so that a process with such a context gets exactly the limit. Only the simulated driver has a
 * table with known functions (native/gpusim/cuda/private.h). On another driver the check reports not-run. With
 * NVIDIA's driver a program that uses NVIDIA's runtime tests the same.
 */
#include "loader.h"
#include "probe.h"

#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static const CUuuid id = {{'g', 'p', 'u', 's', 'i', 'm', '-', 'p', 'r', 'i', 'v', 'a', 't', 'e', '-', '1'}};

struct table {
    size_t bytes;
    CUresult (*primary_retain)(CUcontext *context, CUdevice device);
    CUresult (*primary_release)(CUdevice device);
    CUresult (*set_current)(CUcontext context);
};

/* Returns the table. Returns NULL on another driver: NVIDIA's driver returns an error for an unknown id. */
static const struct table *table_of(void)
{
    const void *found = NULL;
    CUresult (*export_table)(const void **table, const CUuuid *id);
    *(void **)&export_table = dlsym(cuda_handle(), "cuGetExportTable");
    if (!export_table || export_table(&found, &id) != CUDA_SUCCESS || !found)
        return NULL;
    const struct table *table = found;
    return table->bytes >= sizeof *table ? table : NULL;
}

static void fill_private(const struct fill *fill)
{
    struct result *result = &fill->board->result;
    char reason[200];
    CUcontext context;
    struct nvml_figures figures;
    size_t free_bytes = 0, total = 0;
    const struct cuda *cuda = cuda_open(reason, sizeof reason);
    const struct table *table = cuda ? table_of() : NULL;
    CUresult status = table ? table->primary_retain(&context, fill->device) : CUDA_ERROR_NOT_SUPPORTED;
    if (status == CUDA_SUCCESS)
        status = table->set_current(context);
    if (status == CUDA_SUCCESS)
        status = cuda->mem_info(&free_bytes, &total);
    if (status != CUDA_SUCCESS) {
        result_set(result, NOT_RUN, fill->limit, 0, "bytes", "%s: %s", fill->uuid,
                   table ? "the private table creates no context" : "the driver has no private table whose functions are known");
        return;
    }
    uint64_t granted = take_all(fill, cuda, free_bytes ? free_bytes : 1);
    bool nvml = contexts_count(fill) && nvml_figures(fill->uuid, &figures) && figures.own > granted;
    uint64_t charged = contexts_count(fill) && total > free_bytes ? total - free_bytes : 0;
    uint64_t found = nvml ? figures.own : granted + charged;
    bool held = found == fill->limit && (charged || !contexts_count(fill));
    result_set(result, held ? PASSED : VIOLATED, fill->limit, found, "bytes",
               "%s: %llu bytes granted in addition to a context of %llu; the found bytes are %s", fill->uuid, (unsigned long long)granted,
               (unsigned long long)charged,
               nvml ? "NVML's figure of this process" : "the granted bytes and those in use before");
}

static void measure_private(const struct fill *fill)
{
    pid_t child = fork();
    if (child == 0) {
        fill_private(fill);
        _exit(0);
    }
    waitpid(child, NULL, 0);
}

void check_private_context(const struct slice *slice, struct board *board)
{
    on_every_device(slice, board, measure_private);
}
