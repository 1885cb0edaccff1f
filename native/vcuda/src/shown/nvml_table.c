/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Replaces functions in the private table from which NVIDIA's nvidia-smi reads its list of processes. Word 0 of the
 * table is its size in bytes, and pointers to functions follow. The program gets a copy in which the three functions
 * for processes are replaced. All other entries remain the driver's own.
 *
 * The positions of these functions and the layout of an entry of the list are not documented. They were measured on the
 * builds below (native/gpusim/nvml/export_table.c documents how). A table that was not measured is returned unchanged,
 * because replacing an unknown function could break another feature.
 */
#include "nvml_shown.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SLOT_COMPUTE 213u
#define SLOT_MPS 214u
#define SLOT_GRAPHICS 215u
#define LARGEST_TABLE 65536u

static const unsigned char process_table[16] = {0xc4, 0xfe, 0x3e, 0x6c, 0xc9, 0x8f, 0x6c, 0x4e,
                                                0xa3, 0x27, 0xee, 0x69, 0x6e, 0x12, 0xf7, 0xc4};
/* One row for each driver branch. The comment names the build with which it was measured: that build's nvidia-smi was
 * run with a library that logs the position of each call. `size` is the size of the table in the driver library of that
 * build. A driver whose table has another size is not matched. 0 means that the size was not measured. */
static const struct {
    const char *branch;
    size_t size;
} measured[] = {
    {"535.", 1960}, /* Measured with 535.261.03. */
    {"550.", 2008}, /* Measured with 550.163.01. */
    {"580.", 0},    /* Measured with 580.65.06. */
};

struct entry {
    unsigned pid, pad;
    unsigned long long bytes;
    unsigned gi, ci;
    unsigned char reserved[8];
    char name[4096];
};
_Static_assert(sizeof(struct entry) == 4128 && offsetof(struct entry, name) == 32, "as nvidia-smi steps through the list");

static void *_Atomic copy;

/* Reads the program name of a process, that is, the first argument. */
static void name_of(unsigned pid, char *name, size_t room)
{
    char path[48];
    name[0] = 0;
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = descriptor < 0 ? 0 : read(descriptor, name, room - 1);
    if (descriptor >= 0)
        close(descriptor);
    name[length < 0 ? 0 : length] = 0;
}

static nvmlReturn_t compute(nvmlDevice_t device, unsigned *count, struct entry *entries)
{
    enum control control = vgpu_enter_nvml();
    struct own_process *own;
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    int found = nvml_own_processes(control, device, &own);
    unsigned room = *count;
    *count = found > 0 ? (unsigned)found : 0;
    bool named = ledger_proc_is_ours();
    for (int i = 0; i < found && (unsigned)found <= room && entries; i++) {
        memset(&entries[i], 0, sizeof entries[i]);
        entries[i].pid = own[i].pid;
        entries[i].bytes = own[i].bytes;
        entries[i].gi = own[i].gi;
        entries[i].ci = own[i].ci;
        if (named)
            name_of(own[i].pid, entries[i].name, sizeof entries[i].name);
    }
    free(own);
    return *count > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

static nvmlReturn_t nobody(nvmlDevice_t device, unsigned *count)
{
    (void)device;
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = 0;
    return NVML_SUCCESS;
}

static bool layout_known(size_t size)
{
    char version[96];
    if (!REAL_HAS(nvmlSystemGetDriverVersion) ||
        REAL(nvmlSystemGetDriverVersion)(version, sizeof version) != NVML_SUCCESS)
        return false;
    for (size_t i = 0; i < sizeof measured / sizeof *measured; i++)
        if (strncmp(version, measured[i].branch, strlen(measured[i].branch)) == 0)
            return !measured[i].size || measured[i].size == size;
    return false;
}

static void *copy_of(void *const *table)
{
    size_t size = (uintptr_t)table[0];
    void **ours = atomic_load_explicit(&copy, memory_order_acquire);
    if (ours || size < (SLOT_GRAPHICS + 1) * sizeof *ours || size > LARGEST_TABLE || !layout_known(size) ||
        !(ours = malloc(size)))
        return ours;
    memcpy(ours, table, size);
    ours[SLOT_COMPUTE] = (void *)compute;
    ours[SLOT_MPS] = ours[SLOT_GRAPHICS] = (void *)nobody;
    void *before = NULL;
    if (!atomic_compare_exchange_strong_explicit(&copy, &before, ours, memory_order_acq_rel, memory_order_acquire)) {
        free(ours);
        return before;
    }
    return ours;
}

/* Gives the program the copy of the table for processes. All other tables are returned unchanged. */
EXPORT nvmlReturn_t nvmlInternalGetExportTable(const void **table, const void *id)
{
    ENTER_NVML(nvmlInternalGetExportTable, (table, id));
    nvmlReturn_t status = REAL(nvmlInternalGetExportTable)(table, id);
    if (status == NVML_SUCCESS && table && *table && id && memcmp(id, process_table, sizeof process_table) == 0) {
        void *ours = copy_of(*table);
        if (ours)
            *table = ours;
    }
    return status;
}
