/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Charges virtual memory that is shared with other processes. Exported memory lives until its last shareable handle is
 * closed and its last import is released, in any process. The exporting process stays charged until then, so the
 * container is charged once. A handle is marked by a lock on its descriptor (shareable.c). An importing process locks a
 * byte of the ledger (the file with the container's charges) that stands for the object, as for IPC handles (ipc.c). If
 * the exporting process dies, its slot (its entry in the ledger) keeps the charge while any handle or import exists.
 *
 * A handle from another container is refused. If this container has created handles without a mark, an import without a
 * mark may be of such a handle. Only in this case is the memory also charged to the importing process, when it is
 * mapped.
 */
#include "vmm.h"

#include "process.h"

#include <stdlib.h>

/* Adds `calls` to the number of calls that export this memory now, and records in the ledger whether the memory is
 * exported. The export is recorded before the handle exists, because a process may be killed during the driver's call.
 * The record is not cleared while another call may have created a handle. */
static void set_exporting(struct physical *object, int calls)
{
    lock_take(&vmm_lock);
    object->exporting += calls;
    bool exported = object->exporting || object->shared || object->kept;
    if (object->device && exported != object->exported) {
        ledger_export(object->device->ledger, object->bytes, exported);
        object->exported = exported;
    }
    lock_drop(&vmm_lock);
}

EXPORT CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle, int type,
                                             unsigned long long flags)
{
    ENTER(cuMemExportToShareableHandle, (shareable, handle, type, flags));
    (void)control;
    struct physical *object = vmm_begin(&vgpu_handles, handle);
    if (object)
        set_exporting(object, 1);
    CUresult status = REAL(cuMemExportToShareableHandle)(shareable, handle, type, flags);
    if (status == CUDA_SUCCESS && object) {
        bool descriptor = type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        /* The lock serialises two exports of the same memory, so that the second uses the object number of the
         * first. */
        lock_take(&vmm_lock);
        if (!descriptor || !shareable_mark(*(const int *)shareable, &object->shared))
            object->kept = true;
        lock_drop(&vmm_lock);
        if (!descriptor)
            shareable_unmarked();
    }
    if (object)
        set_exporting(object, -1);
    vmm_done(object);
    return status;
}

/* --- imports ------------------------------------------------------------------------------------------------- */

/* Returns the device of imported memory. NULL: the driver does not report it. */
static const struct device *place_of(CUmemGenericAllocationHandle handle)
{
    CUmemAllocationProp properties;
    CUdevice ordinal;
    CUresult status;
    if (!REAL_HAS(cuMemGetAllocationPropertiesFromHandle) ||
        REAL(cuMemGetAllocationPropertiesFromHandle)(&properties, handle) != CUDA_SUCCESS ||
        !location_on_card(&properties.location, &ordinal))
        return NULL;
    return device_of(ordinal, &status);
}

struct imported {
    uint64_t shared;
    bool here;
};

static bool is_import(const struct block *block, void *data)
{
    struct imported *imported = data;
    const struct physical *object = physical_of(block->owner);
    imported->here = imported->here || (object && object->import && object->shared == imported->shared);
    return false;
}

bool vmm_imported_here(uint64_t shared)
{
    struct imported imported = {.shared = shared};
    block_sweep(&vgpu_handles, is_import, &imported);
    block_sweep(&vgpu_mappings, is_import, &imported);
    return imported.here;
}

/* Refuses an import. The driver is called first, so that its own error is returned if the handle is not valid. */
static CUresult refuse_import(CUmemGenericAllocationHandle *handle, void *shareable, int type)
{
    CUresult status = REAL(cuMemImportFromShareableHandle)(handle, shareable, type);
    if (status != CUDA_SUCCESS)
        return status;
    if (REAL_HAS(cuMemRelease))
        REAL(cuMemRelease)(*handle);
    return memory_refuse("an import of memory that another container made");
}

EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable, int type)
{
    ENTER(cuMemImportFromShareableHandle, (handle, shareable, type));
    uint64_t shared = 0;
    if (control == CONTROL_BROKEN)
        return memory_broken();
    if (!ledger_join())
        return CUDA_ERROR_NOT_PERMITTED;
    bool descriptor = type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    enum shareable_origin origin = shareable_origin(descriptor ? (int)(intptr_t)shareable : -1, &shared);
    if (origin == SHAREABLE_FOREIGN)
        return refuse_import(handle, shareable, type);
    struct physical *object = calloc(1, sizeof *object);
    void *import = ledger_import(shareable_import_byte(shared));
    if (!object || !import) {
        ledger_import_end(import);
        free(object);
        return object ? CUDA_ERROR_NOT_PERMITTED : CUDA_ERROR_OUT_OF_MEMORY;
    }
    *object = (struct physical){.shared = shared, .import = import, .calls = 1};
    CUresult status = REAL(cuMemImportFromShareableHandle)(handle, shareable, type);
    if (status == CUDA_SUCCESS) {
        /* The driver may return a handle value that this process already knows. Then the import belongs to the known
         * object. */
        struct physical *same = vmm_begin(&vgpu_handles, *handle);
        if (!same && origin == SHAREABLE_UNKNOWN)
            object->device = place_of(*handle);
        status = vmm_remember(same ? same : object, *handle, !same);
        vmm_done(same);
    }
    vmm_done(object);
    return status;
}
