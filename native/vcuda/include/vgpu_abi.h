/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The four files that a container receives: limits and gpu pages (read-only), ledger and tenant page (read-write).
 *
 * This header is the only C definition. plugins/module_utils/abi/fields.py is its Python twin, and
 * tests/native/vcuda/test_layouts.py compiles a program against this file and checks that the two are equal. All
 * numbers are little endian. All files begin with an 8-byte magic, a version, and the oldest version of a reader that
 * still understands them.
 *
 * Compatibility: a reader accepts a file whose min_reader is not above its own version. It reads a field past the end
 * of the header or of an entry (the writer records their sizes) as 0. So a writer may append fields but never move
 * them, and 0 means "as before".
 */
#ifndef VGPU_ABI_H
#define VGPU_ABI_H

#include <stddef.h>
#include <stdint.h>

#define VGPU_MAX_DEVICES 16
#define VGPU_UUID_SIZE 48
#define VGPU_ALLOCATION_SIZE 64

/*
 * Paths of the files in a container. The root, the library's folder and the share's folder are read-only mounts. Ledger
 * and tenant page are writable mounts inside the share. A mount cannot be renamed from inside the container, and /dev
 * is a separate mount in every container, where no image has a link. Containers of an older version have single files
 * below /etc/vgpu and /run/vgpu, and their own library.
 */
#define VGPU_PATH_ROOT "/dev/vgpu"
#define VGPU_PATH_LIBRARY VGPU_PATH_ROOT "/lib/libvgpu.so"
#define VGPU_PATH_PRELOAD "/etc/ld.so.preload"
#define VGPU_SHARE "0" /* Folder below the root: the share of a container that has only one. */
#define VGPU_MAX_SHARES 8 /* Of a container; each is a numbered folder of the root with its own files. */
#define VGPU_PATH_SHARE VGPU_PATH_ROOT "/" VGPU_SHARE
#define VGPU_PATH_LIMITS VGPU_PATH_SHARE "/limits"
#define VGPU_PATH_LEDGER VGPU_PATH_SHARE "/ledger"
#define VGPU_PATH_TENANT VGPU_PATH_SHARE "/tenant"
#define VGPU_PATH_GPU_PREFIX VGPU_PATH_SHARE "/gpu-" /* followed by the UUID as in the limits file */

/* --- limits ------------------------------------------------------------------------------------- */

#define VGPU_LIMITS_MAGIC "VGPULIM1"
#define VGPU_LIMITS_VERSION 1u
#define VGPU_LIMITS_MIN_READER 1u
#define VGPU_LIMITS_FILE_SIZE 4096u

enum vgpu_limits_flag {
    VGPU_LIMITS_COUNT_CONTEXT = 1u << 0,         /* Contexts and their code count against the limit. */
    VGPU_LIMITS_DENY = 1u << 1,                  /* No context may be created: the allocation is not ready. */
    VGPU_LIMITS_OOM_KILLER = 1u << 2,            /* Kill a process that exceeds its limit. */
    VGPU_LIMITS_ALLOW_DISABLE_CONTROL = 1u << 3, /* CUDA_DISABLE_CONTROL=true takes effect. */
    VGPU_LIMITS_OVERSUBSCRIBE = 1u << 4,         /* Memory beyond the card's size comes from host memory. */
};

enum vgpu_core_policy {
    VGPU_CORE_DEFAULT = 0,
    VGPU_CORE_FORCE = 1,
    VGPU_CORE_DISABLE = 2,
};

enum vgpu_device_flag {
    /* memory_bytes == 0 means "no limit" only with this flag; without it the device may not be used. */
    VGPU_DEVICE_UNLIMITED_MEMORY = 1u << 0,
};

/* memory_bytes and sm_percent of a device; sm_percent 0 or 100: no limit. The devices have NVML's order in the
 * container, which stays the same for the life of an allocation. */
struct vgpu_limits_device {
    char uuid[VGPU_UUID_SIZE]; /* as NVML spells it, "GPU-..." or "MIG-...", NUL padded */
    uint64_t memory_bytes;
    uint32_t sm_percent;
    uint32_t flags;
    /* The card's own bytes, if the driver itself limits the container's control group and therefore reports that
     * limit as the card's size. 0: the driver reports the card's size, and only this library enforces the limit. */
    uint64_t card_bytes;
};

/*
 * A live change is made in place, because a rename is invisible through a bind mount. The writer stores an odd
 * sequence, then all other fields with the new crc32, then the next even sequence. A reader copies the file between two
 * loads of the same even sequence and checks the crc32 of the copy. An odd sequence that stays means that the writer
 * died.
 */
struct vgpu_limits {
    char magic[8];
    uint32_t version;
    uint32_t min_reader;
    uint32_t size;     /* Bytes that crc32 covers; the file is at least as long and never shrinks. */
    uint32_t sequence; /* even: no write in progress. */
    uint32_t crc32;    /* zlib's crc32 of `size` bytes with sequence and crc32 taken as 0. */
    uint32_t flags;    /* enum vgpu_limits_flag. */
    uint32_t core_policy;
    uint32_t priority;  /* 0 high, 1 low. */
    uint32_t log_level; /* 0 error ... 5 trace. */
    uint32_t device_count;
    uint32_t device_offset; /* Offset of the first device from the start of the file. */
    uint32_t device_size;   /* Distance from one device to the next. */
    uint32_t reserved[2];
    char allocation[VGPU_ALLOCATION_SIZE];
    struct vgpu_limits_device devices[VGPU_MAX_DEVICES];
};

/* --- ledger ------------------------------------------------------------------------------------- */

#define VGPU_LEDGER_MAGIC "VGPULED1"
#define VGPU_LEDGER_VERSION 1u
#define VGPU_LEDGER_MIN_READER 1u
#define VGPU_LEDGER_SLOTS 1024u

/*
 * A process owns one slot. It is alive while an open-file-description lock (F_OFD_SETLK, write) is held on the byte
 * VGPU_LEDGER_ALIVE_BASE + slot of the ledger file, far past its end. The kernel drops that lock when the process ends
 * in any way. pid is informative only. A slot whose byte is not locked is dead: its figures do not count and the next
 * writer clears them.
 *
 * `used` and `context` of the live slots are the only truth. `total` in the header is derived: it is changed under the
 * lock word, and a process that takes that lock over from a dead holder recounts it first.
 */
#define VGPU_LEDGER_ALIVE_BASE 0x40000000u
#define VGPU_LEDGER_INIT_BYTE 0x50000000u    /* Locked while an empty file is initialised. */
#define VGPU_LEDGER_CONTEXT_BASE 0x50000100u /* + device: locked while a first context is measured. */
/* + hash of an IPC handle: shared lock of each process that has the handle open. */
#define VGPU_LEDGER_IMPORT_BASE 0x60000000u
#define VGPU_LEDGER_IMPORT_SPAN 0x10000000u
#define VGPU_LEDGER_EXPORTED_DEVICES 12
/* + hash of an IPC handle: shared lock of the exporting process. The range is wide, so that two hashes are
 * practically never equal. */
#define VGPU_LEDGER_MADE_BASE 0x1000000000000000u
#define VGPU_LEDGER_MADE_SPAN 0x1000000000000000u

struct vgpu_ledger_slot {
    uint64_t used[VGPU_MAX_DEVICES];    /* Bytes of allocations. */
    uint64_t context[VGPU_MAX_DEVICES]; /* Bytes of contexts. */
    uint32_t generation;                /* Incremented at each claim of the slot. */
    uint32_t pid;                       /* In the owner's pid namespace. */
    uint64_t pid_namespace;             /* Inode of that namespace; 0: unknown. */
    /* Part of `used`: memory that other processes may have open, in MiB, rounded up. It stays charged after the
     * exporting process dies, while any IMPORT byte is locked. */
    uint32_t exported_mib[12];
};

/* In every array of this header a device's index is the position of its UUID in devices[]. */
struct vgpu_ledger {
    char magic[8];
    uint32_t version;
    uint32_t min_reader;
    uint32_t size; /* of the whole file */
    uint32_t slot_count;
    uint32_t slot_offset;
    uint32_t slot_size;
    uint32_t device_count;
    uint32_t slot_high; /* Slots from this index on were never used. */
    uint64_t lock; /* 0: unlocked; else (generation << 32) | (slot + 1) of the holder. */
    uint64_t reserved1[2];
    char allocation[VGPU_ALLOCATION_SIZE];
    uint64_t total[VGPU_MAX_DEVICES];         /* derived: sum of used + context over the slots. */
    uint64_t context_bytes[VGPU_MAX_DEVICES]; /* What one context costs, once measured; 0: not measured yet. */
    char devices[VGPU_MAX_DEVICES][VGPU_UUID_SIZE];
    /* path of the file that all shareable handles are descriptors of; empty: no handle was created */
    char shareable[240];
    uint64_t shareable_file[2]; /* device (top bit: a character device) and inode of that file. */
    uint64_t shareable_unmarked; /* Not 0: a process of this container created a handle without a mark. */
    /* If the driver enforces a limit itself: bytes for which this account had room and the driver had none, at the
     * last query. Informative: shown as used, but charged to no process. */
    uint64_t beyond_bytes[VGPU_MAX_DEVICES];
};

#define VGPU_LEDGER_SLOT_OFFSET 4096u
#define VGPU_LEDGER_FILE_SIZE \
    (VGPU_LEDGER_SLOT_OFFSET + VGPU_LEDGER_SLOTS * (uint32_t)sizeof(struct vgpu_ledger_slot))

/* --- gpu page ----------------------------------------------------------------------------------- */

/*
 * One page for each allocation and GPU: the node's file `gpu-<uuid>` in the allocation's folder, read-only in the
 * container. It tells how the arbiter lets this tenant use this GPU. Only the arbiter writes it, in place. A tenant
 * follows it while heartbeat_ns is younger than VGPU_ARBITER_SILENT_NS. Otherwise, and without a page, it keeps its own
 * share. Times are CLOCK_MONOTONIC in nanoseconds, which host and containers share (but not time namespaces).
 */
#define VGPU_GPU_PAGE_MAGIC "VGPUGPU1"
#define VGPU_GPU_PAGE_VERSION 1u
#define VGPU_GPU_PAGE_MIN_READER 1u
#define VGPU_GPU_PAGE_FILE_SIZE 4096u
#define VGPU_ARBITER_SILENT_NS 200000000ull
#define VGPU_ARBITER_DRAIN_NS 25000000ull /* longest wait for a kernel that runs on after its turn */

enum vgpu_gate {
    VGPU_GATE_NONE = 0,   /* The arbiter has not written yet: as without an arbiter. */
    VGPU_GATE_OPEN = 1,   /* Run at rate_ppm at any time. */
    VGPU_GATE_TURN = 2,   /* Run only from turn_start_ns to turn_end_ns. */
    VGPU_GATE_CLOSED = 3, /* Another tenant's turn, or a higher priority's: set waiting_ns, and wait on `wake`. */
};

enum vgpu_gpu_flag {
    VGPU_GPU_EXCLUSIVE = 1u << 0, /* No other known tenant runs meanwhile: elapsed time is this tenant's own. */
    VGPU_GPU_PRIORITY = 1u << 1,  /* Closed because a tenant of high priority wants the GPU. */
};

struct vgpu_gpu_page {
    char magic[8];
    uint32_t version;
    uint32_t min_reader;
    uint32_t size;
    uint32_t sequence;           /* Odd while being written. */
    uint64_t heartbeat_ns;       /* When the arbiter last read the pages; not protected by the sequence. */
    uint32_t wake;               /* futex: changes with every change of the fields below. */
    uint32_t gate;               /* enum vgpu_gate. */
    uint32_t flags;              /* enum vgpu_gpu_flag. */
    uint32_t rate_ppm;           /* device time per elapsed time; 1000000: the whole GPU. */
    uint64_t turn_start_ns;
    uint64_t turn_end_ns;
    uint32_t outstanding_max_us; /* Predicted work that may be queued; 0: no maximum. */
    uint32_t unused[2];          /* 0: no tenant learns its number of neighbours. */
    uint32_t turns;              /* informative: turns that this tenant has had. */
    uint64_t open_ns; /* How long the gate was open at the rate of the whole GPU; not protected by the sequence. */
    uint64_t reserved[5];
    char uuid[VGPU_UUID_SIZE];
    char allocation[VGPU_ALLOCATION_SIZE];
};

/* --- tenant page -------------------------------------------------------------------------------- */

/*
 * The container's page: what all its processes together may still run and what they request. Every word changes by one
 * atomic step, so that a kill leaves no half-written state. Times expire, so that a killed process cannot keep a gate
 * shut. The tenant can write false values: the arbiter takes shares from the limits file only and bounds every value
 * that it reads here.
 */
#define VGPU_TENANT_MAGIC "VGPUTEN1"
#define VGPU_TENANT_VERSION 1u
#define VGPU_TENANT_MIN_READER 1u
#define VGPU_TENANT_FILE_SIZE 4096u
#define VGPU_TENANT_LANES 16u

enum vgpu_tenant_request {
    VGPU_TENANT_LOW = 1u << 0, /* a process of a high-priority container requested low priority */
};

struct vgpu_tenant_device {
    int64_t balance_ns;   /* device time that may be used at once; below 0: overdrawn. */
    uint64_t accrued_ns;  /* Time up to which the balance has been filled. */
    uint64_t used_ns;     /* device time charged since the page was made. */
    uint64_t active_ns;   /* When a process last launched, or waited to launch. */
    uint64_t waiting_ns;  /* When a process last waited for the gate (not for its own balance). */
    uint64_t requests; /* enum vgpu_tenant_request: set by a process, kept until the container ends. */
    uint64_t throttled_ns; /* Time that launches waited for the share or the turn, summed over all threads. */
    uint64_t reserved[1];
    /* predicted end of the queued work; 0: none. Process n has lane n % LANES */
    uint64_t busy_until_ns[VGPU_TENANT_LANES];
};

/* A device's index is its position in the limits file. */
struct vgpu_tenant_page {
    char magic[8];
    uint32_t version;
    uint32_t min_reader;
    uint32_t size;
    uint32_t device_count;
    uint32_t device_offset;
    uint32_t device_size;
    uint32_t wake; /* futex: incremented when the tenant starts to request the GPU or has drained */
    uint32_t reserved[7];
    char allocation[VGPU_ALLOCATION_SIZE];
    char uuids[VGPU_MAX_DEVICES][VGPU_UUID_SIZE];
    struct vgpu_tenant_device devices[VGPU_MAX_DEVICES];
};

_Static_assert(sizeof(struct vgpu_gpu_page) <= VGPU_GPU_PAGE_FILE_SIZE, "gpu page");
_Static_assert(sizeof(struct vgpu_tenant_device) == 192, "tenant device: three cache lines");
_Static_assert(sizeof(struct vgpu_tenant_page) <= VGPU_TENANT_FILE_SIZE, "tenant page");
_Static_assert(sizeof(struct vgpu_limits_device) == 72, "limits device");
_Static_assert(offsetof(struct vgpu_limits, devices) == 128, "limits header");
_Static_assert(sizeof(struct vgpu_limits) <= VGPU_LIMITS_FILE_SIZE, "limits fit in a page");
_Static_assert(sizeof(struct vgpu_ledger_slot) == 320, "ledger slot: five cache lines");
_Static_assert(sizeof(struct vgpu_ledger) <= VGPU_LEDGER_SLOT_OFFSET, "ledger header");

#endif
