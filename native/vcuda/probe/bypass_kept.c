/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that lives on after it was given back, because another process has it: lent by an IPC handle, or in a shareable handle
 * of physical memory or of a pool. One process makes it, the other takes it, fills the slice, and asks for more once the first has
 * released a piece, and once more when the first has ended. Who is granted that goes round the limit only while the card still
 * has the piece, so the taker reads a word that it wrote into it. Where a driver gives no address to read by, the handle itself
 * keeps the memory: that is what it is for.
 */
#include "bypass.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "loader.h"

#define ROOM (32 * MIB) /* that is left of a full slice: for what a driver rounds up */
#define STEP (32 * MIB) /* a driver's pool grows by no more */
#define WORD 0x76677075u
#define DEAD_NS 150000000 /* in which the library looks for the dead at least once */
#define NO_FUNCTION (-1)  /* no answer of a driver */

/* What the maker tells the taker; a descriptor travels beside it. */
struct note {
    CUipcMemHandle lent;
    char place[64]; /* of a pool's memory: CUmemPoolPtrExportData */
    bool placed;
    uint64_t bytes, context; /* of the piece, and what goes with its maker besides */
    CUresult status;
};

struct piece {
    CUdeviceptr pointer; /* 0: there is no address */
    CUmemGenericAllocationHandle handle;
    CUmemoryPool pool;
    int descriptor;
    uint64_t bytes;
    bool written;
};

static struct {
    CUresult (*get_lent)(CUipcMemHandle *handle, CUdeviceptr pointer);
    CUresult (*open_lent)(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned flags);
    CUresult (*create)(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                       unsigned long long flags);
    CUresult (*release)(CUmemGenericAllocationHandle handle);
    CUresult (*export)(void *shareable, CUmemGenericAllocationHandle handle, int type, unsigned long long flags);
    CUresult (*import)(CUmemGenericAllocationHandle *handle, void *shareable, int type);
    CUresult (*reserve)(CUdeviceptr *pointer, size_t bytes, size_t alignment, CUdeviceptr wish, unsigned long long flags);
    CUresult (*map)(CUdeviceptr pointer, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags);
    CUresult (*access)(CUdeviceptr pointer, size_t bytes, const void *accesses, size_t count);
    CUresult (*pool)(CUmemoryPool *pool, const CUmemPoolProps *properties);
    CUresult (*from_pool)(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream);
    CUresult (*export_pool)(void *shareable, CUmemoryPool pool, int type, unsigned long long flags);
    CUresult (*import_pool)(CUmemoryPool *pool, void *shareable, int type, unsigned long long flags);
    CUresult (*access_pool)(CUmemoryPool pool, const void *accesses, size_t count);
    CUresult (*export_place)(void *place, CUdeviceptr pointer);
    CUresult (*import_place)(CUdeviceptr *pointer, CUmemoryPool pool, void *place);
    CUresult (*write)(CUdeviceptr pointer, const void *bytes, size_t count);
    CUresult (*read)(void *bytes, CUdeviceptr pointer, size_t count);
    CUresult (*wait)(void);
} call;
static const struct cuda *cuda;
static CUdevice device;

/* CUmemAccessDesc: this device may read and write. */
static struct {
    CUmemLocation location;
    int flags;
} access_here = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, 3};

static void look_up(void)
{
    const struct {
        void **function;
        const char *symbol;
    } table[] = {
        {(void **)&call.get_lent, "cuIpcGetMemHandle"},
        {(void **)&call.open_lent, "cuIpcOpenMemHandle_v2"},
        {(void **)&call.create, "cuMemCreate"},
        {(void **)&call.release, "cuMemRelease"},
        {(void **)&call.export, "cuMemExportToShareableHandle"},
        {(void **)&call.import, "cuMemImportFromShareableHandle"},
        {(void **)&call.reserve, "cuMemAddressReserve"},
        {(void **)&call.map, "cuMemMap"},
        {(void **)&call.access, "cuMemSetAccess"},
        {(void **)&call.pool, "cuMemPoolCreate"},
        {(void **)&call.from_pool, "cuMemAllocFromPoolAsync"},
        {(void **)&call.export_pool, "cuMemPoolExportToShareableHandle"},
        {(void **)&call.import_pool, "cuMemPoolImportFromShareableHandle"},
        {(void **)&call.access_pool, "cuMemPoolSetAccess"},
        {(void **)&call.export_place, "cuMemPoolExportPointer"},
        {(void **)&call.import_place, "cuMemPoolImportPointer"},
        {(void **)&call.write, "cuMemcpyHtoD_v2"},
        {(void **)&call.read, "cuMemcpyDtoH_v2"},
        {(void **)&call.wait, "cuCtxSynchronize"},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        *table[i].function = dlsym(cuda_handle(), table[i].symbol);
}

/* --- the ways ------------------------------------------------------------------------------------------ */

static CUresult lend(struct piece *piece, struct note *note)
{
    if (!call.get_lent || !call.open_lent)
        return NO_FUNCTION;
    CUresult status = cuda->mem_alloc(&piece->pointer, piece->bytes);
    return status == CUDA_SUCCESS ? call.get_lent(&note->lent, piece->pointer) : status;
}

static CUresult free_lent(struct piece *piece)
{
    return cuda->mem_free(piece->pointer);
}

static CUresult open_lent(struct piece *piece, const struct note *note)
{
    return call.open_lent(&piece->pointer, note->lent, 1);
}

static CUresult export(struct piece *piece, struct note *note)
{
    const CUmemAllocationProp properties = {.type = 1, .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                            .location = {CU_MEM_LOCATION_TYPE_DEVICE, device}};
    (void)note;
    if (!call.create || !call.release || !call.export)
        return NO_FUNCTION;
    CUresult status = call.create(&piece->handle, piece->bytes, &properties, 0);
    return status == CUDA_SUCCESS
               ? call.export(&piece->descriptor, piece->handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)
               : status;
}

static CUresult release(struct piece *piece)
{
    close(piece->descriptor);
    return call.release(piece->handle);
}

/* The descriptor alone keeps the memory; the import is for the word. */
static CUresult import(struct piece *piece, const struct note *note)
{
    CUdeviceptr pointer = 0;
    void *shareable = (void *)(intptr_t)piece->descriptor;
    (void)note;
    if (call.import && call.reserve && call.map && call.access &&
        call.import(&piece->handle, shareable, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) == CUDA_SUCCESS &&
        call.reserve(&pointer, piece->bytes, 0, 0, 0) == CUDA_SUCCESS &&
        call.map(pointer, piece->bytes, 0, piece->handle, 0) == CUDA_SUCCESS &&
        call.access(pointer, piece->bytes, &access_here, 1) == CUDA_SUCCESS)
        piece->pointer = pointer;
    return piece->descriptor >= 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult export_pool(struct piece *piece, struct note *note)
{
    const CUmemPoolProps properties = {.allocType = 1, .handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                       .location = {CU_MEM_LOCATION_TYPE_DEVICE, device}};
    if (!call.pool || !call.from_pool || !call.export_pool || !call.wait)
        return NO_FUNCTION;
    CUresult status = call.pool(&piece->pool, &properties);
    if (status == CUDA_SUCCESS)
        status = call.from_pool(&piece->pointer, piece->bytes, piece->pool, NULL);
    if (status == CUDA_SUCCESS)
        status = call.wait();
    if (status == CUDA_SUCCESS)
        status = call.export_pool(&piece->descriptor, piece->pool, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    note->placed = status == CUDA_SUCCESS && call.export_place &&
                   call.export_place(note->place, piece->pointer) == CUDA_SUCCESS;
    return status;
}

static CUresult import_pool(struct piece *piece, const struct note *note)
{
    char place[sizeof note->place];
    void *shareable = (void *)(intptr_t)piece->descriptor;
    memcpy(place, note->place, sizeof place);
    if (call.import_pool && call.import_place && note->placed &&
        call.import_pool(&piece->pool, shareable, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) == CUDA_SUCCESS) {
        if (call.access_pool)
            call.access_pool(piece->pool, &access_here, 1);
        if (call.import_place(&piece->pointer, piece->pool, place) != CUDA_SUCCESS)
            piece->pointer = 0;
    }
    return piece->descriptor >= 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

struct kept {
    CUresult (*make)(struct piece *piece, struct note *note);
    CUresult (*let_go)(struct piece *piece); /* NULL: it is kept after its maker's end alone */
    CUresult (*take)(struct piece *piece, const struct note *note);
    const char *what;
};
static const struct kept lent = {lend, free_lent, open_lent, "memory that another process had open"};
static const struct kept by_handle = {export, release, import, "memory of which another process had a handle"};
static const struct kept by_pool = {export_pool, NULL, import_pool, "a pool of which another process had a handle"};

enum { RELEASED, LEFT, PIECES };

/* --- who makes it ------------------------------------------------------------------------------------------- */

static bool tell(int channel, const struct note *note, int descriptor)
{
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } beside = {0};
    struct note copy = *note;
    struct iovec part = {&copy, sizeof copy};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (descriptor >= 0) {
        message.msg_control = beside.bytes;
        message.msg_controllen = sizeof beside.bytes;
        beside.header = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
        memcpy(CMSG_DATA(&beside.header), &descriptor, sizeof descriptor);
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
    device = access_here.location.id = fill->device;
    look_up();
    return cuda ? cuda->ctx_create(&context, 0, device) : CUDA_ERROR_NO_DEVICE;
}

static void make(const struct fill *fill, const struct kept *way, int channel)
{
    struct piece pieces[PIECES] = {{.descriptor = -1}, {.descriptor = -1}};
    struct note notes[PIECES] = {0};
    CUresult status = begin(fill);
    int64_t context = ledger_own_bytes();
    uint64_t bytes = ((context > 0 ? (uint64_t)context : 0) + 2 * BEYOND + STEP - 1) / STEP * STEP, made = 0;
    for (int i = way->let_go ? RELEASED : LEFT; i < PIECES && status == CUDA_SUCCESS; i++, made += bytes) {
        pieces[i].bytes = notes[i].bytes = bytes;
        status = way->make(&pieces[i], &notes[i]);
    }
    int64_t all = ledger_own_bytes();
    for (int i = way->let_go ? RELEASED : LEFT; i < PIECES; i++) {
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

/* --- who takes it, and asks ------------------------------------------------------------------------------------ */

static bool hear(int channel, struct note *note, int *descriptor)
{
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } beside;
    struct iovec part = {note, sizeof *note};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = beside.bytes, .msg_controllen = sizeof beside.bytes};
    if (recvmsg(channel, &message, MSG_CMSG_CLOEXEC) != (ssize_t)sizeof *note)
        return false;
    *descriptor = -1;
    if (message.msg_controllen >= sizeof(struct cmsghdr) && beside.header.cmsg_type == SCM_RIGHTS)
        memcpy(descriptor, CMSG_DATA(&beside.header), sizeof *descriptor);
    return true;
}

/* The card keeps it: the word is there, or there is no address to ask by. */
static bool lives(const struct piece *piece)
{
    unsigned word = 0;
    return !piece->pointer || (piece->written && call.read(&word, piece->pointer, sizeof word) == CUDA_SUCCESS && word == WORD);
}

/* All but ROOM; false: the card has less than the slice, and nothing is shown by its refusals. */
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

/* Whether more is granted than the slice has: what is granted for a piece that the card has no more is none. */
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
    bool kept = lives(piece);
    *given_back = *given_back || !kept;
    cuda->mem_free(pointer);
    return kept;
}

static const char *take(const struct kept *way, struct piece *piece, struct note *note, int channel, CUresult *status)
{
    const unsigned word = WORD;
    unsigned back = 0;
    if (!hear(channel, note, &piece->descriptor))
        return "its maker ended";
    if ((*status = note->status) != CUDA_SUCCESS)
        return "it could not be made";
    piece->bytes = note->bytes;
    if ((*status = way->take(piece, note)) != CUDA_SUCCESS)
        return "it could not be taken";
    piece->written = piece->pointer && call.write && call.read &&
                     call.write(piece->pointer, &word, sizeof word) == CUDA_SUCCESS &&
                     call.read(&back, piece->pointer, sizeof back) == CUDA_SUCCESS && back == word;
    return piece->pointer && !piece->written ? "nothing can be read of it" : NULL;
}

static void take_and_ask(const struct fill *fill, const struct kept *way, int channel)
{
    struct board *board = fill->board;
    struct result *result = &board->result;
    struct piece pieces[PIECES] = {{.descriptor = -1}, {.descriptor = -1}};
    struct note note = {0};
    bool given_back = false, beyond = false;
    uint64_t asked = 0;
    CUresult status = begin(fill);
    const char *why = status == CUDA_SUCCESS ? NULL : "there was no context", *how = NULL;
    int first = way->let_go ? RELEASED : LEFT;
    for (int i = first; i < PIECES && !why; i++)
        why = take(way, &pieces[i], &note, channel, &status);
    if (status == NO_FUNCTION) {
        result_set(result, HELD, 0, 0, "bytes", "%s: not tried: the driver has no such function", fill->uuid);
        return;
    }
    for (int stage = first; stage < PIECES && !why && !beyond; stage++) {
        how = stage == RELEASED ? "was released" : "was left by its maker, which ended";
        asked = BEYOND + (stage == RELEASED ? 0 : note.context);
        if (!fill_up(fill)) {
            why = "the slice could not be filled, or the card has no more room";
            break;
        }
        atomic_store(&board->go, stage + 1);
        if (!wait_for(&board->done, stage + 1) || (status = board->status[RELEASED]) != CUDA_SUCCESS)
            why = "it could not be released";
        else
            beyond = ask(asked, &pieces[stage], &given_back);
    }
    if (why)
        result_set(result, NOT_RUN, 0, 0, "bytes", "%s: %s: %s (%d)", fill->uuid, way->what, why, status);
    else if (beyond)
        result_set(result, VIOLATED, 0, asked, "bytes", "%s: %s %s: with the slice taken, %llu bytes more were granted", fill->uuid,
                   way->what, how, (unsigned long long)asked);
    else
        result_set(result, HELD, 0, 0, "bytes", "%s: %s stayed charged %swhen its maker ended%s", fill->uuid, way->what,
                   way->let_go ? "when it was released, and " : "", given_back ? ", or was given back by the driver" : "");
}

static const struct kept *current; /* on_every_device hands nothing on */

static void measure(const struct fill *fill)
{
    struct board *board = fill->board;
    int ends[2];
    result_set(&board->result, NOT_RUN, 0, 0, "bytes", "%s: %s: the process that asked was ended", fill->uuid, current->what);
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
        atomic_store(&board->go, 2); /* whatever became of it */
        _exit(0);
    }
    close(ends[1]);
    if (maker > 0)
        waitpid(maker, NULL, 0);
    atomic_store(&board->done, 2);
    if (taker > 0)
        waitpid(taker, NULL, 0);
}

#define KEPT(way, check) \
    void check(const struct slice *slice, struct board *board) \
    { \
        current = &way; \
        on_every_device(slice, board, measure); \
    }
KEPT(lent, check_bypass_lent)
KEPT(by_handle, check_bypass_handle_kept)
KEPT(by_pool, check_bypass_pool_kept)
