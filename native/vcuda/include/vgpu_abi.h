/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Layout of the four kinds of files that a container with a part of a GPU (a tenant) receives. Two kinds are read-only:
 * the limits, and the gpu pages, which say when the tenant may use a GPU. Two can be written: the ledger, which records
 * the memory charged to each process, and the tenant page, which records the container's use of device time.
 *
 * This header is the only C definition. plugins/module_utils/abi/fields.py has the same layout for Python, and
 * tests/native/vcuda/test_layouts.py checks that the two are equal. All numbers are little endian. Each file begins
 * with an 8-byte magic, its version, and min_reader, the oldest version of a reader that still understands the file.
 *
 * Compatibility: a reader accepts a file whose min_reader is not above its own version. It reads a field past the end
 * of the header or of an entry (the writer records their sizes) as 0. So a writer may append fields but never move
 * them, and the value 0 of a new field must mean the behaviour before the field existed.
 */
#ifndef VGPU_ABI_H
#define VGPU_ABI_H

#include <stddef.h>
#include <stdint.h>

#define VGPU_MAX_DEVICES 16
#define VGPU_UUID_SIZE 48
#define VGPU_ALLOCATION_SIZE 64

/*
 * Paths of the files in a container. A share is a folder with the files of one allocation. The root, the library's
 * folder and each share are read-only mounts. Ledger and tenant page are writable mounts inside a share. A mount cannot
 * be renamed from inside the container. The root is in /dev, because /dev is a separate mount in every container, so no
 * image can put a link there.
 *
 * Containers of an older version have single files below /etc/vgpu and /run/vgpu, and their own library.
 */
#define VGPU_PATH_ROOT "/dev/vgpu"
#define VGPU_PATH_LIBRARY VGPU_PATH_ROOT "/lib/libvgpu.so"
#define VGPU_PATH_PRELOAD "/etc/ld.so.preload"
#define VGPU_SHARE "0" /* Folder of the first share below the root. Most containers have only this share. */
/* Maximum number of shares of a container. Each share is a numbered folder of the root with its own files. */
#define VGPU_MAX_SHARES 8
#define VGPU_PATH_SHARE VGPU_PATH_ROOT "/" VGPU_SHARE
#define VGPU_PATH_LIMITS VGPU_PATH_SHARE "/limits"
#define VGPU_PATH_LEDGER VGPU_PATH_SHARE "/ledger"
#define VGPU_PATH_TENANT VGPU_PATH_SHARE "/tenant"
#define VGPU_PATH_GPU_PREFIX VGPU_PATH_SHARE "/gpu-" /* The GPU's UUID follows, spelled as in the limits file. */

/* --- limits ------------------------------------------------------------------------------------- */

#define VGPU_LIMITS_MAGIC "VGPULIM1"
#define VGPU_LIMITS_VERSION 1u
#define VGPU_LIMITS_MIN_READER 1u
#define VGPU_LIMITS_FILE_SIZE 4096u

enum vgpu_limits_flag {
    VGPU_LIMITS_COUNT_CONTEXT = 1u << 0,         /* COUNT_CONTEXT: contexts and their code count against the limit. */
    VGPU_LIMITS_DENY = 1u << 1, /* DENY: no context may be created, because the allocation is not ready. */
    VGPU_LIMITS_OOM_KILLER = 1u << 2,            /* OOM_KILLER: kill processes while the container exceeds its limit. */
    VGPU_LIMITS_ALLOW_DISABLE_CONTROL = 1u << 3, /* ALLOW_DISABLE_CONTROL: CUDA_DISABLE_CONTROL=true takes effect. */
    VGPU_LIMITS_OVERSUBSCRIBE = 1u << 4, /* OVERSUBSCRIBE: memory beyond the card's size comes from host memory. */
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

/* The limits of one device. sm_percent 0 or 100 means no limit. The devices are in NVML's order in the container; this
 * order stays the same for the life of an allocation. */
struct vgpu_limits_device {
    char uuid[VGPU_UUID_SIZE]; /* UUID as NVML spells it, "GPU-..." or "MIG-...", padded with NUL. */
    uint64_t memory_bytes;
    uint32_t sm_percent;
    uint32_t flags;
    /* The card's real size, set if the driver itself limits the container's control group: such a driver reports the
     * limit as the card's size. 0 means that the driver reports the real size and only this library enforces the
     * limit. */
    uint64_t card_bytes;
};

/*
 * The limits may change while the container runs. The change is made in place, because a rename is invisible through a
 * bind mount. The writer stores an odd sequence, then all other fields with the new crc32, then the next even sequence.
 * A reader copies the file between two loads of the same even sequence and checks the crc32 of the copy. If the
 * sequence stays odd, the writer has died.
 */
struct vgpu_limits {
    char magic[8];
    uint32_t version;
    uint32_t min_reader;
    uint32_t size;     /* size: bytes that crc32 covers. The file is at least as long and never shrinks. */
    uint32_t sequence; /* sequence is even while no write is in progress. */
    uint32_t crc32;    /* crc32: zlib's crc32 of `size` bytes, computed with sequence and crc32 as 0. */
    uint32_t flags;    /* flags: bits of enum vgpu_limits_flag. */
    uint32_t core_policy;
    uint32_t priority;  /* priority: 0 is high, 1 is low. */
    uint32_t log_level; /* log_level: from 0 (error) to 5 (trace). */
    uint32_t device_count;
    uint32_t device_offset; /* device_offset: offset of the first device from the start of the file. */
    uint32_t device_size;   /* device_size: distance from one device to the next. */
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
 * A process owns one slot. The process is alive while the byte VGPU_LEDGER_ALIVE_BASE + slot of the ledger file, far
 * past the file's end, has an open-file-description lock (F_OFD_SETLK, write). The kernel drops that lock when the
 * process ends in any way. A slot whose byte is not locked is dead: its figures do not count, and the next writer
 * clears them. pid is informative only.
 *
 * `used` and `context` of the live slots are authoritative. `total` in the header is derived from them. Only the holder
 * of `lock` changes `total`. A process that takes the lock over from a dead holder first computes the total again.
 */
#define VGPU_LEDGER_ALIVE_BASE 0x40000000u
#define VGPU_LEDGER_INIT_BYTE 0x50000000u    /* This byte is locked while an empty file is initialised. */
/* This byte + the device's index is locked while the device's first context is measured. */
#define VGPU_LEDGER_CONTEXT_BASE 0x50000100u
/* This byte + the hash of an IPC handle: each process that has the handle open has a shared lock. */
#define VGPU_LEDGER_IMPORT_BASE 0x60000000u
#define VGPU_LEDGER_IMPORT_SPAN 0x10000000u
#define VGPU_LEDGER_EXPORTED_DEVICES 12
/* This byte + the hash of an IPC handle: the exporting process has a shared lock. The range is wide, so that two hashes
 * are practically never equal. */
#define VGPU_LEDGER_MADE_BASE 0x1000000000000000u
#define VGPU_LEDGER_MADE_SPAN 0x1000000000000000u

struct vgpu_ledger_slot {
    uint64_t used[VGPU_MAX_DEVICES];    /* used: bytes of allocations. */
    uint64_t context[VGPU_MAX_DEVICES]; /* context: bytes of contexts. */
    uint32_t generation;                /* generation: incremented each time a process claims the slot. */
    uint32_t pid;                       /* pid: the owner's pid in its own pid namespace. */
    uint64_t pid_namespace;             /* pid_namespace: inode of that namespace, 0 if it is unknown. */
    /* exported_mib: the part of `used` that other processes may have open, in MiB, rounded up. It stays charged after
     * the exporting process has died, as long as any process has a lock on a byte from VGPU_LEDGER_IMPORT_BASE on. */
    uint32_t exported_mib[12];
};

/* In every array of this header a device's index is the position of its UUID in devices[]. */
struct vgpu_ledger {
    char magic[8];
    uint32_t version;
    uint32_t min_reader;
    uint32_t size; /* Size of the whole file. */
    uint32_t slot_count;
    uint32_t slot_offset;
    uint32_t slot_size;
    uint32_t device_count;
    uint32_t slot_high; /* slot_high: slots from this index on were never used. */
    uint64_t lock; /* lock: 0 if unlocked, else (generation << 32) | (slot + 1) of the holder. */
    uint64_t reserved1[2];
    char allocation[VGPU_ALLOCATION_SIZE];
    uint64_t total[VGPU_MAX_DEVICES];         /* total: sum of used and context over the slots. */
    uint64_t context_bytes[VGPU_MAX_DEVICES]; /* context_bytes: measured size of one context, 0 if not measured yet. */
    char devices[VGPU_MAX_DEVICES][VGPU_UUID_SIZE];
    /* Path of the file to which all shareable handles refer; empty if no handle was created. */
    char shareable[240];
    /* shareable_file: device (top bit set for a character device) and inode of that file. */
    uint64_t shareable_file[2];
    /* shareable_unmarked: not 0 if a process of this container created a shareable handle without the library's mark.
     * The mark is a lock that shows whether the handle is still open and to which ledger it belongs. */
    uint64_t shareable_unmarked;
    /* beyond_bytes: used only if the driver enforces a limit itself. It is the part of the ledger's free bytes that the
     * driver's limit did not allow at the last query. NVML shows these bytes as used, but no process is charged for
     * them. */
    uint64_t beyond_bytes[VGPU_MAX_DEVICES];
};

#define VGPU_LEDGER_SLOT_OFFSET 4096u
#define VGPU_LEDGER_FILE_SIZE \
    (VGPU_LEDGER_SLOT_OFFSET + VGPU_LEDGER_SLOTS * (uint32_t)sizeof(struct vgpu_ledger_slot))

/* --- gpu page ----------------------------------------------------------------------------------- */

/*
 * There is one gpu page for each allocation and GPU: the node's file `gpu-<uuid>` in the allocation's folder, read-only
 * in the container. The page's gate says when this tenant may use this GPU. Only the arbiter writes the page, in place.
 * A tenant obeys the page while heartbeat_ns is younger than VGPU_ARBITER_SILENT_NS. Otherwise, and without a page, the
 * tenant limits itself to its share.
 *
 * Times are CLOCK_MONOTONIC in nanoseconds, which host and containers share (but not time namespaces).
 */
#define VGPU_GPU_PAGE_MAGIC "VGPUGPU1"
#define VGPU_GPU_PAGE_VERSION 1u
#define VGPU_GPU_PAGE_MIN_READER 1u
#define VGPU_GPU_PAGE_FILE_SIZE 4096u
#define VGPU_ARBITER_SILENT_NS 200000000ull
/* The longest time that the arbiter waits for a kernel that still runs after its tenant's turn. */
#define VGPU_ARBITER_DRAIN_NS 25000000ull

enum vgpu_gate {
    VGPU_GATE_NONE = 0,   /* NONE: no arbiter schedules this tenant. */
    VGPU_GATE_OPEN = 1,   /* OPEN: run at rate_ppm at any time. */
    VGPU_GATE_TURN = 2,   /* TURN: run only from turn_start_ns to turn_end_ns. */
    VGPU_GATE_CLOSED = 3, /* CLOSED: another tenant runs; to run, set waiting_ns and wait on `wake`. */
};

enum vgpu_gpu_flag {
    VGPU_GPU_EXCLUSIVE = 1u << 0, /* EXCLUSIVE: no other known tenant runs, so elapsed time is this tenant's time. */
    VGPU_GPU_PRIORITY = 1u << 1,  /* PRIORITY: the gate is closed because of a tenant of high priority. */
};

struct vgpu_gpu_page {
    char magic[8];
    uint32_t version;
    uint32_t min_reader;
    uint32_t size;
    uint32_t sequence;           /* sequence is odd while the page is written. */
    /* heartbeat_ns: time at which the arbiter last read the pages; not protected by the sequence. */
    uint64_t heartbeat_ns;
    uint32_t wake;               /* wake: a futex that changes with every change of the fields below. */
    uint32_t gate;               /* gate: a value of enum vgpu_gate. */
    uint32_t flags;              /* flags: bits of enum vgpu_gpu_flag. */
    uint32_t rate_ppm;           /* rate_ppm: device time per elapsed time in millionths; 1000000 is the whole GPU. */
    uint64_t turn_start_ns;
    uint64_t turn_end_ns;
    uint32_t outstanding_max_us; /* outstanding_max_us: predicted work that may be queued; 0 means no maximum. */
    uint32_t unused[2];          /* unused is 0, so that no tenant learns its number of neighbours. */
    uint32_t turns;              /* turns: number of turns that this tenant has had; informative only. */
    /* open_ns: total time for which the gate was open at the rate of the whole GPU; not protected by the sequence. */
    uint64_t open_ns;
    uint64_t reserved[5];
    char uuid[VGPU_UUID_SIZE];
    char allocation[VGPU_ALLOCATION_SIZE];
};

/* --- tenant page -------------------------------------------------------------------------------- */

/*
 * The tenant page of a container records for all its processes together how much device time they may still use and
 * when they use the GPU. Every word changes by one atomic step, so that a kill leaves no half-written state. Times
 * expire, so that a killed process cannot keep a gate shut.
 *
 * The tenant can write false values. So the arbiter takes shares from the limits file only and bounds every value that
 * it reads here.
 */
#define VGPU_TENANT_MAGIC "VGPUTEN1"
#define VGPU_TENANT_VERSION 1u
#define VGPU_TENANT_MIN_READER 1u
#define VGPU_TENANT_FILE_SIZE 4096u
#define VGPU_TENANT_LANES 16u

enum vgpu_tenant_request {
    VGPU_TENANT_LOW = 1u << 0, /* A process of a container with high priority has requested low priority. */
};

struct vgpu_tenant_device {
    int64_t balance_ns;   /* balance_ns: device time that may be used at once; below 0 if too much was used. */
    uint64_t accrued_ns;  /* accrued_ns: time up to which the balance has been filled. */
    uint64_t used_ns;     /* used_ns: device time charged since the page was created. */
    uint64_t active_ns;   /* active_ns: time at which a process last launched or waited to launch. */
    uint64_t waiting_ns;  /* waiting_ns: time at which a process last waited for the gate (not for its own balance). */
    uint64_t requests; /* requests: flags of enum vgpu_tenant_request, kept until the container ends. */
    /* throttled_ns: time that launches waited for the share or the turn, summed over all threads. While the gate is
     * open at full rate no wait counts, because launches then wait only for the container's own queued work. */
    uint64_t throttled_ns;
    uint64_t reserved[1];
    /* Predicted end of the queued work in each lane; 0 if no work is queued. A lane is an entry of this array; each
     * process writes only to the lane that its pid selects. */
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
    uint32_t wake; /* A futex, incremented when the tenant starts to request the GPU or its queued work is finished. */
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
