/* SPDX-License-Identifier: Apache-2.0 */
/* Opens the state file of the simulated host, creates it from the profile if needed, and registers the process in
 * it. */
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define DEFAULT_STATE "/dev/shm/gpusim.state"
#define DEFAULT_PROFILE "/etc/gpusim/host.profile"
/* This byte, far past the end of the file, is locked while the file is created. */
#define INIT_BYTE ((off_t)0x6000000000)

struct sim_self sim_self = {.slot = -1, .fd = -1};

static pthread_mutex_t attach_mutex = PTHREAD_MUTEX_INITIALIZER;
static __thread char error_text[512];

void sim_fail(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error_text, sizeof error_text, format, arguments);
    va_end(arguments);
}

const char *sim_error(void)
{
    return error_text;
}

struct sim_state *sim_state(void)
{
    return sim_self.state;
}

int sim_slot(void)
{
    return atomic_load_explicit(&sim_self.slot, memory_order_relaxed);
}

unsigned sim_forks(void)
{
    return atomic_load_explicit(&sim_self.forks, memory_order_relaxed);
}

static const char *environment(const char *name, const char *fallback)
{
    const char *value = getenv(name);
    return value && *value ? value : fallback;
}

const char *sim_state_path(void)
{
    return environment("GPUSIM_STATE", DEFAULT_STATE);
}

const char *sim_profile_path(void)
{
    return environment("GPUSIM_PROFILE", DEFAULT_PROFILE);
}

bool sim_gpu_visible(int gpu)
{
    const struct sim_state *state = sim_self.state;
    char node[32];
    struct stat info;
    if (!state->device_nodes_required)
        return true;
    snprintf(node, sizeof node, "/dev/nvidia%u", state->gpus[gpu].minor);
    return stat(node, &info) == 0;
}

static bool region_lock(int fd, short type)
{
    struct flock region = {.l_type = type, .l_whence = SEEK_SET, .l_start = INIT_BYTE, .l_len = 1};
    int result;
    do
        result = fcntl(fd, F_OFD_SETLKW, &region);
    while (result < 0 && errno == EINTR);
    return result == 0;
}

/* A forked child inherits the descriptor that keeps the lock of its parent's slot, so the child must close the
 * descriptor. */
static void after_fork(void)
{
    if (sim_self.fd >= 0)
        close(sim_self.fd);
    sim_self.fd = -1;
    atomic_store(&sim_self.slot, -1);
    atomic_fetch_add(&sim_self.forks, 1);
    pthread_mutex_init(&attach_mutex, NULL);
}

static int open_file(const char *path)
{
    /* The first try is without O_CREAT, because in a sticky directory the kernel refuses O_CREAT on another user's
     * existing file. */
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT && access(sim_profile_path(), R_OK) == 0) {
        fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
        if (fd >= 0)
            fchmod(fd, 0666); /* containers and other users share the file, so the umask must not restrict it */
    }
    return fd;
}

static enum sim_status initialise(struct sim_state *state)
{
    struct sim_config config;
    struct timespec wall;
    enum sim_status status = sim_profile_read(sim_profile_path(), &config);
    if (status != SIM_OK)
        return status;
    sim_self.state = state;
    state->version = SIM_VERSION;
    state->size = sizeof *state;
    state->next_serial = 1;
    atomic_store(&state->lock, 0);
    atomic_store(&state->clock_mode, SIM_CLOCK_REAL);
    state->boot_now = sim_now();
    clock_gettime(CLOCK_REALTIME, &wall);
    state->boot_wall_us = (uint64_t)wall.tv_sec * 1000000u + (uint64_t)wall.tv_nsec / 1000u;
    /* The clock is stopped while the engines start, so all of them start at the same instant. */
    atomic_store(&state->clock_now, state->boot_now);
    atomic_store(&state->clock_mode, SIM_CLOCK_MANUAL);
    sim_profile_apply(&config, state);
    atomic_store(&state->clock_mode, config.clock);
    atomic_thread_fence(memory_order_release);
    memcpy(state->magic, SIM_MAGIC, sizeof state->magic);
    return SIM_OK;
}

/* True if this build wrote the file. True also for an empty magic: a process died while it created the file, so the
 * caller creates the file again. */
static bool version_fits(int fd, off_t size)
{
    struct {
        char magic[8];
        uint32_t version, pad;
        uint64_t size;
    } head;
    static const char none[8];
    if (size != (off_t)sizeof(struct sim_state) || pread(fd, &head, sizeof head, 0) != (ssize_t)sizeof head)
        return false;
    if (memcmp(head.magic, none, sizeof none) == 0)
        return true;
    return memcmp(head.magic, SIM_MAGIC, sizeof head.magic) == 0 && head.version == SIM_VERSION && head.size == (uint64_t)size;
}

static enum sim_status map_file(const char *path, int fd)
{
    struct stat info;
    enum sim_status status = SIM_OK;
    if (!region_lock(fd, F_WRLCK) || fstat(fd, &info) < 0) {
        sim_fail("%s: cannot lock the state of the simulated host: %s", path, strerror(errno));
        return SIM_ERR_IO;
    }
    bool stale = info.st_size != 0 && !version_fits(fd, info.st_size);
    if (stale && !sim_anyone_alive(fd) && ftruncate(fd, 0) == 0) {
        stale = false; /* The file is left from another build and no process uses it, so it is created again. */
        info.st_size = 0;
    }
    if (stale) {
        sim_fail("%s: expected a state of version %u (%zu bytes), found another (%lld bytes) that live processes use; end "
                 "them, then the next process makes a new file",
                 path, SIM_VERSION, sizeof(struct sim_state), (long long)info.st_size);
        status = SIM_ERR_STATE;
    } else if (info.st_size == 0 && ftruncate(fd, sizeof(struct sim_state)) < 0) {
        sim_fail("%s: cannot size the state file: %s", path, strerror(errno));
        status = SIM_ERR_IO;
    }
    struct sim_state *state = MAP_FAILED;
    if (status == SIM_OK) {
        state = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
        if (state == MAP_FAILED) {
            sim_fail("%s: cannot map the state file: %s", path, strerror(errno));
            status = SIM_ERR_IO;
        }
    }
    if (status == SIM_OK && memcmp(state->magic, SIM_MAGIC, sizeof state->magic) != 0)
        status = initialise(state);
    region_lock(fd, F_UNLCK);
    sim_self.state = status == SIM_OK ? state : NULL;
    if (status != SIM_OK && state != MAP_FAILED)
        munmap(state, sizeof *state);
    return status;
}

/* Maps the state through an open file description of its own. A mapping keeps its description open, and a forked child
 * inherits the mapping. If the locks belonged to the same description, the child would keep its parent's locks and
 * slot. */
static enum sim_status map_state(const char *path, int lock_fd)
{
    struct stat one, other;
    int fd = open_file(path);
    if (fd < 0 || fstat(fd, &one) < 0 || fstat(lock_fd, &other) < 0 || one.st_ino != other.st_ino) {
        sim_fail("%s: the state file was replaced while it was opened: %s; try again", path, strerror(errno));
        if (fd >= 0)
            close(fd);
        return SIM_ERR_IO;
    }
    /* The descriptor stays open: closing any descriptor of the file drops this process's POSIX locks (process.c). */
    return map_file(path, fd);
}

static enum sim_status attach_locked(enum sim_role role)
{
    static bool fork_handler;
    const char *path = sim_state_path();
    int fd = sim_self.fd >= 0 ? sim_self.fd : open_file(path); /* sim_detach() leaves this descriptor open. */
    if (fd < 0) {
        sim_fail("%s: cannot open the state of the simulated host: %s; there must be a profile at %s (GPUSIM_PROFILE)",
                 path, strerror(errno), sim_profile_path());
        return errno == ENOENT ? SIM_ERR_NO_PROFILE : SIM_ERR_IO;
    }
    enum sim_status status = SIM_OK;
    if (!sim_self.state)
        status = map_state(path, fd);
    if (status == SIM_OK) {
        if (!fork_handler)
            fork_handler = pthread_atfork(NULL, NULL, after_fork) == 0;
        sim_self.fd = fd;
        status = sim_register(role);
    }
    if (status != SIM_OK) {
        close(fd);
        sim_self.fd = -1;
    }
    return status;
}

enum sim_status sim_attach(enum sim_role role)
{
    if (atomic_load_explicit(&sim_self.slot, memory_order_acquire) >= 0)
        return SIM_OK;
    enum sim_status status = SIM_OK;
    pthread_mutex_lock(&attach_mutex);
    if (atomic_load(&sim_self.slot) < 0)
        status = attach_locked(role);
    pthread_mutex_unlock(&attach_mutex);
    return status;
}

enum sim_status sim_reset(bool force)
{
    struct sim_state *state = sim_self.state;
    struct sim_config config;
    enum sim_status status = sim_profile_read(sim_profile_path(), &config);
    if (status != SIM_OK)
        return status;
    sim_lock();
    sim_reap();
    for (uint32_t slot = 0; slot < state->proc_high && !force; slot++)
        for (uint32_t gpu = 0; gpu < state->gpu_count; gpu++)
            if (state->procs[slot].role == SIM_ROLE_CUDA && state->procs[slot].use[gpu].contexts) {
                sim_fail("reset: expected no process with a context, found pid %d on GPU %u; end it or pass --force",
                         state->procs[slot].pid, gpu);
                status = SIM_ERR_ARGUMENT;
            }
    if (status == SIM_OK) {
        atomic_store(&state->clock_mode, SIM_CLOCK_REAL); /* All engines restart at the same instant of real time. */
        atomic_store(&state->clock_now, sim_now());
        atomic_store(&state->clock_mode, SIM_CLOCK_MANUAL);
        sim_profile_apply(&config, state);
        state->epoch++;
        atomic_store(&state->clock_mode, config.clock);
    }
    sim_unlock();
    return status;
}
