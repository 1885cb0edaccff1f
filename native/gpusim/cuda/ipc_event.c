/* SPDX-License-Identifier: Apache-2.0 */
/* Shares CUDA events between processes. A page of shared memory has the position of the event's last record: the queue
 * and the number of the item in that queue. */
#include "event.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define TICKET_MAGIC 0x49504532u
#define PAGE 4096

struct event_ticket {
    uint32_t magic;
    int32_t pid, fd;
    uint32_t pad;
    uint64_t serial;
};
_Static_assert(sizeof(struct event_ticket) <= sizeof(CUipcEventHandle), "an IPC handle has 64 bytes");

static struct shared_event *map_page(int fd)
{
    void *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return page == MAP_FAILED ? NULL : page;
}

EXPORT CUresult cuIpcGetEventHandle(CUipcEventHandle *handle, CUevent event)
{
    ENTER();
    CUresult result = event_check(event);
    if (result != CUDA_SUCCESS)
        return result;
    REQUIRE(handle && event->flags & EVENT_INTERPROCESS, CUDA_ERROR_INVALID_VALUE);
    if (!event->shared) {
        int fd = memfd_create("gpusim-event", MFD_CLOEXEC);
        struct shared_event *shared = fd >= 0 && ftruncate(fd, PAGE) == 0 ? map_page(fd) : NULL;
        if (!shared) {
            if (fd >= 0)
                close(fd);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        event->shared_fd = fd;
        event->shared = shared;
    }
    struct event_ticket ticket = {.magic = TICKET_MAGIC, .pid = getpid(), .fd = event->shared_fd,
                                  .serial = sim_state()->procs[sim_slot()].serial};
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &ticket, sizeof ticket);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuIpcOpenEventHandle(CUevent *out, CUipcEventHandle handle)
{
    ENTER_CONTEXT(context);
    struct event_ticket ticket;
    char path[64];
    REQUIRE(out, CUDA_ERROR_INVALID_VALUE);
    memcpy(&ticket, &handle, sizeof ticket);
    REQUIRE(ticket.magic == TICKET_MAGIC, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(ticket.serial != sim_state()->procs[sim_slot()].serial, CUDA_ERROR_INVALID_CONTEXT);
    snprintf(path, sizeof path, "/proc/%d/fd/%d", ticket.pid, ticket.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    REQUIRE(fd >= 0, CUDA_ERROR_MAP_FAILED);
    struct shared_event *shared = map_page(fd);
    CUevent event = NULL;
    CUresult result = shared ? event_new(context, EVENT_DISABLE_TIMING | EVENT_INTERPROCESS, &event)
                             : CUDA_ERROR_MAP_FAILED;
    if (result != CUDA_SUCCESS) {
        if (shared)
            munmap(shared, PAGE);
        close(fd);
        return result;
    }
    event->shared = shared;
    event->shared_fd = fd;
    *out = event;
    return CUDA_SUCCESS;
}
