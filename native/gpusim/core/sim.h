/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The simulated host: one file in shared memory that every process of the host maps (containers too).
 * libcuda.so.1, libnvidia-ml.so.1 and gpusimctl are each linked with these objects; a process that has both
 * libraries therefore has two registrations ("slots"), which is harmless: only libcuda charges memory.
 *
 * Rules for callers
 *   1. sim_attach() first, in every entry point that may be the first (it is cheap when attached, and it is what
 *      gives a forked child a slot of its own).
 *   2. Everything in struct sim_state below the line "guarded by lock" is read and written between sim_lock() and
 *      sim_unlock(). The lock is not recursive. It survives the death of its holder: the next one repairs.
 *   3. Never sleep, call back into user code, or return with the lock held.
 *   4. All time is sim_now() (ns) or sim_wall_us(); all waiting is sim_sleep_until(). Nothing else reads a clock.
 *   5. Before reading memory figures call sim_reap(); before reading utilisation or the run log call sim_advance().
 *      Both want the lock held.
 */
#ifndef GPUSIM_SIM_H
#define GPUSIM_SIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define SIM_MAGIC "GPUSIM01"
#define SIM_VERSION 8u
#define SIM_MAX_GPUS 16
#define SIM_MAX_PROCS 1024
#define SIM_MAX_CHANNELS 512       /* contexts of all processes on one GPU */
#define SIM_QUEUE 1024             /* work items in flight per context; a full queue blocks the launcher */
#define SIM_SAMPLES 128            /* utilisation samples kept; NVML shows the last SIM_SAMPLES_NVML */
#define SIM_SAMPLES_NVML 72        /* the driver's ring: 72 samples in 10 s */
#define SIM_SAMPLE_NS 138888888ull /* 10 s / 72 */
#define SIM_LOG 65536              /* intervals kept per GPU in the run log */
#define SIM_EVENTS 256             /* Xid and ECC events kept, host-wide */
#define SIM_PAST 512               /* totals kept of processes that have ended */
#define SIM_SHARED 256             /* blocks of memory with a shareable handle, host-wide */
#define SIM_LIMITS 256             /* memory limits of control groups, host-wide */
#define SIM_LINKS 512              /* which control group lies in which, as far as a setter saw it */
#define SIM_DEPTH 16               /* control groups from a process's own up to the root */
#define SIM_MAX_GI 8               /* GPU instances of one GPU */
#define SIM_MAX_CI 8               /* compute instances of one GPU instance */
#define SIM_KEY 24
#define SIM_NAME 96
#define SIM_UUID 48

enum sim_status {
    SIM_OK = 0,
    SIM_ERR_NO_PROFILE, /* neither a state file nor a profile: there is no simulated driver on this host */
    SIM_ERR_PROFILE,    /* the profile has a fault; sim_error() has file, line, expected, found */
    SIM_ERR_STATE,      /* the state file is of another version or damaged */
    SIM_ERR_IO,
    SIM_ERR_FULL,   /* no free slot or channel */
    SIM_ERR_MEMORY, /* the GPU is full */
    SIM_ERR_LOST,   /* the GPU has fallen off the bus */
    SIM_ERR_ARGUMENT,
};

/* ---- static facts of a model: models.c ------------------------------------------------------------------- */

struct sim_mig_placement {
    uint8_t start, size;
};

/* One GPU-instance profile of a model (nvidia-smi mig -lgip). Filled in models.c. */
struct sim_mig_profile {
    const char *name;       /* "1g.5gb", "1g.5gb+me", … as nvidia-smi prints it, without the "MIG " */
    uint32_t id;            /* the profile id that nvidia-smi shows and -cgi takes: 19, 20, 14, 9, 5, 0, 15 */
    uint32_t nvml_profile;  /* NVML_GPU_INSTANCE_PROFILE_*: 0 = 1_SLICE, 1 = 2_SLICE, … */
    uint32_t slices;        /* compute slices */
    uint32_t max_instances;
    uint32_t sm_count;
    uint32_t memory_mib;
    uint32_t copy_engines, decoders, encoders, jpegs, ofas;
    uint32_t placement_count;
    struct sim_mig_placement placements[8];
};

enum sim_arch { SIM_PASCAL = 4, SIM_VOLTA = 5, SIM_TURING = 6, SIM_AMPERE = 7, SIM_ADA = 8, SIM_HOPPER = 9 }; /* = NVML_DEVICE_ARCH_* */

struct sim_model {
    const char *key;  /* in profiles: "T4" */
    const char *name; /* what NVML and CUDA print: "Tesla T4" */
    enum sim_arch arch;
    uint32_t memory_mib;  /* NVML's total */
    uint32_t context_mib; /* what one context costs */
    uint32_t sm_count, cores_per_sm, threads_per_sm;
    uint32_t shared_per_sm, shared_per_block_optin; /* bytes */
    uint32_t cc_major, cc_minor;
    uint32_t pci_device_id, pci_subsystem_id; /* device << 16 | vendor, as NVML's pciDeviceId */
    uint32_t brand;                           /* NVML_BRAND_* */
    uint32_t power_limit_mw, idle_power_mw;
    uint32_t clock_sm_mhz, clock_mem_mhz; /* maxima */
    uint32_t bus_width_bits, l2_bytes, bar1_mib;
    uint32_t pcie_gen, copy_engines;
    bool ecc, fan; /* has ECC memory; has a fan of its own */
    const struct sim_mig_profile *mig;
    uint32_t mig_count; /* 0: no MIG */
};

extern const struct sim_model sim_models[];
extern const unsigned sim_model_count;
const struct sim_model *sim_model_find(const char *key); /* NULL if unknown */

/* ---- shared state ------------------------------------------------------------------------------------------ */

struct sim_mig_ci {
    uint32_t used, id; /* compute instance id within its GPU instance */
    uint32_t slices, placement_start;
    uint32_t profile; /* NVML_COMPUTE_INSTANCE_PROFILE_* */
    char uuid[SIM_UUID]; /* MIG-… */
};

struct sim_mig_gi {
    uint32_t used, id;
    uint32_t profile_id; /* sim_mig_profile.id */
    uint32_t placement_start, placement_size;
    uint32_t ci_count;
    struct sim_mig_ci ci[SIM_MAX_CI];
};

/* One sample as the driver's ring has it: utilisation over the period before `time`, and ONE process, the one
 * whose context held the GPU at `time`. slot is -1 where none did; pid is the one seen in that process's own
 * namespace, use sim_proc_pid() on the slot while serial still matches. */
struct sim_sample {
    uint64_t time;   /* sim_now() scale */
    uint64_t serial; /* sim_proc.serial */
    int32_t slot;
    int32_t pid;
    uint32_t sm_util;  /* 1/10000 of the period during which kernels ran */
    uint32_t mem_util; /* 1/10000 of the period during which memory was read or written (modelled: half of sm_util) */
};

enum sim_run { SIM_RUN_KERNEL = 1, SIM_RUN_SWITCH = 2 };

/* What the GPU did from start to end; neighbouring intervals of one context are merged. */
struct sim_interval {
    uint64_t start, end, serial;
    int32_t pid;
    uint16_t kind, channel;
};

enum sim_work_kind {
    SIM_WORK_KERNEL = 1, /* needs the GPU: runs only while its context holds the slice */
    SIM_WORK_COPY,       /* copy engine: concurrent with kernels, for cost ns from the moment its stream reaches it */
    SIM_WORK_MARK,       /* event record: completes when its stream reaches it */
    SIM_WORK_WAIT,       /* completes when item dep_seq of channel dep_channel is done */
    SIM_WORK_HOST,       /* completes when the owner says so: sim_work_release() */
};

#define SIM_STREAM_LEGACY 0u
#define SIM_STREAM_NONBLOCKING 0x80000000u /* flag in sim_work.stream: no order with the legacy stream */
#define SIM_COST_FOREVER (UINT64_MAX / 4)

struct sim_work {
    uint64_t seq;       /* set by sim_submit() */
    uint64_t remaining; /* ns of exclusive time still needed */
    uint64_t finish;    /* sim_now() scale, valid when done */
    uint64_t start;     /* when it first ran */
    uint64_t dep_seq;
    uint64_t tag; /* the owner's own; handed back when the entry is overwritten */
    uint32_t stream;
    uint16_t sms;
    uint16_t dep_channel;
    uint8_t kind, done, dep_gpu, started;
    uint32_t pad;
};

/* A context on a GPU. Items head … tail-1 are queued; an item at ring[seq % SIM_QUEUE]. */
struct sim_channel {
    uint32_t used;
    int32_t slot;
    uint64_t serial; /* of the process */
    uint64_t head, tail;
    uint64_t busy_ns;
    uint32_t nonblocking, pad; /* some item was of a non-blocking stream */
    struct sim_work ring[SIM_QUEUE];
};

/* Memory and time of one process on one GPU. The three kinds of bytes are the truth of the accounting; sim_gpu.used
 * is only their sum and is computed again from them when the lock's holder died. */
struct sim_usage {
    uint64_t memory;  /* allocations */
    uint64_t context; /* contexts */
    uint64_t module;  /* code and globals */
    uint64_t peak;    /* of the sum */
    uint64_t busy_ns; /* GPU time that its kernels really got */
    uint64_t kernels; /* launches finished */
    uint64_t since;   /* sim_now() of the first context */
    uint64_t managed; /* of memory: managed memory on the GPU, which no control group is charged for */
    uint64_t uncounted; /* of the other bytes: those that no control group is charged for (groups.c) */
    uint32_t contexts;
    uint32_t instance; /* MIG: (GPU instance's place << 8 | compute instance's) + 1; a process runs in one at most. 0: none */
};

enum sim_role { SIM_ROLE_NONE = 0, SIM_ROLE_CUDA, SIM_ROLE_NVML, SIM_ROLE_TOOL };

struct sim_proc {
    uint32_t generation; /* counts the uses of this slot; part of the lock's owner word */
    uint32_t role;       /* SIM_ROLE_NONE: free */
    uint64_t serial;     /* host-wide number of this registration, never used again */
    uint64_t start_wall_us;
    int32_t pid; /* in the process's own PID namespace: see sim_proc_pid() */
    uint32_t reserved;
    uint64_t wait_target; /* virtual clock: what it waits for; UINT64_MAX: it runs */
    uint64_t creator; /* serial of the process that opened the driver: of itself or, after a fork, of an ancestor */
    uint64_t groups[SIM_DEPTH]; /* inodes of its control groups, its own first, as it sees them; 0 ends the list */
    char comm[16];
    struct sim_usage use[SIM_MAX_GPUS];
};

/* Totals of a process that has ended. */
struct sim_past {
    uint64_t serial;
    int32_t pid, gpu;
    struct sim_usage use; /* bytes are 0, peak/busy_ns/kernels/since count */
    uint64_t end;
};

/* Memory with a shareable handle: shared.c. */
struct sim_shared {
    uint32_t used;
    int32_t gpu;
    uint64_t serial; /* of its maker; 0: that holds it no longer, and no process is charged */
    uint64_t bytes, offset;
    int32_t pid, fd; /* of the maker's memory file; -1: a pool, of which nothing is mapped */
    uint64_t groups[SIM_DEPTH]; /* of the maker, who is charged for as long as anybody has it */
};

/* Limits of video memory that the driver enforces for control groups, from branch 615 on: groups.c. */
enum sim_memacct { SIM_MEMACCT_NONE = 0, SIM_MEMACCT_MISC, SIM_MEMACCT_DMEM };
#define SIM_UNLIMITED UINT64_MAX

struct sim_limit {
    uint64_t group; /* inode of the control group; 0: free */
    uint64_t soft, hard; /* bytes */
    uint32_t gpu;
    uint32_t idle; /* its controller is off in this group: the driver charges an ancestor instead */
    char path[SIM_NAME * 2]; /* as its setter named it */
};

struct sim_link {
    uint64_t group, parent;
};

enum sim_event_kind { SIM_EVENT_XID = 1, SIM_EVENT_ECC_SINGLE, SIM_EVENT_ECC_DOUBLE };

struct sim_event {
    uint64_t number; /* 1, 2, 3 …: readers remember the last one they saw */
    uint64_t time;
    uint32_t gpu, kind;
    uint64_t data; /* the Xid, or the count of errors */
};

struct sim_gpu {
    /* set by the profile, constant afterwards */
    char model[SIM_KEY];
    char name[SIM_NAME];
    char uuid[SIM_UUID];
    char serial_number[SIM_KEY];
    uint32_t pci_domain, pci_bus, pci_device;
    uint32_t minor; /* /dev/nvidia<minor> */
    uint64_t total; /* bytes, NVML's total */
    uint64_t reserved_bytes; /* held by the driver itself */
    uint64_t context_bytes;
    uint64_t numa_node; /* that its memory is for the host, 0: none */
    uint32_t sm_count, cc_major, cc_minor, arch;

    /* guarded by lock */
    uint64_t used; /* bytes: sum over the processes, reserved_bytes not included */
    uint32_t lost; /* fallen off the bus */
    uint32_t ecc_mode, ecc_pending;
    uint64_t ecc_single[2], ecc_double[2]; /* [0] volatile, [1] aggregate */
    uint32_t compute_mode;                 /* NVML_COMPUTEMODE_*: 0 default, 2 prohibited, 3 exclusive process */
    uint32_t persistence;
    uint32_t accounting;
    uint32_t time_slice; /* 0 default, 1 short, 2 medium, 3 long: scales slice_ns, see sim_slice_ns() */
    uint32_t power_limit_mw;
    uint32_t mig_mode, mig_pending;
    struct sim_mig_gi gi[SIM_MAX_GI];

    /* the engine (engine.c) */
    uint64_t simulated; /* the GPU's past is decided up to here */
    uint64_t random;
    int32_t holder;        /* channel that holds the GPU, -1: none yet */
    uint64_t slice_end;    /* of the holder */
    uint64_t switch_until; /* the holder's state is being loaded until then */
    uint64_t busy_ns, switch_ns, switches;
    uint64_t sample_next, sample_busy; /* end of the current period; busy ns in it */
    uint64_t sample_count;             /* samples ever taken; the newest is samples[(sample_count - 1) % SIM_SAMPLES] */
    uint64_t log_count;                /* intervals ever begun */
    uint32_t channel_count;            /* channels ever used: the engine scans no further */
    struct sim_sample samples[SIM_SAMPLES];
    struct sim_interval log[SIM_LOG];
    struct sim_channel channels[SIM_MAX_CHANNELS];
};

/* What a driver may do and a polite one does not: the profile's key `hostile`. */
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
    char magic[8]; /* written last: a file without it is initialised again */
    uint32_t version;
    uint32_t pad;
    uint64_t size; /* sizeof(struct sim_state) */

    _Atomic uint32_t lock;      /* 0 free, else owner word: see lock.c */
    _Atomic uint32_t clock_seq; /* futex, bumped when virtual time moves */
    _Atomic uint64_t clock_now; /* virtual time */
    _Atomic uint32_t clock_mode;
    _Atomic uint32_t event_seq; /* futex: bumped with every sim_event; wait with sim_event_wait() */

    /* set by the profile */
    char driver_version[32]; /* "535.261.03" */
    uint32_t cuda_version;   /* 12020 */
    uint32_t gpu_count;
    uint32_t device_nodes_required;
    uint32_t hostile;              /* enum sim_hostile */
    uint32_t jitter_permille;      /* kernels take cost * (1 ± jitter) */
    uint64_t slice_ns, switch_ns;  /* time slice of a context; cost of changing the context */
    uint64_t granularity;          /* allocations are charged in multiples of this; 1 = to the byte */
    uint64_t copy_bytes_per_ms;    /* host <-> device */
    uint64_t boot_wall_us;         /* wall clock at sim_now() == boot_now */
    uint64_t boot_now;
    uint64_t epoch; /* counts resets */
    _Atomic uint64_t late_calls; /* that met a driver whose teardown had begun */
    uint32_t memacct;            /* enum sim_memacct */
    uint32_t controllers_required; /* a group's limit needs its controller to be on in that group */
    uint32_t lowers_below_use;     /* dmem: the kernel takes a limit below what is in use */
    char cgroup_root[SIM_NAME];

    /* guarded by lock */
    uint32_t nvml_fail; /* nvmlInit must fail with NVML_ERROR_DRIVER_NOT_LOADED */
    uint32_t proc_high; /* slots ever used: scans stop there */
    uint64_t next_serial;
    uint64_t repairs; /* how often the lock's holder was found dead */
    uint64_t event_count;
    uint64_t past_count;
    uint64_t last_reap;
    uint32_t drop_next_limit;  /* the next set is answered with success and not applied */
    uint32_t dead_creators;    /* what is asked for in the name of a dead process is granted */
    uint32_t forked_children;  /* a forked child may go on with the driver that its parent opened */
    uint32_t anybody_limits;   /* a set asks for no capability */
    uint64_t link_count;
    uint64_t stale_limit[SIM_MAX_GPUS]; /* misc: what the next group inherits that has no limit; 0: nothing */
    struct sim_limit limits[SIM_LIMITS];
    struct sim_link links[SIM_LINKS];
    struct sim_event events[SIM_EVENTS];
    struct sim_past past[SIM_PAST];
    struct sim_shared shared[SIM_SHARED];
    struct sim_proc procs[SIM_MAX_PROCS];
    struct sim_gpu gpus[SIM_MAX_GPUS];
};

/* ---- opening (state.c) ------------------------------------------------------------------------------------- */

/* Maps the state (making it from the profile if this is the first process of the host) and registers this process.
 * Thread-safe, idempotent. In a forked child it registers the child. */
enum sim_status sim_attach(enum sim_role role);
/* Frees what this process holds and gives the slot back; the mapping stays. A process that dies needs no detach. */
void sim_detach(void);
struct sim_state *sim_state(void); /* NULL before sim_attach */
int sim_slot(void);                /* this process's slot, -1 before sim_attach or in a forked child */
unsigned sim_forks(void);          /* counts forks that this process is the child of, after attaching */
const char *sim_error(void);       /* the last failure of this thread as one sentence */
void sim_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Host's files: GPUSIM_STATE, GPUSIM_PROFILE or their defaults. */
const char *sim_state_path(void);
const char *sim_profile_path(void);

/* Rereads the profile into the mapped state; keeps live processes. Used by gpusimctl reset. */
enum sim_status sim_reset(bool force);

/* Is GPU i there for this process? (device_nodes = require: /dev/nvidia<minor> exists.) Needs no lock. */
bool sim_gpu_visible(int gpu);

/* ---- lock and processes (lock.c, process.c) ---------------------------------------------------------------- */

void sim_lock(void);
void sim_unlock(void);
/* Frees everything that dead processes hold. Lock held. Costs one system call per live other process. */
void sim_reap(void);
/* A process's pid as the caller's PID namespace sees it; 0: not visible from here (as the driver does, such a
 * process is left out of lists). Lock held. */
pid_t sim_proc_pid(int slot);
/* Bytes of a process on a GPU, all kinds. */
uint64_t sim_usage_bytes(const struct sim_usage *use);

/* ---- memory (memory.c) -------------------------------------------------------------------------------------- */

enum sim_kind { SIM_MEMORY, SIM_CONTEXT, SIM_MODULE, SIM_MANAGED };
/* Take the lock themselves. Charge answers SIM_OK, SIM_ERR_MEMORY or SIM_ERR_LOST. */
enum sim_status sim_charge(int gpu, enum sim_kind kind, uint64_t bytes);
void sim_uncharge(int gpu, enum sim_kind kind, uint64_t bytes);
void sim_memory_info(int gpu, uint64_t *free_bytes, uint64_t *total_bytes); /* reaps first; of the instance in use */
/* MIG: from now on this process charges what it takes of the GPU within that instance, whose memory bounds it. */
void sim_use_instance(int gpu, int gi, int ci);
/* Lock held: what is in use of a GPU instance, and what it has. */
uint64_t sim_instance_used(int gpu, int gi);
uint64_t sim_instance_total(int gpu, int gi);

/* ---- memory limits of control groups (groups.c) ------------------------------------------------------------------ */

enum sim_group_answer {
    SIM_GROUP_OK = 0,
    SIM_GROUP_ARGUMENT,    /* soft above hard, or a limit above what the GPU has */
    SIM_GROUP_UNSUPPORTED, /* no backend, the root group, MIG; misc, get: neither the group nor an ancestor has one */
    SIM_GROUP_NOT_FOUND,   /* dmem: the group has no such controller */
    SIM_GROUP_PATH,        /* it cannot be opened */
    SIM_GROUP_REFUSED,     /* it is no control group; misc: a limit below what is in use */
};
/* Paths are those of a group's folder, as the caller sees it. Both take the lock themselves. */
enum sim_group_answer sim_group_set(int gpu, const char *path, uint64_t soft, uint64_t hard);
enum sim_group_answer sim_group_get(int gpu, const char *path, struct sim_limit *limit, uint64_t *used);
/* The rest wants the lock held. */
uint64_t sim_group_used(const struct sim_limit *limit);
void sim_group_forget(void); /* all limits, as a reload of the driver does */

/* ---- memory with a shareable handle (shared.c) --------------------------------------------------------------- */

int sim_shared_new(const struct sim_shared *what); /* of this process; an index, -1: no room */
void sim_shared_resize(int index, uint64_t bytes); /* a pool has grown or shrunk */
int sim_shared_handle(int index);                  /* a descriptor that stands for it, -1 */
int sim_shared_find(int handle, struct sim_shared *what); /* -1: no such descriptor */
/* Keeps it alive until dropped, or until this process ends (a child does not). NULL: not possible. */
void *sim_shared_import(int index);
void sim_shared_drop(void *hold);
/* Its maker, who charged it, lets go. True: others have it, it is off the maker's account and still on the card. */
bool sim_shared_release(int index);
/* Bytes of a GPU that nobody is charged for, lock held; reap: what nobody has any more is given back first. */
uint64_t sim_shared_orphans(int gpu, bool reap);

/* ---- time (clock.c) ------------------------------------------------------------------------------------------ */

uint64_t sim_now(void);
uint64_t sim_wall_us(uint64_t now); /* microseconds since 1970 of a sim_now() value */
void sim_sleep_until(uint64_t when);
void sim_clock_set(enum sim_clock mode);
void sim_clock_advance(uint64_t ns);

/* ---- the engine (engine.c) ------------------------------------------------------------------------------------ */

/* Decides what the GPU did up to now. Lock held. */
void sim_advance(int gpu, uint64_t now);
uint64_t sim_slice_ns(int gpu);
/* The rest takes the lock itself. */
int sim_channel_open(int gpu); /* channel number, or -1 with sim_error() */
void sim_channel_close(int gpu, int channel);
/* Queues a copy of *work; blocks while the queue is full. overwritten, where not NULL, receives the entry that gave way
 * (its tag and finish). Answers the sequence number, 0 if the GPU is lost. */
uint64_t sim_submit(int gpu, int channel, const struct sim_work *work, struct sim_work *overwritten);
/* Done? finish (may be NULL) gets the time where the entry is still in the ring, else 0. */
bool sim_work_done(int gpu, int channel, uint64_t seq, uint64_t *finish);
bool sim_work_reached(int gpu, int channel, uint64_t seq); /* all before it in its stream is done */
void sim_work_release(int gpu, int channel, uint64_t seq); /* ends a SIM_WORK_HOST item */
/* Blocks until done; false if the GPU is lost meanwhile. */
bool sim_work_wait(int gpu, int channel, uint64_t seq, uint64_t *finish);
bool sim_channel_wait(int gpu, int channel); /* until empty */
bool sim_channel_idle(int gpu, int channel);

/* ---- faults (faults.c) ----------------------------------------------------------------------------------------- */

/* Lock held. */
void sim_event_add(int gpu, enum sim_event_kind kind, uint64_t data);
void sim_gpu_lose(int gpu);    /* it falls off the bus: its contexts are broken for good */
void sim_gpu_recover(int gpu); /* it is back, for new contexts */
/* Lock NOT held. Waits until event_seq differs from seen or timeout_ms has passed. */
void sim_event_wait(uint32_t seen, unsigned timeout_ms);

#endif
