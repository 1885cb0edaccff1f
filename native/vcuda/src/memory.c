/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Plain device memory: charge, call the driver, keep what was charged under the pointer. Freeing goes the other way
 * round: the block leaves the table first (another thread may get the same address at once) and is uncharged last, so
 * the account is never below what is really held.
 */
#include "blocks.h"

#include <stdio.h>
#include <stdlib.h>

#define USUAL(condition) __builtin_expect(!!(condition), 1)

CUresult memory_broken(void)
{
    limits_complain();
    return CUDA_ERROR_NOT_PERMITTED;
}

CUresult memory_refuse(const char *what)
{
    static _Atomic unsigned count;
    if (vgpu_log_again(&count))
        vgpu_log_line(LOG_ERROR, "%s is refused: its memory cannot be held to the limit", what);
    return CUDA_ERROR_NOT_SUPPORTED;
}

const struct device *memory_target(enum control control, CUcontext *context, CUresult *status)
{
    if (control == CONTROL_BROKEN) {
        *status = memory_broken();
        return NULL;
    }
    return device_to_allocate(context, status);
}

CUresult memory_meet(void)
{
    CUcontext context;
    CUresult status;
    bool refused = !device_to_allocate(&context, &status) &&
                   (status == CUDA_ERROR_NOT_PERMITTED || status == CUDA_ERROR_OUT_OF_MEMORY);
    return refused ? status : CUDA_SUCCESS; /* else there is no context, or the driver says what is wrong */
}

CUresult memory_charge(const struct device *device, enum account account, uint64_t bytes)
{
    bool known;
    uint64_t limit = device_limit(device, &known);
    if (!known) {
        vgpu_log_line(LOG_ERROR, "device %s is not among the devices of the limits file", device->uuid);
        return CUDA_ERROR_NOT_PERMITTED;
    }
    enum charge result = ledger_charge(device->ledger, account, bytes, limit);
    for (int trim = 0; result == CHARGE_FULL && trim < 2; trim++) {
        pools_settle(trim != 0);
        result = ledger_charge(device->ledger, account, bytes, limit);
    }
    if (result == CHARGE_FULL)
        vgpu_log(LOG_INFO, "%llu bytes on %s are over the limit of %llu", (unsigned long long)bytes, device->uuid,
                 (unsigned long long)limit);
    return result == CHARGE_OK ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

void memory_keep(struct block_map *map, uint64_t key, uint64_t bytes, const struct device *device, int kind, uint64_t owner)
{
    struct block block = {.key = key, .bytes = bytes, .owner = owner, .device = device->ledger, .kind = kind};
    if (!block_put(map, &block))
        vgpu_log_line(LOG_ERROR, "no host memory to remember a block of %llu bytes: it stays charged until exit",
                      (unsigned long long)bytes);
}

/* --- allocation ------------------------------------------------------------------------------------ */

/* On the card, or, where the card was sold more than once and is full, in host memory; *kind says which. */
static CUresult take(const struct device *device, CUdeviceptr *pointer, size_t bytes, int *kind)
{
    *kind = BLOCK_PLAIN;
    if (!limits_oversubscribe())
        return REAL(cuMemAlloc_v2)(pointer, bytes);
    CUresult status = CUDA_ERROR_OUT_OF_MEMORY;
    if (!host_memory_wanted(device, bytes))
        status = REAL(cuMemAlloc_v2)(pointer, bytes);
    if (status == CUDA_ERROR_OUT_OF_MEMORY) {
        *kind = BLOCK_HOST;
        status = host_memory_take(device, pointer, bytes);
    }
    return status;
}

static __attribute__((noinline)) CUresult alloc_slowly(CUdeviceptr *pointer, size_t bytes)
{
    ENTER(cuMemAlloc_v2, (pointer, bytes));
    CUcontext context;
    CUresult status;
    const struct device *device = memory_target(control, &context, &status);
    if (!device)
        return status;
    FLIGHT(device->ledger);
    if ((status = memory_charge(device, ACCOUNT_USED, bytes)) != CUDA_SUCCESS)
        return status;
    int kind;
    status = take(device, pointer, bytes, &kind);
    if (status != CUDA_SUCCESS)
        ledger_uncharge(device->ledger, ACCOUNT_USED, bytes);
    else
        memory_keep(&vgpu_memory, *pointer, bytes, device, kind, (uintptr_t)context);
    return status;
}

/* The common case alone, and no more of it than it needs: whatever else there is takes the way above, with nothing done. */
EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes)
{
    const struct standing *standing = vgpu_standing_now();
    CUcontext context;
    if (!USUAL(standing && standing->plain && REAL_HAS(cuMemAlloc_v2)))
        return alloc_slowly(pointer, bytes);
    const struct device *device;
    uint64_t limit;
    if (!USUAL(device_known(&context, &device) && (limit = standing_memory(standing, device))))
        return alloc_slowly(pointer, bytes);
    struct tally *tally = device->tally;
    tally_enter(tally);
    if (!USUAL(tally_charged(tally, ACCOUNT_USED, bytes, limit))) {
        tally_leave(tally);
        return alloc_slowly(pointer, bytes);
    }
    CUresult status = REAL(cuMemAlloc_v2)(pointer, bytes);
    struct block block = {.bytes = bytes, .owner = (uintptr_t)context, .device = tally->device, .kind = BLOCK_PLAIN};
    if (!USUAL(status == CUDA_SUCCESS)) {
        ledger_uncharge(tally->device, ACCOUNT_USED, bytes);
    } else {
        block.key = *pointer;
        if (!USUAL(block_put_now(&vgpu_memory, &block)))
            memory_keep(&vgpu_memory, *pointer, bytes, device, BLOCK_PLAIN, (uintptr_t)context);
    }
    tally_leave(tally);
    return status;
}

EXPORT CUresult cuMemAlloc(CUdeviceptr_v1 *pointer, unsigned int bytes)
{
    ENTER(cuMemAlloc, (pointer, bytes));
    CUcontext context;
    CUresult status;
    const struct device *device = memory_target(control, &context, &status);
    if (!device)
        return status;
    FLIGHT(device->ledger);
    if ((status = memory_charge(device, ACCOUNT_USED, bytes)) != CUDA_SUCCESS)
        return status;
    status = REAL(cuMemAlloc)(pointer, bytes);
    if (status != CUDA_SUCCESS)
        ledger_uncharge(device->ledger, ACCOUNT_USED, bytes);
    else
        memory_keep(&vgpu_memory, *pointer, bytes, device, BLOCK_PLAIN, (uintptr_t)context);
    return status;
}

EXPORT CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t bytes, unsigned int flags)
{
    ENTER(cuMemAllocManaged, (pointer, bytes, flags));
    CUcontext context;
    CUresult status;
    const struct device *device = memory_target(control, &context, &status);
    if (!device)
        return status;
    FLIGHT(device->ledger);
    if ((status = memory_charge(device, ACCOUNT_USED, bytes)) != CUDA_SUCCESS)
        return status;
    status = REAL(cuMemAllocManaged)(pointer, bytes, flags);
    if (status != CUDA_SUCCESS)
        ledger_uncharge(device->ledger, ACCOUNT_USED, bytes);
    else
        memory_keep(&vgpu_memory, *pointer, bytes, device, BLOCK_PLAIN, (uintptr_t)context);
    return status;
}

/*
 * The driver chooses the pitch, so the size is known only afterwards. Rows of up to 512 bytes of padding are charged
 * before; a driver that pads more is charged the rest, and if that does not fit the memory goes back.
 */
#define PITCH_ALIGNMENT 512ull

struct pitched {
    CUcontext context;
    const struct device *device;
    uint64_t charged;
    int kind;
};

static CUresult pitch_before(enum control control, struct pitched *pitched, uint64_t width, uint64_t height)
{
    CUresult status;
    pitched->kind = BLOCK_PLAIN;
    pitched->device = memory_target(control, &pitched->context, &status);
    if (!pitched->device)
        return status;
    uint64_t row = width > UINT64_MAX - PITCH_ALIGNMENT ? width : (width + PITCH_ALIGNMENT - 1) / PITCH_ALIGNMENT * PITCH_ALIGNMENT;
    if (__builtin_mul_overflow(row, height, &pitched->charged))
        return CUDA_ERROR_OUT_OF_MEMORY;
    flight_begin(pitched->device->ledger); /* until pitch_after */
    status = memory_charge(pitched->device, ACCOUNT_USED, pitched->charged);
    if (status != CUDA_SUCCESS)
        flight_end(&pitched->device->ledger);
    return status;
}

static CUresult pitch_after(struct pitched *pitched, CUresult status, CUdeviceptr pointer, uint64_t pitch, uint64_t height)
{
    __attribute__((cleanup(flight_end))) const int index = pitched->device->ledger;
    uint64_t bytes = pitch * height;
    if (status == CUDA_SUCCESS && bytes > pitched->charged) {
        status = memory_charge(pitched->device, ACCOUNT_USED, bytes - pitched->charged);
        if (status == CUDA_SUCCESS)
            pitched->charged = bytes;
        else
            REAL(cuMemFree_v2)(pointer);
    }
    if (status != CUDA_SUCCESS) {
        ledger_uncharge(index, ACCOUNT_USED, pitched->charged);
        return status;
    }
    ledger_uncharge(index, ACCOUNT_USED, pitched->charged - bytes);
    memory_keep(&vgpu_memory, pointer, bytes, pitched->device, pitched->kind, (uintptr_t)pitched->context);
    return status;
}

EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height, unsigned int element)
{
    ENTER(cuMemAllocPitch_v2, (pointer, pitch, width, height, element));
    struct pitched pitched;
    CUresult status = pitch_before(control, &pitched, width, height);
    if (status != CUDA_SUCCESS)
        return status;
    bool full = pitched.charged && (element == 4 || element == 8 || element == 16) &&
                host_memory_wanted(pitched.device, pitched.charged);
    status = full ? CUDA_ERROR_OUT_OF_MEMORY : REAL(cuMemAllocPitch_v2)(pointer, pitch, width, height, element);
    if (status == CUDA_ERROR_OUT_OF_MEMORY && pitch && limits_oversubscribe()) {
        pitched.kind = BLOCK_HOST;
        status = host_memory_take(pitched.device, pointer, pitched.charged);
        if (status == CUDA_SUCCESS)
            *pitch = pitched.charged / height;
    }
    return pitch_after(&pitched, status, status ? 0 : *pointer, status ? 0 : *pitch, height);
}

EXPORT CUresult cuMemAllocPitch(CUdeviceptr_v1 *pointer, unsigned int *pitch, unsigned int width, unsigned int height,
                                unsigned int element)
{
    ENTER(cuMemAllocPitch, (pointer, pitch, width, height, element));
    struct pitched pitched;
    CUresult status = pitch_before(control, &pitched, width, height);
    if (status != CUDA_SUCCESS)
        return status;
    status = REAL(cuMemAllocPitch)(pointer, pitch, width, height, element);
    return pitch_after(&pitched, status, status ? 0 : *pointer, status ? 0 : *pitch, height);
}

/* --- freeing --------------------------------------------------------------------------------------- */

static inline void memory_gone(const struct block *block, enum account account)
{
    if (block->kind == BLOCK_HOST)
        host_memory_freed(block->device, block->bytes);
    ledger_uncharge(block->device, account, block->bytes);
}

/* Flight begun. */
static __attribute__((noinline)) CUresult free_known(const struct block *block, CUdeviceptr pointer,
                                                      CUresult (*release)(CUdeviceptr pointer, void *data), void *data)
{
    struct block loan;
    bool lent = block->kind == BLOCK_LENT && ipc_lent(pointer, &loan);
    CUresult status = release(pointer, data);
    if (status != CUDA_SUCCESS && lent)
        block_put(&vgpu_lent, &loan);
    if (status != CUDA_SUCCESS)
        block_put(&vgpu_memory, block);
    else if (block->kind == BLOCK_POOL)
        pool_freed(block->owner, block->bytes);
    else if (lent)
        ipc_freed(&loan);
    else
        memory_gone(block, ACCOUNT_USED);
    return status;
}

CUresult memory_free(CUdeviceptr pointer, CUresult (*release)(CUdeviceptr pointer, void *data), void *data)
{
    struct block block;
    if (!block_take(&vgpu_memory, pointer, &block)) {
        bool any = atomic_load_explicit(&vgpu_external_any, memory_order_relaxed);
        struct external_buffer *external = any ? external_take(pointer) : NULL;
        CUresult status = release(pointer, data);
        if (external)
            external_settle(external, status == CUDA_SUCCESS);
        return status;
    }
    FLIGHT(block.device);
    return free_known(&block, pointer, release, data);
}

static CUresult release_v2(CUdeviceptr pointer, void *data)
{
    (void)data;
    return REAL(cuMemFree_v2)(pointer);
}

static __attribute__((noinline)) CUresult free_slowly(CUdeviceptr pointer)
{
    ENTER(cuMemFree_v2, (pointer));
    return memory_free(pointer, release_v2, NULL);
}

static __attribute__((noinline)) CUresult free_taken(const struct block *block)
{
    FLIGHT(block->device);
    return free_known(block, block->key, release_v2, NULL);
}

/* Here too what is not the common case takes the ways above. */
EXPORT CUresult cuMemFree_v2(CUdeviceptr pointer)
{
    const struct standing *standing = vgpu_standing_now();
    struct block block;
    if (!USUAL(standing && standing->plain && REAL_HAS(cuMemFree_v2) && block_take_now(&vgpu_memory, pointer, &block)))
        return free_slowly(pointer);
    if (!USUAL(block.kind == BLOCK_PLAIN))
        return free_taken(&block);
    struct tally *tally = tally_of(block.device);
    tally_enter(tally);
    CUresult status = REAL(cuMemFree_v2)(pointer);
    if (!USUAL(status == CUDA_SUCCESS))
        block_put(&vgpu_memory, &block);
    else if (!USUAL(tally_uncharged(tally, ACCOUNT_USED, block.bytes)))
        ledger_uncharge(block.device, ACCOUNT_USED, block.bytes);
    tally_leave(tally);
    return status;
}

static CUresult release_v1(CUdeviceptr pointer, void *data)
{
    (void)data;
    return REAL(cuMemFree)((CUdeviceptr_v1)pointer);
}

EXPORT CUresult cuMemFree(CUdeviceptr_v1 pointer)
{
    ENTER(cuMemFree, (pointer));
    return memory_free(pointer, release_v1, NULL);
}

/* --- a context's own ------------------------------------------------------------------------------- */

static bool of_context(const struct block *block, void *data)
{
    struct swept *swept = data;
    if (block->owner != swept->owner || block->kind == BLOCK_POOL)
        return false;
    if (swept->count == swept->room) {
        size_t room = swept->room ? swept->room * 2 : 64;
        struct block *blocks = realloc(swept->blocks, room * sizeof *blocks);
        if (!blocks)
            return false; /* it stays in its table, charged */
        swept->blocks = blocks;
        swept->room = room;
    }
    swept->blocks[swept->count++] = *block;
    return true;
}

static struct block_map *const swept_maps[SWEPT_MAPS] = {&vgpu_memory, &vgpu_arrays, &vgpu_modules};

void memory_sweep_context(CUcontext context, struct swept swept[SWEPT_MAPS])
{
    for (int i = 0; i < SWEPT_MAPS; i++) {
        swept[i] = (struct swept){.owner = (uintptr_t)context};
        block_sweep(swept_maps[i], of_context, &swept[i]);
    }
}

void memory_sweep_end(struct swept swept[SWEPT_MAPS], bool gone)
{
    for (int i = 0; i < SWEPT_MAPS; i++) {
        enum account account = swept_maps[i] == &vgpu_modules ? ACCOUNT_CONTEXT : ACCOUNT_USED;
        struct block loan;
        for (size_t at = 0; at < swept[i].count; at++)
            if (gone && swept[i].blocks[at].kind == BLOCK_LENT && ipc_lent(swept[i].blocks[at].key, &loan))
                ipc_freed(&loan);
            else if (gone)
                memory_gone(&swept[i].blocks[at], account);
            else
                block_put(swept_maps[i], &swept[i].blocks[at]);
        free(swept[i].blocks);
    }
}
