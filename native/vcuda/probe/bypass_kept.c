/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tests a slice's memory limit with memory that exists after its release because another process keeps it
 * (kept_ways.c). The first process creates the memory. The second imports it, fills the slice, and requests more memory
 * twice: after the first process releases a piece, and after that process ends. A grant is a bypass only while the card
 * still has the piece, so the second process reads a word that it wrote there. If a driver gives no address, the handle
 * is assumed to keep the memory.
 */
#include "bypass.h"
#include "kept.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define ROOM (32 * MIB) /* ROOM: bytes that stay free in a full slice, because the driver rounds requests up. */
#define STEP (32 * MIB) /* STEP: the largest step by which a driver's pool grows. */
#define DEAD_NS 150000000 /* DEAD_NS: within this time the library checks for dead processes at least once. */

/* The second process requests memory at two stages: after the exporting process has released a piece of memory, and
 * after that process has ended. Each stage has its own piece. */
enum { RELEASED, LEFT, STAGES };

static int first_stage(const struct kept *way)
{
    return way->let_go ? RELEASED : LEFT;
}

static int last_stage(const struct kept *way)
{
    return way->take ? LEFT : RELEASED;
}

static const struct cuda *cuda;

/* --- the exporting process ----------------------------------------------------------------------------------- */

static bool tell(int channel, const struct note *note, int descriptor)
{
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct note copy = *note;
    struct iovec part = {&copy, sizeof copy};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (descriptor >= 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof control.bytes;
        control.header = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
        memcpy(CMSG_DATA(&control.header), &descriptor, sizeof descriptor);
    }
    return sendmsg(channel, &message, MSG_NOSIGNAL) == (ssize_t)sizeof copy;
}

static CUresult begin(const struct fill *fill)
{
    char reason[200];
    CUcontext context;
    alarm(ATTEMPT_S);
    become_the_tenant();
    cuda = cuda_open(reason, sizeof reason);
    if (!cuda)
        return CUDA_ERROR_NO_DEVICE;
    kept_begin(cuda, fill->device);
    return cuda->ctx_create(&context, 0, fill->device);
}

static void make(const struct fill *fill, const struct kept *way, int channel)
{
    struct piece pieces[STAGES] = {{.descriptor = -1}, {.descriptor = -1}};
    struct note notes[STAGES] = {0};
    CUresult status = begin(fill);
    int64_t context = ledger_own_bytes();
    uint64_t bytes = ((context > 0 ? (uint64_t)context : 0) + 2 * BEYOND + STEP - 1) / STEP * STEP, made = 0;
    for (int i = first_stage(way); i <= last_stage(way) && status == CUDA_SUCCESS; i++, made += bytes) {
        pieces[i].bytes = notes[i].bytes = bytes;
        status = way->make(&pieces[i], &notes[i]);
    }
    int64_t all = ledger_own_bytes();
    for (int i = first_stage(way); i <= last_stage(way); i++) {
        notes[i].context = all > (int64_t)made ? (uint64_t)all - made : 0;
        notes[i].status = status;
        if (!tell(channel, &notes[i], pieces[i].descriptor))
            return;
    }
    if (status == CUDA_SUCCESS && way->let_go && wait_for(&fill->board->go, 1)) {
        fill->board->status[RELEASED] = way->let_go(&pieces[RELEASED]);
        atomic_store(&fill->board->done, 1);
    }
    wait_for(&fill->board->go, 2);
}

/* --- the importing process -------------------------------------------------------------------------------------- */

static bool hear(int channel, struct note *note, int *descriptor)
{
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec part = {note, sizeof *note};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    if (recvmsg(channel, &message, MSG_CMSG_CLOEXEC) != (ssize_t)sizeof *note)
        return false;
    *descriptor = -1;
    if (message.msg_controllen >= sizeof(struct cmsghdr) && control.header.cmsg_type == SCM_RIGHTS)
        memcpy(descriptor, CMSG_DATA(&control.header), sizeof *descriptor);
    return true;
}

/* Fills the slice except for ROOM. Returns false if the card has less free memory than the slice, because then a
 * refusal proves nothing. */
static bool fill_up(const struct fill *fill)
{
    struct nvml_figures figures;
    size_t free_bytes = 0, total = 0;
    CUdeviceptr pointer;
    if (cuda->mem_info(&free_bytes, &total) != CUDA_SUCCESS)
        return false;
    if (nvml_figures(fill->uuid, &figures) && figures.total - figures.used > free_bytes + ROOM)
        return false;
    return free_bytes <= ROOM || cuda->mem_alloc(&pointer, free_bytes - ROOM) == CUDA_SUCCESS;
}

/* Returns whether the slice grants more than its limit. A grant does not count if the kept piece has left the card
 * meanwhile. */
static bool ask(uint64_t bytes, const struct piece *piece, bool *given_back)
{
    CUdeviceptr pointer;
    CUresult status = cuda->mem_alloc(&pointer, bytes);
    if (status != CUDA_SUCCESS) {
        nanosleep(&(struct timespec){0, DEAD_NS}, NULL);
        status = cuda->mem_alloc(&pointer, bytes);
    }
    if (status != CUDA_SUCCESS)
        return false;
    bool kept = kept_lives(piece);
    *given_back = *given_back || !kept;
    cuda->mem_free(pointer);
    return kept;
}

static const char *take(const struct kept *way, struct piece *piece, struct note *note, int channel, CUresult *status)
{
    if (!hear(channel, note, &piece->descriptor))
        return "the exporting process has ended";
    if ((*status = note->status) != CUDA_SUCCESS)
        return "the memory could not be exported";
    piece->bytes = note->bytes;
    if (way->take && (*status = way->take(piece, note)) != CUDA_SUCCESS)
        return "the memory could not be imported";
    return kept_write(piece) ? NULL : "the memory cannot be read";
}

static void take_and_ask(const struct fill *fill, const struct kept *way, int channel)
{
    struct board *board = fill->board;
    struct result *result = &board->result;
    struct piece pieces[STAGES] = {{.descriptor = -1}, {.descriptor = -1}};
    struct note note = {0};
    bool given_back = false, beyond = false;
    uint64_t asked = 0;
    CUresult status = begin(fill);
    const char *why = status == CUDA_SUCCESS ? NULL : "no context could be created", *how = NULL;
    size_t free_bytes, total = 0;
    if (why || cuda->mem_info(&free_bytes, &total) != CUDA_SUCCESS)
        total = 0;
    for (int i = first_stage(way); i <= last_stage(way) && !why; i++)
        why = take(way, &pieces[i], &note, channel, &status);
    if (status == NO_FUNCTION) {
        result_set(result, PASSED, 0, 0, "bytes", "%s: not tried: this driver does not have the functions", fill->uuid);
        return;
    }
    for (int stage = first_stage(way); stage <= last_stage(way) && !why && !beyond; stage++) {
        how = stage == RELEASED ? "was released" : "lost its exporting process, which ended";
        asked = BEYOND + (stage == RELEASED ? 0 : note.context);
        if (!fill_up(fill)) {
            why = "the slice could not be filled, or the card is full";
            break;
        }
        atomic_store(&board->go, stage + 1);
        if (!wait_for(&board->done, stage + 1) || (status = board->status[RELEASED]) != CUDA_SUCCESS)
            why = "the memory could not be released";
        else
            beyond = ask(asked, &pieces[stage], &given_back);
    }
    if (why)
        result_set(result, NOT_RUN, 0, 0, "bytes", "%s: %s: %s (%d)", fill->uuid, way->what, why, status);
    else if (beyond)
        result_set(result, VIOLATED, 0, asked, "bytes", "%s: %s %s: with the slice full, %llu bytes more were granted", fill->uuid,
                   way->what, how, (unsigned long long)asked);
    else if (total > fill->limit) /* The shown memory exceeds the limit, so a refusal proves nothing. */
        result_set(result, VIOLATED, fill->limit, total, "bytes", "%s: more memory was granted than the limit", fill->uuid);
    else
        result_set(result, PASSED, 0, 0, "bytes", "%s: %s stayed charged after %s%s%s%s", fill->uuid, way->what,
                   way->let_go ? "its release" : "", way->let_go && way->take ? " and after " : "",
                   way->take ? "the end of its exporting process" : "", given_back ? ", or was freed by the driver" : "");
}

static const struct kept *current; /* A global variable, because on_every_device passes no argument to `measure`. */

static void measure(const struct fill *fill)
{
    struct board *board = fill->board;
    int ends[2];
    result_set(&board->result, NOT_RUN, 0, 0, "bytes", "%s: %s: the process that requested memory was killed", fill->uuid, current->what);
    board->go = board->done = 0;
    board->status[RELEASED] = 0;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
        return;
    pid_t maker = fork();
    if (maker == 0) {
        close(ends[1]);
        make(fill, current, ends[0]);
        _exit(0);
    }
    close(ends[0]);
    pid_t taker = maker < 0 ? -1 : fork();
    if (taker == 0) {
        take_and_ask(fill, current, ends[1]);
        atomic_store(&board->go, 2); /* Makes the other process end, whatever the result is. */
        _exit(0);
    }
    close(ends[1]);
    if (maker > 0)
        waitpid(maker, NULL, 0);
    atomic_store(&board->done, 2);
    if (taker > 0)
        waitpid(taker, NULL, 0);
}

#define CHECK(way) \
    void check_bypass_##way(const struct slice *slice, struct board *board) \
    { \
        current = &kept_##way; \
        on_every_device(slice, board, measure); \
    }
CHECK(by_ipc)
CHECK(by_handle)
CHECK(by_pool)
CHECK(by_array)
