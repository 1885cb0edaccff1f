/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Allocates the memory of CUDA graphs' allocation nodes. Memory that a free node frees stays in the device's graph
 * memory ("reserved") until a trim.
 */
#include "graph.h"

#include <stdlib.h>

struct graph_memory {
    CUdeviceptr pointer;
    uint64_t bytes;
    int device;
    /* Number of nodes that refer to the memory, nodes of clones and executable graphs included. */
    unsigned nodes;
    /* used is true from the run of the allocation node until the memory is freed. */
    bool committed, used;
    struct graph_memory *next;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct graph_memory *all;

static struct graph_memory *find(CUdeviceptr pointer)
{
    struct graph_memory *memory = all;
    while (memory && memory->pointer != pointer)
        memory = memory->next;
    return memory;
}

static void raise(uint64_t *high, uint64_t now)
{
    if (now > *high)
        *high = now;
}

static CUresult commit(struct graph_memory *memory)
{
    struct device *d = &driver.devices[memory->device];
    if (memory->committed)
        return CUDA_SUCCESS;
    CUresult result = status_to_result(sim_charge(d->gpu, SIM_MEMORY, memory->bytes));
    if (result == CUDA_SUCCESS) {
        memory->committed = true;
        d->graph_reserved += memory->bytes;
        raise(&d->graph_reserved_high, d->graph_reserved);
    }
    return result;
}

static void decommit(struct graph_memory *memory)
{
    struct device *d = &driver.devices[memory->device];
    if (memory->committed) {
        memory->committed = false;
        d->graph_reserved -= memory->bytes;
        sim_uncharge(d->gpu, SIM_MEMORY, memory->bytes);
    }
}

static void discard(struct graph_memory *memory)
{
    struct block block;
    struct graph_memory **link = &all;
    while (*link != memory)
        link = &(*link)->next;
    *link = memory->next;
    decommit(memory);
    arena_free(driver.devices[memory->device].arena, memory->pointer, 1u << BLOCK_GRAPH, &block);
    free(memory);
}

CUresult graph_memory_new(int device, uint64_t bytes, CUdeviceptr *out)
{
    struct block block;
    struct graph_memory *memory = calloc(1, sizeof *memory);
    struct arena *arena = device_arena(device);
    if (!memory || !arena || !arena_alloc(arena, bytes, BLOCK_GRAPH, memory, &block)) {
        free(memory);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *memory = (struct graph_memory){.pointer = block.base, .bytes = bytes, .device = device, .nodes = 1};
    pthread_mutex_lock(&mutex);
    memory->next = all;
    all = memory;
    pthread_mutex_unlock(&mutex);
    *out = block.base;
    return CUDA_SUCCESS;
}

CUresult graph_memory_commit(CUdeviceptr pointer)
{
    pthread_mutex_lock(&mutex);
    struct graph_memory *memory = find(pointer);
    CUresult result = memory ? commit(memory) : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&mutex);
    return result;
}

CUresult graph_memory_use(CUdeviceptr pointer)
{
    pthread_mutex_lock(&mutex);
    struct graph_memory *memory = find(pointer);
    CUresult result = memory ? commit(memory) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS && memory->used)
        result = CUDA_ERROR_INVALID_VALUE; /* Refused, because the memory of the previous launch was not freed. */
    if (result == CUDA_SUCCESS) {
        struct device *d = &driver.devices[memory->device];
        memory->used = true;
        d->graph_used += memory->bytes;
        raise(&d->graph_used_high, d->graph_used);
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

bool graph_memory_unuse(CUdeviceptr pointer)
{
    pthread_mutex_lock(&mutex);
    struct graph_memory *memory = find(pointer);
    bool found = memory && memory->used;
    if (found) {
        memory->used = false;
        driver.devices[memory->device].graph_used -= memory->bytes;
        if (memory->nodes == 0) /* No graph refers to the memory any longer, so it is released now. */
            discard(memory);
    }
    pthread_mutex_unlock(&mutex);
    return found;
}

void graph_memory_end(CUdeviceptr pointer)
{
    pthread_mutex_lock(&mutex);
    struct graph_memory *memory = find(pointer);
    if (memory && --memory->nodes == 0 && !memory->used)
        discard(memory);
    pthread_mutex_unlock(&mutex);
}

void graph_memory_retain(CUdeviceptr pointer)
{
    pthread_mutex_lock(&mutex);
    struct graph_memory *memory = find(pointer);
    if (memory)
        memory->nodes++;
    pthread_mutex_unlock(&mutex);
}

void graph_memory_end_device(int device)
{
    pthread_mutex_lock(&mutex);
    for (struct graph_memory *memory = all; memory; memory = memory->next)
        if (memory->device == device) {
            if (memory->used)
                driver.devices[device].graph_used -= memory->bytes;
            memory->used = false;
            decommit(memory);
        }
    pthread_mutex_unlock(&mutex);
}

EXPORT CUresult cuDeviceGraphMemTrim(CUdevice device)
{
    ENTER();
    REQUIRE(device_valid(device), CUDA_ERROR_INVALID_DEVICE);
    pthread_mutex_lock(&mutex);
    for (struct graph_memory *memory = all; memory; memory = memory->next)
        if (memory->device == device && !memory->used)
            decommit(memory);
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

/* CUgraphMem_attribute: 0 current usage, 1 highest usage, 2 reserved now, 3 highest reserved. */
EXPORT CUresult cuDeviceGetGraphMemAttribute(CUdevice device, int attribute, void *value)
{
    ENTER();
    REQUIRE(device_valid(device), CUDA_ERROR_INVALID_DEVICE);
    REQUIRE(value && attribute >= 0 && attribute <= 3, CUDA_ERROR_INVALID_VALUE);
    const struct device *d = &driver.devices[device];
    pthread_mutex_lock(&mutex);
    const uint64_t values[] = {d->graph_used, d->graph_used_high, d->graph_reserved, d->graph_reserved_high};
    *(uint64_t *)value = values[attribute];
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceSetGraphMemAttribute(CUdevice device, int attribute, void *value)
{
    ENTER();
    REQUIRE(device_valid(device), CUDA_ERROR_INVALID_DEVICE);
    REQUIRE(value && (attribute == 1 || attribute == 3) && *(uint64_t *)value == 0, CUDA_ERROR_INVALID_VALUE);
    struct device *d = &driver.devices[device];
    pthread_mutex_lock(&mutex);
    if (attribute == 1)
        d->graph_used_high = d->graph_used;
    else
        d->graph_reserved_high = d->graph_reserved;
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}
