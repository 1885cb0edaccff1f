/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vgpu-probe: measures from inside a slice whether its limits hold.
 *
 * It asks for memory the way programs do and believes what the driver then does, not what the library says. Every check
 * runs in a process of its own, so that none begins with what another has left.
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
/* Opens libcuda.so.1 and fills the table by dlsym on its handle; NULL with a reason when that fails. */
const struct cuda *cuda_open(char *reason, size_t room);
void *cuda_handle(void);

struct nvml_figures {
    uint64_t total, used, total_v2;
    uint64_t own; /* bytes that NVML shows for this process, 0: it shows none */
};
bool nvml_figures(const char *uuid, struct nvml_figures *figures);

/* --- slice.c: what the slice should be ------------------------------------------------------------------- */

struct slice {
    bool found;
    char reason[160];
    int count;
    struct vgpu_limits_device devices[VGPU_MAX_DEVICES];
    uint32_t flags, core_policy;
};
/* All shares of this container together. */
void slice_read(struct slice *slice);
/* The files of its first share. */
const char *slice_limits(void);
const char *slice_ledger(void);
const struct vgpu_limits_device *slice_device(const struct slice *slice, const char *uuid);
void uuid_spell(const CUuuid *uuid, char out[VGPU_UUID_SIZE]);
bool uuid_same(const char *left, const char *right);
/* Bytes that the ledger's live processes hold; -1: no ledger. */
int64_t ledger_live_bytes(void);
/* And those of them that are charged to the calling process. */
int64_t ledger_own_bytes(void);
/* And those of all slots: what the dead had exported is charged too. */
int64_t ledger_all_bytes(void);
/* Is that pid one of the ledger's live processes? As each sees itself. */
bool ledger_has(uint32_t pid);
/* Has a process other than the probe's own a slot of the container's ledger? Asked while none of those has. */
bool ledger_in_use(void);

/* --- checks ------------------------------------------------------------------------------------------------ */

/* OPEN: a bypass that docs/threat-model.md says cannot be stopped from here. */
enum verdict { PASSED, VIOLATED, NOT_RUN, OPEN };

struct result {
    enum verdict verdict;
    bool left_out; /* not-run for want of time; a caller that fits a slice's checks into its time asks for it by this, not by words */
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
    uint64_t launch_ns[VGPU_MAX_DEVICES]; /* the shortest call of cuLaunchKernel that was seen; 0: not measured */
    uint64_t kernel_ns[VGPU_MAX_DEVICES]; /* what the share's kernel of 100000 rounds takes alone; 0: not measured */
};
/* Shared memory between the probe and the processes that run its checks. */
struct board {
    struct result result;
    struct report report;
    _Atomic int ready, done, go;
    _Atomic int members, arrived, winners, beaten; /* of the four processes' rounds */
    _Atomic int card_full; /* the driver refused although the limit had room */
    uint64_t granted[8], own[8], full[8]; /* granted; NVML's figure of the process before and after that */
    int status[8];
};

void result_set(struct result *result, enum verdict verdict, uint64_t expected, uint64_t found, const char *unit,
                const char *format, ...) __attribute__((format(printf, 6, 7)));

/* main.c: how long limit-exact holds the full slice, and an open bypass what it got, so that somebody outside can look at it. */
extern unsigned hold_ms;

/* fill.c: for checks that take all there is of one device. */
struct fill {
    const struct slice *slice;
    struct board *board;
    CUdevice device;
    const char *uuid;
    uint64_t limit;
};
/* Calls `measure` for each device of the slice until one is not held; again with less where the card is smaller. */
void on_every_device(const struct slice *slice, struct board *board, void (*measure)(const struct fill *fill));
bool contexts_count(const struct fill *fill);
/* Takes all that is granted, down to one byte, beginning with pieces of `first` bytes. Answers the bytes. */
uint64_t take_all(const struct fill *fill, const struct cuda *cuda, uint64_t first);
bool wait_for(_Atomic int *counter, int wanted); /* false: not within a minute */

/* Two probes in two slices meet at this socket. */
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
