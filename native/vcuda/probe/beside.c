/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tests memory shared between two containers. Two probes in two slices of a GPU connect by a socket in a common folder,
 * as two pods do with a volume. The first probe allocates memory of each kind that can be exported, fills its slice and
 * exports the memory. The second probe has filled its own slice. It imports the memory and keeps it, and so exceeds its
 * limit. Then the first probe frees everything and allocates again.
 *
 * The old memory is then still on the card. So each byte that the first probe gets again exceeds the sum of both limits
 * and is charged to neither container.
 */
#include "bypass.h"
#include "loader.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Seconds to wait for the other probe. A container engine takes some seconds to start a container. */
#define PATIENCE_S 40
#define SLACK (32 * MIB)
#define SMALLEST (2 * MIB)
/* Lowered memory limit in bytes, used if the slice is larger than the card's free memory and so cannot be filled. It is
 * enough for the contexts of a large card. */
#define LOWERED "2147483648"

const char *beside_socket;

/* The kinds of exported memory. AS_EXTERNAL imports the descriptor of BY_DESCRIPTOR by cuImportExternalMemory. */
enum kind { BY_DESCRIPTOR, BY_POOL, BY_IPC, AS_EXTERNAL, KINDS };
static const char *const kinds[KINDS] = {"cuMemCreate", "a pool", "cuIpcGetMemHandle", "cuImportExternalMemory"};

typedef struct {
    unsigned char reserved[64];
} pool_pointer;
struct access {
    CUmemLocation location;
    int flags;
};

/* The message of the exporting probe. It has a driver status for each kind of exported memory. */
struct offer {
    uint64_t piece; /* piece: bytes of each exported piece. */
    uint64_t full;  /* full: bytes of the filled slice; 0 if the card had too little room to fill it. */
    CUresult made[KINDS];
    CUipcMemHandle ipc;
    pool_pointer pointer;
};
struct taken {
    CUresult status[KINDS];
};
struct rest {
    uint64_t again; /* Bytes that the exporting probe was granted after it had freed everything. */
};

#define FUNCTIONS(F) \
    F(create, cuMemCreate, (CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties, \
                            unsigned long long flags)) \
    F(release, cuMemRelease, (CUmemGenericAllocationHandle handle)) \
    F(reserve, cuMemAddressReserve, (CUdeviceptr *place, size_t bytes, size_t alignment, CUdeviceptr wanted, \
                                     unsigned long long flags)) \
    F(map, cuMemMap, (CUdeviceptr place, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, \
                      unsigned long long flags)) \
    F(access, cuMemSetAccess, (CUdeviceptr place, size_t bytes, const struct access *access, size_t count)) \
    F(export, cuMemExportToShareableHandle, (void *shareable, CUmemGenericAllocationHandle handle, int type, \
                                             unsigned long long flags)) \
    F(import, cuMemImportFromShareableHandle, (CUmemGenericAllocationHandle *handle, void *shareable, int type)) \
    F(pool, cuMemPoolCreate, (CUmemoryPool *pool, const CUmemPoolProps *properties)) \
    F(pool_end, cuMemPoolDestroy, (CUmemoryPool pool)) \
    F(pool_alloc, cuMemAllocFromPoolAsync, (CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream)) \
    F(pool_export, cuMemPoolExportToShareableHandle, (void *shareable, CUmemoryPool pool, int type, unsigned long long flags)) \
    F(pool_import, cuMemPoolImportFromShareableHandle, (CUmemoryPool *pool, void *shareable, int type, \
                                                        unsigned long long flags)) \
    F(pointer_export, cuMemPoolExportPointer, (pool_pointer *data, CUdeviceptr pointer)) \
    F(pointer_import, cuMemPoolImportPointer, (CUdeviceptr *pointer, CUmemoryPool pool, pool_pointer *data)) \
    F(ipc_get, cuIpcGetMemHandle, (CUipcMemHandle *handle, CUdeviceptr pointer)) \
    F(ipc_open, cuIpcOpenMemHandle_v2, (CUdeviceptr *pointer, CUipcMemHandle handle, unsigned flags)) \
    F(external, cuImportExternalMemory, (CUexternalMemory *memory, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *description)) \
    F(wait, cuCtxSynchronize, (void))
static struct {
    FUNCTIONS(FIELD)
} call;

#define TRY(function, ...) (call.function ? call.function(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND)

static void look_up(void)
{
    FUNCTIONS(LOOK_UP)
}

/* --- the socket ---------------------------------------------------------------------------------------------- */

static bool address_of(struct sockaddr_un *address)
{
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    return beside_socket && strlen(beside_socket) < sizeof address->sun_path &&
           strcpy(address->sun_path, beside_socket) != NULL;
}

static int socket_with_patience(void)
{
    struct timeval patience = {.tv_sec = PATIENCE_S};
    int made = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    setsockopt(made, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    setsockopt(made, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    return made;
}

/* The other container may run as another user, so the socket is created with access for all. A later chmod would be
 * unsafe, because other containers can write to that folder and may have replaced the file. */
static int wait_for_the_other(void)
{
    struct sockaddr_un address;
    int door = socket_with_patience(), line = -1;
    mode_t mask = umask(0);
    bool made = address_of(&address) && bind(door, (struct sockaddr *)&address, sizeof address) == 0;
    umask(mask);
    if (made && listen(door, 1) == 0)
        line = accept4(door, NULL, NULL, SOCK_CLOEXEC);
    close(door);
    struct timeval patience = {.tv_sec = PATIENCE_S};
    setsockopt(line, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    return line;
}

static int go_to_the_other(void)
{
    struct sockaddr_un address;
    if (!address_of(&address))
        return -1;
    for (int waited = 0; waited < PATIENCE_S * 100; waited++) {
        int line = socket_with_patience();
        if (connect(line, (struct sockaddr *)&address, sizeof address) == 0)
            return line;
        close(line);
        nanosleep(&(struct timespec){0, 10000000}, NULL);
    }
    return -1;
}

union room_for_two {
    struct cmsghdr header;
    char bytes[CMSG_SPACE(2 * sizeof(int))];
};

static bool hand_over(int line, const struct offer *offer, const int descriptors[2])
{
    union room_for_two control;
    struct iovec text = {(void *)(uintptr_t)offer, sizeof *offer};
    struct msghdr message = {.msg_iov = &text, .msg_iovlen = 1};
    int own[2], count = 0;
    for (int i = 0; i < 2; i++)
        if (descriptors[i] >= 0)
            own[count++] = descriptors[i];
    if (count) {
        memset(&control, 0, sizeof control);
        message.msg_control = &control;
        message.msg_controllen = CMSG_SPACE((size_t)count * sizeof(int));
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        *header = (struct cmsghdr){CMSG_LEN((size_t)count * sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
        memcpy(CMSG_DATA(header), own, (size_t)count * sizeof(int));
    }
    return sendmsg(line, &message, MSG_NOSIGNAL) == (ssize_t)sizeof *offer;
}

static bool get(int line, struct offer *offer, int descriptors[2])
{
    union room_for_two control;
    struct iovec text = {offer, sizeof *offer};
    struct msghdr message = {.msg_iov = &text, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    descriptors[0] = descriptors[1] = -1;
    if (recvmsg(line, &message, MSG_CMSG_CLOEXEC) != (ssize_t)sizeof *offer)
        return false;
    const struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    int got[2] = {-1, -1}, next = 0;
    if (header && header->cmsg_type == SCM_RIGHTS && header->cmsg_len <= CMSG_LEN(sizeof got))
        memcpy(got, CMSG_DATA(header), header->cmsg_len - CMSG_LEN(0));
    for (int i = 0; i < 2; i++)
        if (offer->made[i] == CUDA_SUCCESS)
            descriptors[i] = got[next++];
    return true;
}

/* --- the exporting probe ------------------------------------------------------------------------------------- */

struct own {
    CUmemGenericAllocationHandle handle;
    CUmemoryPool pool;
    CUdeviceptr of_pool, exported;
    int descriptors[2];
};

static void make(const struct fill *fill, const struct cuda *cuda, struct own *own, struct offer *offer)
{
    const CUmemLocation here = {CU_MEM_LOCATION_TYPE_DEVICE, fill->device};
    const int type = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    CUmemAllocationProp memory = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .requestedHandleTypes = type, .location = here};
    CUmemPoolProps pool = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .handleTypes = type, .location = here};
    *own = (struct own){.descriptors = {-1, -1}};
    CUresult *made = offer->made;
    if ((made[BY_DESCRIPTOR] = TRY(create, &own->handle, offer->piece, &memory, 0)) == CUDA_SUCCESS)
        made[BY_DESCRIPTOR] = TRY(export, &own->descriptors[0], own->handle, type, 0);
    made[AS_EXTERNAL] = made[BY_DESCRIPTOR];
    if ((made[BY_POOL] = TRY(pool, &own->pool, &pool)) == CUDA_SUCCESS &&
        (made[BY_POOL] = TRY(pool_alloc, &own->of_pool, offer->piece, own->pool, NULL)) == CUDA_SUCCESS &&
        (made[BY_POOL] = TRY(wait)) == CUDA_SUCCESS)
        made[BY_POOL] = TRY(pool_export, &own->descriptors[1], own->pool, type, 0);
    /* The result is ignored: if the export of the pointer fails, the importing probe still tries the pool. */
    if (made[BY_POOL] == CUDA_SUCCESS)
        TRY(pointer_export, &offer->pointer, own->of_pool);
    if ((made[BY_IPC] = cuda->mem_alloc(&own->exported, offer->piece)) == CUDA_SUCCESS)
        made[BY_IPC] = TRY(ipc_get, &offer->ipc, own->exported);
}

static void let_go(const struct cuda *cuda, const struct own *own)
{
    for (int i = 0; i < 2; i++)
        if (own->descriptors[i] >= 0)
            close(own->descriptors[i]);
    if (own->handle)
        TRY(release, own->handle);
    if (own->of_pool)
        cuda->mem_free(own->of_pool);
    if (own->pool)
        TRY(pool_end, own->pool);
    if (own->exported)
        cuda->mem_free(own->exported);
    TRY(wait);
}

/* Creates a context and looks up the functions. On failure returns NULL and stores the reason in the check's result. */
static const struct cuda *begin(const struct fill *fill, size_t *free_bytes)
{
    char reason[200] = "";
    CUcontext context;
    size_t total = 0;
    if (fill->slice->flags & VGPU_LIMITS_OVERSUBSCRIBE)
        setenv("CUDA_DEVICE_MEMORY_LIMIT", LOWERED, 1);
    const struct cuda *cuda = cuda_open(reason, sizeof reason);
    CUresult status = cuda ? cuda->ctx_create(&context, 0, fill->device) : CUDA_ERROR_NO_DEVICE;
    if (status == CUDA_SUCCESS)
        status = cuda->mem_info(free_bytes, &total);
    if (status != CUDA_SUCCESS) {
        result_set(&fill->board->result, NOT_RUN, 0, 0, "bytes", "%s: no context can be created: the driver returns %d %s",
                   fill->uuid, status, reason);
        return NULL;
    }
    look_up();
    return cuda;
}

static void lend(const struct fill *fill)
{
    struct result *result = &fill->board->result;
    struct offer offer = {0};
    struct taken taken;
    struct rest rest = {0};
    struct own own;
    CUdeviceptr pointer;
    size_t free_bytes = 0;
    int line = wait_for_the_other();
    if (line < 0) {
        result_set(result, NOT_RUN, 0, 0, "bytes", "%s: no importing probe connected to %s: %s", fill->uuid,
                   beside_socket ? beside_socket : "the socket, which --beside must name", strerror(errno));
        return;
    }
    const struct cuda *cuda = begin(fill, &free_bytes);
    if (!cuda)
        return;
    offer.piece = free_bytes > 8 * BEYOND ? BEYOND : free_bytes / 8 / SMALLEST * SMALLEST;
    make(fill, cuda, &own, &offer);
    take_all(fill, cuda, free_bytes ? free_bytes : 1);
    offer.full = !atomic_load(&fill->board->card_full);
    if (!hand_over(line, &offer, own.descriptors) || recv(line, &taken, sizeof taken, 0) != (ssize_t)sizeof taken) {
        result_set(result, NOT_RUN, 0, 0, "bytes", "%s: the probe in the other slice does not answer", fill->uuid);
        return;
    }
    let_go(cuda, &own);
    while (rest.again < (KINDS + 1) * offer.piece && cuda->mem_alloc(&pointer, MIB) == CUDA_SUCCESS)
        rest.again += MIB;
    if (send(line, &rest, sizeof rest, MSG_NOSIGNAL) == (ssize_t)sizeof rest)
        recv(line, &taken, sizeof taken, 0); /* Wait until the importing probe has stored its result. */
    result_set(result, PASSED, 0, rest.again, "bytes", "%s: bytes granted again after all exported memory was freed", fill->uuid);
}

/* --- the importing probe ------------------------------------------------------------------------------------- */

/* Imports the received memory and closes the descriptors. The import alone keeps the memory. So the exporting process,
 * which may search for open descriptors of its memory, finds none. */
static void take(const struct fill *fill, const struct offer *offer, const int descriptors[2], struct taken *taken)
{
    const struct access both = {{CU_MEM_LOCATION_TYPE_DEVICE, fill->device}, 3};
    const int type = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    CUmemGenericAllocationHandle handle;
    CUmemoryPool pool;
    CUdeviceptr place, pointer;
    pool_pointer data = offer->pointer;
    for (int kind = 0; kind < KINDS; kind++)
        taken->status[kind] = CUDA_ERROR_NOT_FOUND;
    if (descriptors[0] >= 0) {
        /* The driver takes ownership of an imported descriptor. */
        CUDA_EXTERNAL_MEMORY_HANDLE_DESC description = {.type = CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD, .size = offer->piece};
        CUexternalMemory memory;
        description.handle.fd = dup(descriptors[0]);
        taken->status[AS_EXTERNAL] = TRY(external, &memory, &description);
        if (taken->status[AS_EXTERNAL] != CUDA_SUCCESS)
            close(description.handle.fd);
    }
    if (descriptors[0] >= 0)
        taken->status[BY_DESCRIPTOR] = TRY(import, &handle, (void *)(intptr_t)descriptors[0], type);
    if (descriptors[0] >= 0 && taken->status[BY_DESCRIPTOR] == CUDA_SUCCESS) {
        close(descriptors[0]);
        if (TRY(reserve, &place, offer->piece, 0, 0, 0) == CUDA_SUCCESS &&
            TRY(map, place, offer->piece, 0, handle, 0) == CUDA_SUCCESS)
            TRY(access, place, offer->piece, &both, 1);
    }
    if (descriptors[1] >= 0)
        taken->status[BY_POOL] = TRY(pool_import, &pool, (void *)(intptr_t)descriptors[1], type, 0);
    if (descriptors[1] >= 0 && taken->status[BY_POOL] == CUDA_SUCCESS) {
        close(descriptors[1]);
        TRY(pointer_import, &pointer, pool, &data);
    }
    if (offer->made[BY_IPC] == CUDA_SUCCESS)
        taken->status[BY_IPC] = TRY(ipc_open, &pointer, offer->ipc, 1);
}

static void judge(const struct fill *fill, const struct offer *offer, const struct taken *taken, uint64_t again)
{
    struct result *result = &fill->board->result;
    uint64_t exported = 0, had = 0, kept = offer->made[BY_DESCRIPTOR] == CUDA_SUCCESS ? offer->piece : 0;
    char tried[200] = "";
    for (int kind = 0; kind < KINDS; kind++) {
        size_t length = strlen(tried);
        bool made = offer->made[kind] == CUDA_SUCCESS;
        exported += made && kind != AS_EXTERNAL ? offer->piece : 0;
        bool again_the_same = kind == AS_EXTERNAL && taken->status[BY_DESCRIPTOR] == CUDA_SUCCESS;
        had += made && taken->status[kind] == CUDA_SUCCESS && !again_the_same ? offer->piece : 0;
        snprintf(tried + length, sizeof tried - length, "%s%s %s %d", length ? ", " : "", kinds[kind],
                 made ? "answers" : "cannot be exported: error", made ? taken->status[kind] : offer->made[kind]);
    }
    if (!exported) {
        result_set(result, NOT_RUN, 0, 0, "bytes", "%s: no memory could be exported: %s", fill->uuid, tried);
        return;
    }
    /* Memory that a descriptor or an import keeps on the card stays charged to the exporting container. */
    uint64_t beyond = again + kept > exported + SLACK ? again + kept - exported : 0;
    result_set(result, had || beyond ? VIOLATED : PASSED, 0, had > beyond ? had : beyond, "bytes",
               "%.12s: %s; of the %llu MiB that the exporter freed it got %llu again", fill->uuid, tried,
               (unsigned long long)(exported / MIB), (unsigned long long)(again / MIB));
}

static void import(const struct fill *fill)
{
    struct result *result = &fill->board->result;
    struct offer offer;
    struct taken taken;
    struct rest rest;
    size_t free_bytes = 0;
    int descriptors[2], line = go_to_the_other();
    if (line < 0) {
        result_set(result, NOT_RUN, 0, 0, "bytes", "%s: no exporting probe listens at %s", fill->uuid,
                   beside_socket ? beside_socket : "the socket, which --beside must name");
        return;
    }
    const struct cuda *cuda = begin(fill, &free_bytes);
    if (!cuda)
        return;
    uint64_t granted = take_all(fill, cuda, free_bytes ? free_bytes : 1);
    if (granted > fill->limit) {
        result_set(result, VIOLATED, fill->limit, granted, "bytes", "%s: more memory was granted than the limit", fill->uuid);
        return;
    }
    if (!get(line, &offer, descriptors)) {
        result_set(result, NOT_RUN, 0, 0, "bytes", "%s: the probe in the other slice sent no memory", fill->uuid);
        return;
    }
    if (!offer.full || atomic_load(&fill->board->card_full)) {
        result_set(result, NOT_RUN, 0, 0, "bytes", "%s: the card has no room to fill both slices", fill->uuid);
        return;
    }
    take(fill, &offer, descriptors, &taken);
    if (send(line, &taken, sizeof taken, MSG_NOSIGNAL) != (ssize_t)sizeof taken ||
        recv(line, &rest, sizeof rest, 0) != (ssize_t)sizeof rest) {
        result_set(result, NOT_RUN, 0, 0, "bytes", "%s: the probe in the other slice ended before it answered", fill->uuid);
        return;
    }
    judge(fill, &offer, &taken, rest.again);
}

/* Runs the test on the first GPU of the slice only, because the two probes may list their GPUs in different orders. */
static void with_the_other(const struct slice *slice, struct board *board, void (*part)(const struct fill *fill))
{
    static struct report report;
    /* A child lists the devices, because a process that has called cuInit must not fork users of CUDA. */
    pid_t child = fork();
    if (child == 0) {
        list_devices(slice, board);
        _exit(0);
    }
    waitpid(child, NULL, 0);
    report = board->report;
    const struct device_row *row = &report.devices[0];
    const struct vgpu_limits_device *limit = report.device_count ? slice_device(slice, row->uuid) : NULL;
    if (!limit) {
        result_set(&board->result, NOT_RUN, 0, 0, "bytes", "the slice has no GPU with a memory limit");
        return;
    }
    struct fill fill = {slice, board, row->index, row->uuid, limit->memory_bytes};
    become_the_tenant();
    part(&fill);
}

void check_export_beside(const struct slice *slice, struct board *board)
{
    with_the_other(slice, board, lend);
}

void check_import_beside(const struct slice *slice, struct board *board)
{
    with_the_other(slice, board, import);
}
