/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Virtual memory that other processes may have.
 *
 * Memory that was exported lives until its last shareable handle is closed and its last import is gone, in whatever
 * process. Its maker stays charged until then, once for the container: handles are marked (shareable.c), and who imports one
 * holds a byte of the ledger that stands for it, as with IPC handles (ipc.c). If the maker dies, its slot keeps what it had
 * exported as long as any of both is left. A handle from elsewhere than this container is refused; only where the container has
 * made handles that show no mark, and this may be one of them, its memory is charged to the importer too, once it is mapped.
 */
#include "vmm.h"

#include "process.h"

#include <stdlib.h>

/* Before the handle is there: a maker that is killed in between has exported it. Not undone while another call may have
 * made one. */
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
        lock_take(&vmm_lock); /* of two calls the second takes the first one's mark */
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

/* The device that memory is on which came by a handle; NULL: the driver does not say. */
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

/* The driver is asked all the same: what is no handle at all is its own to refuse. */
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
        struct physical *same = vmm_begin(&vgpu_handles, *handle); /* the same value again */
        if (!same && origin == SHAREABLE_UNKNOWN)
            object->device = place_of(*handle);
        status = vmm_remember(same ? same : object, *handle, !same);
        vmm_done(same);
    }
    vmm_done(object);
    return status;
}
