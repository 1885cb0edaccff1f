/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The private table of nvmlInternalGetExportTable, through which nvidia-smi calls unpublished functions of NVML.
 *
 * Word 0 is the size of the table in bytes, then come function pointers. The slots below were measured by running
 * nvidia-smi on a library that logs every call: 535.261.03 and 550.163.01 agree on all of them, and so does 580.65.06 on
 * those marked *. Every other slot returns NOT_SUPPORTED and uses no argument; nvidia-smi then prints N/A.
 *
 *   20          whether this is the console's primary GPU (handle, &answer)
 *   23          how two GPUs are linked (PCI address, PCI address, &link): 0 PIX, 1 PXB, 2 PHB, 3 NODE, 4 SYS, 5… NVLinks
 *   26 *        housekeeping, called often; must succeed
 *   108         the public nvmlDeviceGetEnforcedPowerLimit
 *   72          whether dmon and pmon support this GPU (handle, &answer)
 *   81 *        handle by index (index, &handle)
 *   168         reset these GPUs (count, handles)
 *   169         state of the fabric; success without output means no fabric
 *   182, 183    gather the GPUs that must be reset together; success without output means only the named GPUs
 *   192, 193    set and get compute policies; policy 0 is the time slice
 *   213-215 *   processes: compute, MPS, graphics (handle, &count, entries)
 *
 * On an unmeasured branch only 26 and 81 are filled: nvidia-smi shows no processes, because a wrong layout would show
 * wrong processes or crash. README.md, "A new nvidia-smi", describes how to measure a branch.
 */
#include "nvml_internal.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* Number of slots: more than in any known table, so that an unknown build reads within bounds. */
#define TABLE_SLOTS 400

static const unsigned char table_id[16] = {0xc4, 0xfe, 0x3e, 0x6c, 0xc9, 0x8f, 0x6c, 0x4e,
                                           0xa3, 0x27, 0xee, 0x69, 0x6e, 0x12, 0xf7, 0xc4};

/* size is the size of the table in that branch's real library in bytes. For 580 it is unknown, so that branch gets all
 * slots. complete is true if all slots were measured on that branch, not only those marked *. */
static const struct branch {
    const char *prefix;
    unsigned size;
    bool complete;
} measured[] = {{"535.", 1960, true}, {"550.", 2008, true}, {"580.", 8 * TABLE_SLOTS, false}};

struct smi_process {
    unsigned pid;
    unsigned pad;
    unsigned long long bytes;
    unsigned gi, ci;
    unsigned char reserved[8];
    char name[4096];
};
_Static_assert(sizeof(struct smi_process) == 4128, "nvidia-smi steps through the list by 4128 bytes");
_Static_assert(offsetof(struct smi_process, name) == 32, "nvidia-smi reads the name at 32");

struct smi_policy {
    unsigned kind; /* Kind of the policy; 0 is the time slice. */
    unsigned value;
};

struct smi_policies {
    unsigned count;
    struct smi_policy list[1];
};

NVML_API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device);
NVML_API nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned *milliwatts);

static nvmlReturn_t slot_success(void)
{
    return NVML_SUCCESS;
}

static nvmlReturn_t slot_primary(nvmlDevice_t device, unsigned *answer)
{
    struct nvml_target target;
    NVML_TRY(nvml_open(device, NVML_WHOLE_GPU, &target));
    NVML_NEED(answer != NULL);
    *answer = 0;
    return NVML_SUCCESS;
}

/* All GPUs are at the host's only bridge, as in nvmlDeviceGetTopologyCommonAncestor. */
static nvmlReturn_t slot_link(const char *first, const char *second, unsigned *link)
{
    NVML_NEED(first != NULL && second != NULL && link != NULL);
    *link = 2;
    return NVML_SUCCESS;
}

static nvmlReturn_t slot_monitored(nvmlDevice_t device, unsigned *answer)
{
    struct nvml_target target;
    NVML_TRY(nvml_open(device, NVML_WHOLE_GPU, &target));
    NVML_NEED(answer != NULL);
    *answer = 1;
    return NVML_SUCCESS;
}

static nvmlReturn_t slot_compute_processes(nvmlDevice_t device, unsigned *count, struct smi_process *entries)
{
    struct nvml_target target;
    NVML_TRY(nvml_open(device, NVML_ANY_DEVICE, &target));
    NVML_NEED(count != NULL);
    struct nvml_process *list = calloc(SIM_MAX_PROCS, sizeof *list);
    if (list == NULL)
        return NVML_ERROR_MEMORY;
    unsigned room = *count, found = target.gi < 0 ? nvml_processes(&target, list, SIM_MAX_PROCS) : 0;
    *count = found;
    for (unsigned i = 0; i < found && found <= room; i++) {
        memset(&entries[i], 0, sizeof entries[i]);
        entries[i].pid = list[i].pid;
        entries[i].bytes = list[i].bytes;
        entries[i].gi = list[i].gi;
        entries[i].ci = list[i].ci;
        nvml_process_name(list[i].pid, entries[i].name, sizeof entries[i].name);
    }
    free(list);
    return found > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

static nvmlReturn_t slot_no_processes(nvmlDevice_t device, unsigned *count)
{
    struct nvml_target target;
    NVML_TRY(nvml_open(device, NVML_ANY_DEVICE, &target));
    NVML_NEED(count != NULL);
    *count = 0;
    return NVML_SUCCESS;
}

static nvmlReturn_t slot_set_policy(nvmlDevice_t device, const struct smi_policy *policy)
{
    struct nvml_target target;
    NVML_TRY(nvml_open(device, NVML_WHOLE_GPU, &target));
    NVML_NEED(policy != NULL && policy->kind == 0 && policy->value <= 3);
    NVML_TRY(nvml_root());
    sim_lock();
    target.gpu->time_slice = policy->value;
    sim_unlock();
    return NVML_SUCCESS;
}

static nvmlReturn_t slot_get_policies(nvmlDevice_t device, struct smi_policies *policies)
{
    struct nvml_target target;
    NVML_TRY(nvml_open(device, NVML_WHOLE_GPU, &target));
    NVML_NEED(policies != NULL);
    sim_lock();
    policies->count = 1;
    policies->list[0] = (struct smi_policy){.kind = 0, .value = target.gpu->time_slice};
    sim_unlock();
    return NVML_SUCCESS;
}

/* Each empty slot has its own function, so that a trace shows the slot's number; the macros write 400 functions. */
static nvmlReturn_t empty_slot(unsigned number)
{
    nvml_trace("slot %u", number);
    return NVML_ERROR_NOT_SUPPORTED;
}

#define EMPTY(n)                                                                                                       \
    static nvmlReturn_t slot_##n(void)                                                                                 \
    {                                                                                                                  \
        return empty_slot(1##n - 1000);                                                                                \
    }
#define NAME(n) (void *)slot_##n,
#define TEN(f, n) f(n##0) f(n##1) f(n##2) f(n##3) f(n##4) f(n##5) f(n##6) f(n##7) f(n##8) f(n##9)
#define HUNDRED(f, n)                                                                                                  \
    TEN(f, n##0)                                                                                                       \
    TEN(f, n##1) TEN(f, n##2) TEN(f, n##3) TEN(f, n##4) TEN(f, n##5) TEN(f, n##6) TEN(f, n##7) TEN(f, n##8) TEN(f, n##9)

HUNDRED(EMPTY, 0)
HUNDRED(EMPTY, 1)
HUNDRED(EMPTY, 2)
HUNDRED(EMPTY, 3)

static void *table[TABLE_SLOTS] = {HUNDRED(NAME, 0) HUNDRED(NAME, 1) HUNDRED(NAME, 2) HUNDRED(NAME, 3)};

static void fill(void)
{
    const struct branch *known = NULL;
    for (unsigned i = 0; i < sizeof measured / sizeof measured[0]; i++)
        if (strncmp(sim_state()->driver_version, measured[i].prefix, strlen(measured[i].prefix)) == 0)
            known = &measured[i];
    table[0] = (void *)(uintptr_t)(known ? known->size : sizeof table);
    table[26] = (void *)slot_success;
    table[81] = (void *)nvmlDeviceGetHandleByIndex_v2;
    if (known != NULL && known->complete) {
        table[20] = (void *)slot_primary;
        table[23] = (void *)slot_link;
        table[72] = (void *)slot_monitored;
        table[108] = (void *)nvmlDeviceGetEnforcedPowerLimit;
        table[168] = (void *)nvml_reset;
        table[169] = table[182] = table[183] = (void *)slot_success;
        table[192] = (void *)slot_set_policy;
        table[193] = (void *)slot_get_policies;
    }
    if (known == NULL)
        return;
    table[213] = (void *)slot_compute_processes;
    table[214] = (void *)slot_no_processes;
    table[215] = (void *)slot_no_processes;
}

NVML_API nvmlReturn_t nvmlInternalGetExportTable(const void **answer, const void *id)
{
    NVML_NEED(answer != NULL && id != NULL);
    *answer = NULL;
    if (memcmp(id, table_id, sizeof table_id) != 0)
        return NVML_ERROR_INVALID_ARGUMENT;
    NVML_TRY(nvml_status(sim_attach(SIM_ROLE_NVML)));
    /* The driver's version never changes while the host runs, so the table is filled once. */
    static pthread_once_t filled = PTHREAD_ONCE_INIT;
    pthread_once(&filled, fill);
    *answer = table;
    return NVML_SUCCESS;
}
