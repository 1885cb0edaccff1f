/* SPDX-License-Identifier: Apache-2.0 */
/* Checks what else a container with a slice of a GPU can see: other containers' processes in NVML, and libraries for
 * graphics and video, whose memory libvgpu does not limit. */
#include "probe.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "loader.h"

/* --- foreign processes in NVML ----------------------------------------------------------------------------------- */

/* Maximum number of processes in a list. */
#define MOST 1024
/* Number of times that the lists are read. A process seems foreign if it starts or ends between the reading of a list
 * and of the ledger, but this does not happen at every reading. */
#define LOOKS 3
#define NAP_NS 100000000

typedef nvmlReturn_t (*by_uuid)(const char *uuid, nvmlDevice_t *device);
typedef nvmlReturn_t (*list_of)(nvmlDevice_t device, unsigned *count, void *processes);
typedef nvmlReturn_t (*samples_of)(nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples, unsigned *count,
                                   unsigned long long since);

struct seen {
    unsigned lists, processes, stranger; /* stranger: the pid of a foreign process, 0 if there is none. */
    const char *where;
    uint64_t bytes; /* Bytes in use on the GPU that are charged to no process of this container. */
};

/* Returns whether a process belongs to the container, by any of its pids in nested namespaces: the ledger has the
 * pid of the process's own namespace. */
static bool is_ours(unsigned pid)
{
    char path[40], line[400];
    bool ours = pid == (unsigned)getpid();
    snprintf(path, sizeof path, "/proc/%u/status", pid);
    FILE *status = ours ? NULL : fopen(path, "re");
    while (status && !ours && fgets(line, sizeof line, status)) {
        if (strncmp(line, "NSpid:", 6) != 0)
            continue;
        for (char *at = line + 6, *end; !ours; at = end) {
            unsigned long name = strtoul(at, &end, 10);
            if (end == at)
                break;
            ours = ledger_has((uint32_t)name);
        }
        break;
    }
    if (status)
        fclose(status);
    return ours;
}

static void judge(struct seen *seen, unsigned pid, const char *where)
{
    if (is_ours(pid))
        return;
    seen->stranger = pid;
    seen->where = where;
}

static void look(void *library, nvmlDevice_t device, const char *uuid, struct seen *seen)
{
    static const struct {
        const char *function;
        size_t entry; /* Size of an entry. An entry begins with the pid. */
    } lists[] = {
        {"nvmlDeviceGetComputeRunningProcesses", sizeof(nvmlProcessInfo_v1_t)},
        {"nvmlDeviceGetComputeRunningProcesses_v2", sizeof(nvmlProcessInfo_t)},
        {"nvmlDeviceGetComputeRunningProcesses_v3", sizeof(nvmlProcessInfo_t)},
        {"nvmlDeviceGetGraphicsRunningProcesses", sizeof(nvmlProcessInfo_v1_t)},
        {"nvmlDeviceGetGraphicsRunningProcesses_v2", sizeof(nvmlProcessInfo_t)},
        {"nvmlDeviceGetGraphicsRunningProcesses_v3", sizeof(nvmlProcessInfo_t)},
        {"nvmlDeviceGetMPSComputeRunningProcesses", sizeof(nvmlProcessInfo_v1_t)},
        {"nvmlDeviceGetMPSComputeRunningProcesses_v2", sizeof(nvmlProcessInfo_t)},
        {"nvmlDeviceGetMPSComputeRunningProcesses_v3", sizeof(nvmlProcessInfo_t)},
    };
    struct nvml_figures figures;
    char *room = calloc(MOST, sizeof(nvmlProcessUtilizationSample_t));
    memset(seen, 0, sizeof *seen);
    for (size_t i = 0; room && i < sizeof lists / sizeof *lists; i++) {
        unsigned count = MOST;
        list_of list = (list_of)dlsym(library, lists[i].function);
        if (!list || list(device, &count, room) != NVML_SUCCESS)
            continue;
        seen->lists++;
        seen->processes = count > seen->processes ? count : seen->processes;
        for (unsigned one = 0; one < count; one++)
            judge(seen, *(unsigned *)(room + one * lists[i].entry), lists[i].function);
    }
    unsigned count = MOST;
    nvmlProcessUtilizationSample_t *samples = (nvmlProcessUtilizationSample_t *)room;
    samples_of list = (samples_of)dlsym(library, "nvmlDeviceGetProcessUtilization");
    if (room && list && list(device, samples, &count, 0) == NVML_SUCCESS) {
        seen->lists++;
        for (unsigned one = 0; one < count; one++)
            judge(seen, samples[one].pid, "nvmlDeviceGetProcessUtilization");
    }
    free(room);
    int64_t charged = nvml_figures(uuid, &figures) ? ledger_all_bytes() : -1;
    if (charged >= 0 && figures.used > (uint64_t)charged)
        seen->bytes = figures.used - (uint64_t)charged;
}

/* Reads the lists with a context of its own, so that each list has an entry. */
static void look_at(const struct fill *fill)
{
    struct result *result = &fill->board->result;
    char reason[200];
    CUcontext context;
    nvmlDevice_t device;
    struct seen seen = {0};
    const struct cuda *cuda = cuda_open(reason, sizeof reason);
    bool there = cuda && cuda->ctx_create(&context, 0, fill->device) == CUDA_SUCCESS;
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    nvmlReturn_t (*init)(void) = library ? (nvmlReturn_t(*)(void))dlsym(library, "nvmlInit_v2") : NULL;
    by_uuid find = library ? (by_uuid)dlsym(library, "nvmlDeviceGetHandleByUUID") : NULL;
    if (!init || !find || init() != NVML_SUCCESS || find(fill->uuid, &device) != NVML_SUCCESS) {
        result_set(result, PASSED, 0, 0, "processes", "%s: NVML is missing or does not show this GPU", fill->uuid);
        return;
    }
    for (int looks = 0; looks < LOOKS; looks++) {
        look(library, device, fill->uuid, &seen);
        if (!seen.stranger && !seen.bytes)
            break;
        nanosleep(&(struct timespec){0, NAP_NS}, NULL);
    }
    if (seen.stranger)
        result_set(result, VIOLATED, 0, 1, "processes", "%s: %s shows process %u, which is not of this container", fill->uuid,
                   seen.where, seen.stranger);
    else if (seen.bytes)
        result_set(result, VIOLATED, 0, seen.bytes, "bytes", "%s: NVML shows these bytes in use, but no process of this container has them",
                   fill->uuid);
    else
        result_set(result, PASSED, 0, 0, "processes", "%s: %u lists of NVML show only the memory and the %u processes of this container%s",
                   fill->uuid, seen.lists, seen.processes, there ? "" : ", which has no context");
}

static void measure_neighbours(const struct fill *fill)
{
    result_set(&fill->board->result, VIOLATED, 0, 0, "processes", "%s: the process that queried NVML was killed", fill->uuid);
    pid_t child = fork();
    if (child == 0) {
        look_at(fill);
        _exit(0);
    }
    waitpid(child, NULL, 0);
}

void check_neighbours(const struct slice *slice, struct board *board)
{
    on_every_device(slice, board, measure_neighbours);
}

/* --- libraries that nothing in the slice limits
 * ---------------------------------------------------------------------- */

#define LOAD_S 10

/* Returns whether a library can be loaded. This is tried in a process without output, because loading a library runs
 * the library's code. */
static bool can_be_loaded(const char *name)
{
    int status = 0;
    pid_t child = fork();
    if (child == 0) {
        int nowhere = open("/dev/null", O_RDWR | O_CLOEXEC);
        alarm(LOAD_S);
        if (nowhere >= 0) {
            dup2(nowhere, STDOUT_FILENO);
            dup2(nowhere, STDERR_FILENO);
        }
        _exit(dlopen(name, RTLD_LAZY | RTLD_LOCAL) ? 0 : 1);
    }
    /* If loading the library killed the process by a signal, the library was found. */
    return child > 0 && waitpid(child, &status, 0) == child && !(WIFEXITED(status) && WEXITSTATUS(status) != 0);
}

void check_graphics(const struct slice *slice, struct board *board)
{
    static const char *const names[] = {
        "libnvcuvid.so.1",      "libnvidia-encode.so.1", "libnvidia-opticalflow.so.1", "libnvoptix.so.1",
        "libGLX_nvidia.so.0",   "libEGL_nvidia.so.0",    "libGLESv2_nvidia.so.2",      "libnvidia-fbc.so.1",
        "libnvidia-ngx.so.1",
    };
    char found[180] = "";
    uint64_t count = 0;
    (void)slice;
    fflush(stdout);
    if (!can_be_loaded("libcuda.so.1")) {
        result_set(&board->result, NOT_RUN, 0, 0, "libraries", "libcuda.so.1 cannot be loaded, so this is not a slice");
        return;
    }
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        size_t length = strlen(found);
        if (can_be_loaded(names[i]) && ++count)
            snprintf(found + length, sizeof found - length, "%s%s", length ? ", " : "", names[i]);
    }
    if (count)
        result_set(&board->result, OPEN, 0, count, "libraries", "%s can be loaded; the memory of these libraries is not charged", found);
    else
        result_set(&board->result, PASSED, 0, 0, "libraries", "no library for graphics or video can be loaded");
}
