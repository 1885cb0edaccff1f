/* SPDX-License-Identifier: Apache-2.0 */
/* The state of a simulated host, which is one file in shared memory. sim.h has the functions and the rules of access. */
#ifndef GPUSIM_LAYOUT_H
#define GPUSIM_LAYOUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "models.h"

#define SIM_MAGIC "GPUSIM01"
#define SIM_VERSION 8u
#define SIM_MAX_GPUS 16
#define SIM_MAX_PROCS 1024
/* Maximum number of contexts of all processes on one GPU. */
#define SIM_MAX_CHANNELS 512
/* Work items in flight per context. A full queue blocks the launching thread. */
#define SIM_QUEUE 1024
/* Utilization samples that are stored. NVML shows the last SIM_SAMPLES_NVML of them. */
#define SIM_SAMPLES 128
/* The driver's ring has 72 samples in 10 s. */
#define SIM_SAMPLES_NVML 72
/* Period of one sample. */
#define SIM_SAMPLE_NS 138888888ull
/* Intervals per GPU in the run log. */
#define SIM_LOG 65536
/* Stored Xid and ECC events of the host. */
#define SIM_EVENTS 256
/* Stored totals of ended processes, for the reports and NVML's accounting. */
#define SIM_PAST 512
/* Maximum number of memory blocks with a shareable handle on the host. */
#define SIM_SHARED 256
/* Maximum number of control groups' memory limits on the host. */
#define SIM_LIMITS 256
/* Stored links from a control group to its parent, as far as processes that set limits could see them. */
#define SIM_LINKS 512
/* Maximum number of control groups from a process's own group up to the root. */
#define SIM_DEPTH 16
/* Maximum number of GPU instances of one GPU. */
#define SIM_MAX_GI 8
/* Maximum number of compute instances of one GPU instance. */
#define SIM_MAX_CI 8
#define SIM_KEY 24
#define SIM_NAME 96
#define SIM_UUID 48

struct sim_mig_ci {
    /* id is the compute instance's id within its GPU instance. */
    uint32_t used, id;
    uint32_t slices, placement_start;
    /* NVML_COMPUTE_INSTANCE_PROFILE_* */
    uint32_t profile;
    /* UUID that starts with MIG-. */
    char uuid[SIM_UUID];
};

struct sim_mig_gi {
    uint32_t used, id;
    uint32_t profile_id; /* The id of the instance's sim_mig_profile. */
    uint32_t placement_start, placement_size;
    uint32_t ci_count;
    struct sim_mig_ci ci[SIM_MAX_CI];
};

/* One sample of the driver's ring of utilization samples. It has the utilization over the period before `time`, and the
 * ONE process whose context ran on the GPU at `time`. slot is -1 if no context ran. pid is the process id in that
 * process's own namespace. While serial is still the slot's serial, sim_proc_pid() of the slot returns the pid for the
 * caller's namespace. */
struct sim_sample {
    /* Time in sim_now() nanoseconds. */
    uint64_t time;
    /* sim_proc.serial of the process. */
    uint64_t serial;
    int32_t slot;
    int32_t pid;
    /* Busy part of the period in 1/10000: time during which kernels ran. */
    uint32_t sm_util;
    /* Part of the period in 1/10000 with memory access (modelled as half of sm_util). */
    uint32_t mem_util;
};

enum sim_run { SIM_RUN_KERNEL = 1, SIM_RUN_SWITCH = 2 };

/* One kernel run or context switch from start to end. Adjacent intervals of one context are merged. */
struct sim_interval {
    uint64_t start, end, serial;
    int32_t pid;
    uint16_t kind, channel;
};

enum sim_work_kind {
    /* Kernel: runs only while its context has the GPU's time slice. */
    SIM_WORK_KERNEL = 1,
    /* Copy: runs next to kernels, for `remaining` ns from the moment its stream reaches it. */
    SIM_WORK_COPY,
    /* Event record: completes when its stream reaches it. */
    SIM_WORK_MARK,
    /* Wait: completes when item dep_seq of the channel (queue of a context) dep_channel is done. */
    SIM_WORK_WAIT,
    /* Host work: completes when its owner calls sim_work_release(). */
    SIM_WORK_HOST,
};

#define SIM_STREAM_LEGACY 0u
#define SIM_STREAM_NONBLOCKING 0x80000000u /* Flag in sim_work.stream: the stream ignores the legacy stream. */
#define SIM_COST_FOREVER (UINT64_MAX / 4)

struct sim_work {
    /* Sequence number, set by sim_submit(). */
    uint64_t seq;
    /* Time in ns that the item still needs if it runs at full speed. */
    uint64_t remaining;
    /* End in sim_now() time, valid when the item is done. */
    uint64_t finish;
    /* Time at which the item first ran. */
    uint64_t start;
    uint64_t dep_seq;
    /* The submitter's own value. sim_submit() returns it to the submitter when the entry is overwritten. */
    uint64_t tag;
    uint32_t stream;
    uint16_t sms;
    uint16_t dep_channel;
    uint8_t kind, done, dep_gpu, started;
    uint32_t pad;
};

/* A context on a GPU. Items head … tail-1 are queued; item seq is at ring[seq % SIM_QUEUE]. */
struct sim_channel {
    uint32_t used;
    int32_t slot;
    /* sim_proc.serial of the context's process. */
    uint64_t serial;
    uint64_t head, tail;
    uint64_t busy_ns;
    /* nonblocking: 1 after an item of a non-blocking stream was submitted. */
    uint32_t nonblocking, pad;
    struct sim_work ring[SIM_QUEUE];
};

/* Memory and time of one process on one GPU. The bytes of allocations, contexts and modules are authoritative;
 * sim_gpu.used is their sum and is computed again after the lock's holder died. */
struct sim_usage {
    /* Bytes of allocations. */
    uint64_t memory;
    /* Bytes of contexts. */
    uint64_t context;
    /* Bytes of code and global variables. */
    uint64_t module;
    /* Highest sum of the three. */
    uint64_t peak;
    /* GPU time in which this process's kernels ran. */
    uint64_t busy_ns;
    /* Number of finished kernels. */
    uint64_t kernels;
    /* sim_now() at the creation of the first context. */
    uint64_t since;
    /* Part of `memory` that is managed memory on the GPU. No control group is charged for it. */
    uint64_t managed;
    /* Other bytes that no control group is charged for (groups.c). */
    uint64_t uncounted;
    uint32_t contexts;
    /* MIG: (index of the GPU instance << 8 | index of the compute instance) + 1; 0 without MIG. */
    uint32_t instance;
};

enum sim_role { SIM_ROLE_NONE = 0, SIM_ROLE_CUDA, SIM_ROLE_NVML, SIM_ROLE_TOOL };

struct sim_proc {
    /* How often this slot was taken; a part of the lock's word. */
    uint32_t generation;
    /* enum sim_role; SIM_ROLE_NONE if the slot is free. */
    uint32_t role;
    /* Host-wide number of this registration, never reused. */
    uint64_t serial;
    uint64_t start_wall_us;
    /* Process id in the process's own PID namespace: see sim_proc_pid(). */
    int32_t pid;
    uint32_t reserved;
    /* Virtual clock: the instant that the process waits for; UINT64_MAX while it runs. */
    uint64_t wait_target;
    /* Serial of the process that opened the driver: this process or, after a fork, an ancestor. */
    uint64_t creator;
    /* Inodes of the process's control groups as it sees them, its own first; 0 ends the list. */
    uint64_t groups[SIM_DEPTH];
    char comm[16];
    struct sim_usage use[SIM_MAX_GPUS];
};

/* Totals of an ended process. */
struct sim_past {
    uint64_t serial;
    int32_t pid, gpu;
    /* Only peak, busy_ns, kernels and since are set; the bytes are 0. */
    struct sim_usage use;
    uint64_t end;
};

/* Memory with a shareable handle: shared.c. */
struct sim_shared {
    uint32_t used;
    int32_t gpu;
    /* Serial of the exporting process; 0 after that process has released the memory or ended, because then no process
     * is charged. */
    uint64_t serial;
    uint64_t bytes, offset;
    /* The exporting process and its descriptor of the memory file; -1 for a pool, which is not mapped. */
    int32_t pid, fd;
    /* Control groups of the exporting process, charged as long as any process uses the block. */
    uint64_t groups[SIM_DEPTH];
};

/* Limits of video memory that the driver enforces for control groups, from branch 615 on: groups.c. */
enum sim_memacct { SIM_MEMACCT_NONE = 0, SIM_MEMACCT_MISC, SIM_MEMACCT_DMEM };
#define SIM_UNLIMITED UINT64_MAX

struct sim_limit {
    /* Inode of the control group; 0 if the entry is free. */
    uint64_t group;
    /* Limits in bytes. */
    uint64_t soft, hard;
    uint32_t gpu;
    /* 1 if the group's controller is off: the driver charges an ancestor instead. */
    uint32_t idle;
    /* Path of the group as the process that set the limit named it. */
    char path[SIM_NAME * 2];
};

struct sim_link {
    uint64_t group, parent;
};

enum sim_event_kind { SIM_EVENT_XID = 1, SIM_EVENT_ECC_SINGLE, SIM_EVENT_ECC_DOUBLE };

struct sim_event {
    /* Counts 1, 2, 3 …: a reader remembers the last number that it has read. */
    uint64_t number;
    uint64_t time;
    uint32_t gpu, kind;
    /* Xid number, or number of errors. */
    uint64_t data;
};

struct sim_gpu {
    /* set by the profile, constant afterwards */
    char model[SIM_KEY];
    char name[SIM_NAME];
    char uuid[SIM_UUID];
    char serial_number[SIM_KEY];
    uint32_t pci_domain, pci_bus, pci_device;
    /* Number of the device node /dev/nvidia<minor>. */
    uint32_t minor;
    /* Total bytes as NVML reports them. */
    uint64_t total;
    /* Bytes that the driver itself uses. */
    uint64_t reserved_bytes;
    uint64_t context_bytes;
    /* NUMA node that the GPU's memory forms on the host; 0 if none. */
    uint64_t numa_node;
    uint32_t sm_count, cc_major, cc_minor, arch;

    /* guarded by lock */
    /* Bytes of all processes, without reserved_bytes. */
    uint64_t used;
    /* 1 if the GPU has fallen off the bus. */
    uint32_t lost;
    uint32_t ecc_mode, ecc_pending;
    /* Index 0: volatile count; index 1: aggregate count. */
    uint64_t ecc_single[2], ecc_double[2];
    /* NVML_COMPUTEMODE_*: 0 default, 2 prohibited, 3 exclusive process. */
    uint32_t compute_mode;
    uint32_t persistence;
    uint32_t accounting;
    /* 0 default, 1 short, 2 medium, 3 long. Scales slice_ns, see sim_slice_ns(). */
    uint32_t time_slice;
    uint32_t power_limit_mw;
    uint32_t mig_mode, mig_pending;
    struct sim_mig_gi gi[SIM_MAX_GI];

    /* fields of the engine (engine.c) */
    /* Time up to which the GPU has been simulated. */
    uint64_t simulated;
    uint64_t random;
    /* Channel that runs on the GPU, or SIM_HOLDER_NONE or SIM_HOLDER_GONE. */
    int32_t holder;
    /* End of that channel's time slice. */
    uint64_t slice_end;
    /* End of the switch to that channel. */
    uint64_t switch_until;
    uint64_t busy_ns, switch_ns, switches;
    /* End of the current sample period, and busy ns in it. */
    uint64_t sample_next, sample_busy;
    /* Number of samples taken so far; the newest is samples[(sample_count - 1) % SIM_SAMPLES]. */
    uint64_t sample_count;
    /* Number of intervals begun so far. */
    uint64_t log_count;
    /* Number of channels ever used, so that the engine reads no further. */
    uint32_t channel_count;
    struct sim_sample samples[SIM_SAMPLES];
    struct sim_interval log[SIM_LOG];
    struct sim_channel channels[SIM_MAX_CHANNELS];
};

/* Behaviours that CUDA allows and most drivers avoid: the profile's key `hostile`. */
enum sim_hostile {
    SIM_HOSTILE_CONTEXT_LOCK = 1 << 0,
    SIM_HOSTILE_CALLBACKS = 1 << 1,
    SIM_HOSTILE_TEARDOWN = 1 << 2,
    SIM_HOSTILE_SLOW_NVML = 1 << 3,
    SIM_HOSTILE_CAPTURE_QUERY = 1 << 4,
    SIM_HOSTILE_WAITING_FREES = 1 << 5,
    SIM_HOSTILE_ROUNDING = 1 << 6,
};
#define SIM_ROUNDING ((uint64_t)2 << 20)

enum sim_clock { SIM_CLOCK_REAL = 0, SIM_CLOCK_MANUAL, SIM_CLOCK_AUTO };

struct sim_state {
    /* Written last: a file without it is initialized again. */
    char magic[8];
    uint32_t version;
    uint32_t pad;
    /* sizeof(struct sim_state) */
    uint64_t size;

    /* The lock's word: 0 if free, else it identifies the holder (lock.c). */
    _Atomic uint32_t lock;
    /* Futex, raised when virtual time moves. */
    _Atomic uint32_t clock_seq;
    /* Virtual time in ns. */
    _Atomic uint64_t clock_now;
    _Atomic uint32_t clock_mode;
    /* Futex, raised with every sim_event: wait with sim_event_wait(). */
    _Atomic uint32_t event_seq;

    /* set by the profile */
    /* Such as "535.261.03". */
    char driver_version[32];
    /* Such as 12020 for CUDA 12.2. */
    uint32_t cuda_version;
    uint32_t gpu_count;
    uint32_t device_nodes_required;
    /* Bits of enum sim_hostile. */
    uint32_t hostile;
    /* Kernels take cost * (1 ± jitter). */
    uint32_t jitter_permille;
    /* Time slice of a context, and cost of a change of context. */
    uint64_t slice_ns, switch_ns;
    /* Allocations are charged in multiples of this number of bytes. */
    uint64_t granularity;
    /* Speed of copies between host and device. */
    uint64_t copy_bytes_per_ms;
    /* Wall clock at the moment sim_now() == boot_now. */
    uint64_t boot_wall_us;
    uint64_t boot_now;
    /* Number of resets. */
    uint64_t epoch;
    /* Number of calls that came after the driver's teardown had begun. */
    _Atomic uint64_t late_calls;
    /* enum sim_memacct */
    uint32_t memacct;
    /* 1 if a group's limit needs the group's controller to be on. */
    uint32_t controllers_required;
    /* `dmem`: 1 if the kernel accepts a limit below the current usage. */
    uint32_t lowers_below_use;
    char cgroup_root[SIM_NAME];

    /* guarded by lock */
    /* 1 if nvmlInit must fail with NVML_ERROR_DRIVER_NOT_LOADED. */
    uint32_t nvml_fail;
    /* Number of slots ever used: scans stop there. */
    uint32_t proc_high;
    uint64_t next_serial;
    /* How often the lock's holder was found dead. */
    uint64_t repairs;
    uint64_t event_count;
    uint64_t past_count;
    uint64_t last_reap;
    /* 1 if the next call that sets a limit returns success without effect. */
    uint32_t drop_next_limit;
    /* 1 if no group is charged for the memory of a process whose `creator` is dead. */
    uint32_t dead_creators;
    /* 1 if a forked child may use the driver that its parent opened. */
    uint32_t forked_children;
    /* 1 if setting a limit needs no capability. */
    uint32_t anybody_limits;
    uint64_t link_count;
    /* `misc`: limit that the next group without a limit inherits; 0 for none. */
    uint64_t stale_limit[SIM_MAX_GPUS];
    struct sim_limit limits[SIM_LIMITS];
    struct sim_link links[SIM_LINKS];
    struct sim_event events[SIM_EVENTS];
    struct sim_past past[SIM_PAST];
    struct sim_shared shared[SIM_SHARED];
    struct sim_proc procs[SIM_MAX_PROCS];
    struct sim_gpu gpus[SIM_MAX_GPUS];
};

#endif
