/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where memory is asked to lie. A part of a card is that card's. On a coherent machine (Grace) a card's memory is also a NUMA
 * node of the host, without processors: memory asked for there is the card's and no hook would see it, so it is refused.
 */
#include "memory.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define WITH_PROCESSORS "/sys/devices/system/node/has_cpu"

bool place_on_card(const CUmemLocation *location, CUdevice *ordinal)
{
    if (location->type == CU_MEM_LOCATION_TYPE_DEVICE)
        *ordinal = location->id;
    else if (location->type == CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN)
        *ordinal = location->id & 0xff; /* its first byte; the domain is the second */
    else
        return false;
    return true;
}

/* Whether the node has processors, by the kernel's list ("0-3,8"); where that cannot be read there are no nodes. */
static bool has_processors(int node)
{
    char list[1024];
    int file = open(WITH_PROCESSORS, O_RDONLY | O_CLOEXEC);
    ssize_t length = file < 0 ? -1 : read(file, list, sizeof list - 1);
    if (file >= 0)
        close(file);
    if (length < 0)
        return true;
    list[length] = 0;
    for (char *at = list, *end; *at >= '0' && *at <= '9'; at = *end == ',' ? end + 1 : end) {
        long first = strtol(at, &end, 10), last = *end == '-' ? strtol(end + 1, &end, 10) : first;
        if (node >= first && node <= last)
            return true;
    }
    return false;
}

CUresult place_of_host(const CUmemLocation *location, const char *call)
{
    char what[160];
    if (location->type != CU_MEM_LOCATION_TYPE_HOST_NUMA || has_processors(location->id))
        return CUDA_SUCCESS;
    snprintf(what, sizeof what, "%s in NUMA node %d, which has no processors (a GPU's own memory is such a node)", call, location->id);
    return memory_refuse(what);
}
