/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vgpu-probe: measures from inside a container whether the limits of its slice are enforced. A slice is the container's
 * part of a GPU: an amount of memory and a share of the compute time. libvgpu, the library that intercepts CUDA calls,
 * enforces the limits.
 *
 * The probe allocates as programs do and judges by the driver's behaviour, not by what the library reports. Every check
 * runs in its own process, so that no check is affected by an earlier one.
 */
#ifndef PROBE_H
#define PROBE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "driver/cuda_abi.h"
#include "vgpu_abi.h"

#define MIB (1ull << 20)

/* --- driver.c --------------------------------------------------------------------------------------- */

struct cuda {
    CUresult (*init)(unsigned flags);
    CUresult (*device_count)(int *count);
    CUresult (*device_uuid)(CUuuid *uuid, CUdevice device);
    CUresult (*total_mem)(size_t *bytes, CUdevice device);
    CUresult (*ctx_create)(CUcontext *context, unsigned flags, CUdevice device);
    CUresult (*ctx_destroy)(CUcontext context);
    CUresult (*mem_alloc)(CUdeviceptr *pointer, size_t bytes);
    CUresult (*mem_free)(CUdeviceptr pointer);
    CUresult (*mem_info)(size_t *free_bytes, size_t *total_bytes);
};
/* Opens libcuda.so.1 and fills the table by dlsym on its handle. Returns NULL if that failed; `reason` says why. */
const struct cuda *cuda_open(char *reason, size_t room);
void *cuda_handle(void);

struct nvml_figures {
    uint64_t total, used, total_v2;
    uint64_t own; /* Bytes that NVML shows for this process; 0 if NVML does not list the process. */
};
bool nvml_figures(const char *uuid, struct nvml_figures *figures);

/* --- slice.c: the expected limits of the slice ------------------------------------------------------------ */

struct slice {
    bool found;
    char reason[160];
    int count;
    struct vgpu_limits_device devices[VGPU_MAX_DEVICES];
    uint32_t flags, core_policy;
};
/* Reads the limits of this container's shares (folders with the files of one allocation) and adds them. */
void slice_read(struct slice *slice);
/* Return the paths of the first share's files. The ledger is the file with the memory charged to each process of the
 * container; each process has a slot in it. */
const char *slice_limits(void);
const char *slice_ledger(void);
const struct vgpu_limits_device *slice_device(const struct slice *slice, const char *uuid);
void uuid_spell(const CUuuid *uuid, char out[VGPU_UUID_SIZE]);
bool uuid_same(const char *left, const char *right);
/* Returns the bytes charged to the ledger's live processes, or -1 if there is no ledger. */
int64_t ledger_live_bytes(void);
/* Returns the bytes charged to the calling process. */
int64_t ledger_own_bytes(void);
/* Returns the bytes of all slots, including exported memory of dead processes. */
int64_t ledger_all_bytes(void);
/* Returns whether a live process of the ledger has this pid in its own pid namespace. */
bool ledger_has(uint32_t pid);
/* Returns whether any live process has a slot of the container's ledger. Call this while no process of the probe has a
 * slot, so that true means another program. */
bool ledger_in_use(void);

/* --- checks ------------------------------------------------------------------------------------------------ */

/* OPEN: the bypass succeeded, and docs/threat-model.md lists it as not preventable inside the container. */
enum verdict { PASSED, VIOLATED, NOT_RUN, OPEN };

struct result {
    enum verdict verdict;
    /* left_out: true if the check did not run for lack of time. By this flag a caller that must run all checks in
     * limited time notices a check that did not run. */
    bool left_out;
    uint64_t expected, found;
    char unit[16];
    char detail[256];
};
struct device_row {
    int index;
    char uuid[VGPU_UUID_SIZE];
    uint64_t total_cuda, total_nvml, free_cuda, used_nvml;
};
struct report {
    int device_count;
    struct device_row devices[VGPU_MAX_DEVICES];
    uint64_t launch_ns[VGPU_MAX_DEVICES]; /* launch_ns: shortest measured call of cuLaunchKernel, 0 if not measured. */
    /* kernel_ns: time that the share check's kernel of 100000 rounds takes alone, 0 if not measured. */
    uint64_t kernel_ns[VGPU_MAX_DEVICES];
};
/* Memory shared between the probe and the processes that run its checks. */
struct board {
    struct result result;
    struct report report;
    _Atomic int ready, done, go;
    /* Counters of the rounds in which four processes compete (fill.c). */
    _Atomic int members, arrived, winners, beaten;
    _Atomic int card_full; /* card_full: the driver refused memory although the limit had room. */
    /* For each process of the check: the bytes that it was granted, and the bytes that NVML shows for it before (own)
     * and after (full) the grant. */
    uint64_t granted[8], own[8], full[8];
    int status[8];
};

void result_set(struct result *result, enum verdict verdict, uint64_t expected, uint64_t found, const char *unit,
                const char *format, ...) __attribute__((format(printf, 6, 7)));

/* main.c: time in ms for which the check limit-exact keeps the full slice and an open bypass keeps its memory, so that
 * an observer outside can see the memory. */
extern unsigned hold_ms;

/* State of a check that fills one device of the slice (fill.c). */
struct fill {
    const struct slice *slice;
    struct board *board;
    CUdevice device;
    const char *uuid;
    uint64_t limit;
};
/* Calls `measure` for each device of the slice until a device fails. If the card has less memory than the slice,
 * repeats the check with a lower limit. */
void on_every_device(const struct slice *slice, struct board *board, void (*measure)(const struct fill *fill));
bool contexts_count(const struct fill *fill);
/* Allocates all that is granted, down to one byte, beginning with pieces of `first` bytes. Returns the number of
 * bytes. */
uint64_t take_all(const struct fill *fill, const struct cuda *cuda, uint64_t first);
bool wait_for(_Atomic int *counter, int wanted); /* Waits for `wanted`; false after a minute. */

/* Path of the socket where two probes in two slices connect. */
extern const char *beside_socket;
void check_import_beside(const struct slice *slice, struct board *board);
void check_export_beside(const struct slice *slice, struct board *board);

void check_share(const struct slice *slice, struct board *board);
void check_totals(const struct slice *slice, struct board *board);
void check_limit_exact(const struct slice *slice, struct board *board);
void check_private_context(const struct slice *slice, struct board *board);
void check_every_allocator(const struct slice *slice, struct board *board);
void check_four_processes(const struct slice *slice, struct board *board);
void check_dlsym(const struct slice *slice, struct board *board);
void check_getprocaddress(const struct slice *slice, struct board *board);
void check_visible(const struct slice *slice, struct board *board);
void check_freed(const struct slice *slice, struct board *board);
void check_neighbours(const struct slice *slice, struct board *board);
void check_graphics(const struct slice *slice, struct board *board);
void list_devices(const struct slice *slice, struct board *board);

#endif
