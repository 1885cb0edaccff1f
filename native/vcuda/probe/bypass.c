/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tries the bypasses of docs/threat-model.md, by which a tenant could get more memory than its slice of a GPU has. One
 * process fills the slice except for a second context and ROOM bytes. Another process tries a bypass and requests
 * more than is left. If the request is granted, the memory is some MiB beyond the limit and is freed at once, so other
 * containers lose it only for a moment.
 *
 * The tenant of the threat model is root without CAP_SYS_ADMIN and CAP_SYS_PTRACE; the probe itself may run with both.
 */
#include "bypass.h"

#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define ROOM (32 * MIB) /* Free bytes that the process that fills the slice leaves; less than BEYOND. */
#define HOLD_MOST_MS 20000
/* Seconds of the attempt's time that are reserved to restore files after a program had to be killed. */
#define TIDY_S 5
#define CAP_SYS_PTRACE 19
#define CAP_SYS_ADMIN 21
#define EXIT_GRANTED 40 /* Exit statuses of a program that an attempt starts. */
#define EXIT_REFUSED 41
#define EXIT_UNABLE 42

struct bypass {
    way_round attempt;                       /* attempt: NULL means that an ordinary program requests the memory. */
    /* holder: called in the process that holds the slice after it has filled the slice; may be NULL. */
    void (*holder)(const struct fill *fill);
    enum verdict if_granted;                 /* if_granted: OPEN if the threat model lists this bypass as open. */
};

bool slice_is_empty;

enum attempt ask_beyond(const struct cuda *cuda, CUdevice device)
{
    CUcontext context;
    CUdeviceptr pointer;
    /* In a full slice any refusal proves that the limit is enforced, whatever the error code. In an empty slice there
     * is room, so the refusal may come from a full card and proves nothing. */
    if (cuda->ctx_create(&context, 0, device) != CUDA_SUCCESS || cuda->mem_alloc(&pointer, BEYOND) != CUDA_SUCCESS)
        return slice_is_empty ? UNABLE : REFUSED;
    if (slice_is_empty && ledger_own_bytes() >= (int64_t)BEYOND)
        return REFUSED; /* The memory was charged like any other memory, so there was no bypass. */
    hold_what_was_got();
    cuda->mem_free(pointer);
    return GRANTED;
}

void hold_what_was_got(void)
{
    unsigned held = hold_ms < HOLD_MOST_MS ? hold_ms : HOLD_MOST_MS;
    nanosleep(&(struct timespec){held / 1000, (long)(held % 1000) * 1000000}, NULL);
}

enum attempt ask_honestly(const struct fill *fill)
{
    char reason[200];
    const struct cuda *cuda = cuda_open(reason, sizeof reason);
    if (!cuda)
        return cuda_handle() ? REFUSED : UNABLE; /* Without the driver's library the bypass could not be tried. */
    return ask_beyond(cuda, fill->device);
}

int asked_as_program(const char *device, const char *name)
{
    struct fill fill = {.device = atoi(device)};
    prctl(PR_SET_NAME, name, 0, 0, 0);
    enum attempt attempt = ask_honestly(&fill);
    return attempt == GRANTED ? EXIT_GRANTED : attempt == REFUSED ? EXIT_REFUSED : EXIT_UNABLE;
}

#define VARIABLES 256
/* Returns true for an environment variable that names libvgpu's files or determines how libvgpu is loaded.
 * LD_LIBRARY_PATH stays in the environment, because the driver may be found by it. */
static bool is_ours(const char *variable)
{
    static const char *const names[] = {"LD_PRELOAD=", "LD_BIND_NOW=", "CUDA_", "NVIDIA_VISIBLE", "VGPU_", "GPU_CORE_", "ACTIVE_"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strncmp(variable, names[i], strlen(names[i])) == 0)
            return true;
    return false;
}

/* Runs the program that the first argument names, without libvgpu's environment variables and with those of `added`.
 * Both lists end with NULL. */
static enum attempt run_program(const char *const arguments[], const char *const added[])
{
    const char *environment[VARIABLES + 1];
    size_t count = 0;
    int status = 0;
    /* If a variable is given twice, the first one counts. */
    for (; *added && count < VARIABLES; added++)
        environment[count++] = *added;
    for (char **one = environ; *one && count < VARIABLES; one++)
        if (!is_ours(*one))
            environment[count++] = *one;
    environment[count] = NULL;
    pid_t child = fork();
    if (child == 0) {
        sigset_t none;
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, NULL);
        alarm(ATTEMPT_S - TIDY_S);
        execve(arguments[0], (char *const *)arguments, (char *const *)environment);
        _exit(EXIT_UNABLE);
    }
    if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status))
        return UNABLE;
    return WEXITSTATUS(status) == EXIT_GRANTED ? GRANTED : WEXITSTATUS(status) == EXIT_REFUSED ? REFUSED : UNABLE;
}

/* Arguments of the new program: the device, the holding time, and this process's name, which exec would change. */
struct arguments {
    char device[16], held[16], name[17];
    const char *empty;
};

static void tell(struct arguments *to, CUdevice device)
{
    snprintf(to->device, sizeof to->device, "%d", device);
    snprintf(to->held, sizeof to->held, "%u", hold_ms);
    to->empty = slice_is_empty ? "--together" : "--json";
    memset(to->name, 0, sizeof to->name);
    prctl(PR_GET_NAME, to->name, 0, 0, 0);
}

enum attempt ask_as_program(const char *program, const char *const added[], CUdevice device)
{
    struct arguments to;
    tell(&to, device);
    const char *const arguments[] = {program, to.empty, "--hold", to.held, "--beyond", to.device, to.name, NULL};
    return run_program(arguments, added);
}

enum attempt ask_by_loader(const char *loader, const char *program, CUdevice device)
{
    const char *const added[] = {NULL};
    struct arguments to;
    tell(&to, device);
    const char *const arguments[] = {loader, program, to.empty, "--hold", to.held, "--beyond", to.device, to.name, NULL};
    return run_program(arguments, added);
}

bool copy_file(const char *from, const char *to, int mode)
{
    char block[65536];
    ssize_t got = -1;
    int in = open(from, O_RDONLY | O_CLOEXEC);
    int out = in < 0 ? -1 : open(to, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0700);
    while (out >= 0 && (got = read(in, block, sizeof block)) > 0)
        if (write(out, block, (size_t)got) != got) {
            got = -1;
            break;
        }
    bool whole = out >= 0 && got == 0 && fchmod(out, (mode_t)mode) == 0;
    if (in >= 0)
        close(in);
    if (out >= 0)
        close(out);
    if (out >= 0 && !whole)
        unlink(to);
    return whole;
}

const char *scratch_file(const char *name)
{
    static char path[160];
    static const char *const folders[] = {"/tmp", "/dev/shm", "/var/tmp", "."};
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++) {
        snprintf(path, sizeof path, "%s/vgpu-probe-%d-%s", folders[i], (int)getpid(), name);
        int made = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0700);
        if (made < 0)
            continue;
        close(made);
        unlink(path);
        return path;
    }
    return NULL;
}

/* Drops the capabilities from the bounding set, because otherwise a setuid program would get them back. A failure is
 * ignored, because it means that this process does not have these capabilities. */
void become_the_tenant(void)
{
    prctl(PR_CAPBSET_DROP, CAP_SYS_ADMIN, 0, 0, 0);
    prctl(PR_CAPBSET_DROP, CAP_SYS_PTRACE, 0, 0, 0);
}

/* Fills the slice and waits for the other process, at most a minute: the memory must stay allocated while the other
 * process requests more. */
static void hold_all(const struct fill *fill, const struct bypass *bypass)
{
    struct board *board = fill->board;
    char reason[200];
    CUcontext context;
    size_t free_bytes = 0, total = 0;
    const struct cuda *cuda = cuda_open(reason, sizeof reason);
    CUresult status = cuda ? cuda->ctx_create(&context, 0, fill->device) : CUDA_ERROR_NO_DEVICE;
    if (status == CUDA_SUCCESS)
        status = cuda->mem_info(&free_bytes, &total);
    board->status[0] = status;
    if (status == CUDA_SUCCESS) {
        uint64_t left = ROOM + (contexts_count(fill) && total > free_bytes ? total - free_bytes : 0);
        CUdeviceptr pointer;
        /* A slice without room for two contexts is filled completely. */
        if (left < free_bytes && cuda->mem_alloc(&pointer, free_bytes - left) == CUDA_SUCCESS)
            board->granted[0] = free_bytes - left;
        else
            board->granted[0] = take_all(fill, cuda, free_bytes ? free_bytes : 1);
    }
    if (bypass->holder)
        bypass->holder(fill);
    atomic_store(&board->ready, 1);
    wait_for(&board->go, 1);
}

static enum attempt attempted(const struct fill *fill, const struct bypass *bypass)
{
    int status = 0;
    pid_t child = fork();
    if (child == 0) {
        alarm(ATTEMPT_S);
        become_the_tenant();
        _exit((int)(bypass->attempt ? bypass->attempt : ask_honestly)(fill));
    }
    if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status))
        return UNABLE; /* The attempt was killed by a signal, so the bypass got nothing. */
    return (enum attempt)WEXITSTATUS(status);
}

static const struct bypass *current; /* A global variable, because on_every_device passes no argument to `measure`. */

/* Returns true for a bypass that damages the ledger, the container's file of charged memory. Processes that have the
 * file mapped would be killed by the kernel or charged wrongly. */
static bool spoils_the_ledger(const struct bypass *bypass)
{
    return bypass->attempt == empty_the_ledger || bypass->attempt == spoil_the_ledger ||
           bypass->attempt == remove_the_ledger || bypass->attempt == grow_the_ledger || bypass->attempt == boast_in_the_ledger ||
           bypass->holder == lie_in_the_ledger;
}

static void measure_bypass(const struct fill *fill)
{
    struct board *board = fill->board;
    struct result *result = &board->result;
    if (spoils_the_ledger(current) && ledger_in_use()) {
        result_set(result, NOT_RUN, 0, 0, "bytes",
                   "%s: another process of the container uses the ledger and would be harmed; run the check in a slice without other processes",
                   fill->uuid);
        return;
    }
    board->ready = board->go = 0;
    board->status[1] = 0;
    pid_t holder = fork();
    if (holder == 0) {
        hold_all(fill, current);
        _exit(0);
    }
    bool filled = wait_for(&board->ready, 1) && board->status[0] == CUDA_SUCCESS;
    bool holder_able = board->status[1] >= 0;
    /* If the card is full the driver refuses every process, and a refusal proves nothing. */
    bool full_card = atomic_load(&board->card_full) != 0;
    board->card_full = 0;
    enum attempt attempt = filled && !full_card && holder_able ? attempted(fill, current) : UNABLE;
    atomic_store(&board->go, 1);
    waitpid(holder, NULL, 0);
    if (filled && board->granted[0] > fill->limit) {
        result_set(result, VIOLATED, fill->limit, board->granted[0], "bytes", "%s: more memory was granted than the limit", fill->uuid);
        return;
    }
    if (attempt == UNABLE) {
        result_set(result, NOT_RUN, 0, 0, "bytes", "%s: %s", fill->uuid,
                   !filled     ? "the slice could not be filled"
                   : full_card ? "the card has no free memory beyond the slice"
                               : "this bypass cannot be tried here");
        return;
    }
    bool granted = attempt == GRANTED;
    result_set(result, granted ? current->if_granted : PASSED, 0, granted ? BEYOND : 0, "bytes",
               "%s: with the slice full, %llu bytes more were %s", fill->uuid, (unsigned long long)BEYOND,
               granted             ? "granted"
               : attempt == CLOSED ? "not requested: the kernel refuses what the bypass needs"
                                   : "refused");
}

static void run_bypass(const struct slice *slice, struct board *board, const struct bypass *bypass)
{
    current = bypass;
    on_every_device(slice, board, measure_bypass);
}

#define BYPASS(way, name, attempt, holder, if_granted) \
    void check_bypass_##way(const struct slice *slice, struct board *board) \
    { \
        static const struct bypass bypass = {attempt, holder, if_granted}; \
        run_bypass(slice, board, &bypass); \
    }
BYPASSES(BYPASS)
