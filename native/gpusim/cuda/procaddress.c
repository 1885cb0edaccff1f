/* SPDX-License-Identifier: Apache-2.0 */
/* Implements both versions of cuGetProcAddress, which returns a driver function for a name, and cuGetExportTable. */
#include "procaddress.h"

#include "driver.h"

#include <string.h>

enum { FLAG_DEFAULT = 0, FLAG_LEGACY = 1, FLAG_PER_THREAD = 2 };
enum { STATUS_FOUND = 0, STATUS_NO_SYMBOL = 1, STATUS_OLD_VERSION = 2 };

static const struct proc_address *first_of(const char *name)
{
    unsigned low = 0, high = proc_address_count;
    while (low < high) {
        unsigned middle = (low + high) / 2;
        if (strcmp(proc_addresses[middle].name, name) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low < proc_address_count && strcmp(proc_addresses[low].name, name) == 0 ? &proc_addresses[low] : NULL;
}

static CUresult lookup(const char *name, void **out, int version, uint64_t flags, int *status)
{
    REQUIRE(name && out && flags <= FLAG_PER_THREAD, CUDA_ERROR_INVALID_VALUE);
    const struct proc_address *row = first_of(name), *end = proc_addresses + proc_address_count;
    const struct proc_address *legacy = NULL, *per_thread = NULL;
    *out = NULL;
    int found = row ? STATUS_OLD_VERSION : STATUS_NO_SYMBOL;
    bool has_per_thread = false;
    for (const struct proc_address *one = row; one && one < end && strcmp(one->name, name) == 0; one++)
        has_per_thread = has_per_thread || one->per_thread;
    for (; row && row < end && strcmp(row->name, name) == 0; row++)
        if (row->version <= version)
            /* The rows are sorted by version, so the last match is the newest. */
            *(row->per_thread ? &per_thread : &legacy) = row;
    /* A name without any per-thread form uses the legacy form. If the name has a per-thread form, but only since a
     * later version than the requested one, no function is returned. */
    const struct proc_address *best = flags == FLAG_PER_THREAD && has_per_thread ? per_thread : legacy;
    if (best) {
        *out = best->symbol;
        found = STATUS_FOUND;
    }
    if (status)
        *status = found;
    return found == STATUS_FOUND ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags)
{
    return lookup(symbol, function, version, flags, NULL);
}

EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status)
{
    CUresult result = lookup(symbol, function, version, flags, status);
    /* A missing name is no error in version 2: the pointer is NULL, and *status reports that the name is missing. */
    return result == CUDA_ERROR_NOT_FOUND ? CUDA_SUCCESS : result;
}

static CUresult table_slot(void)
{
    return CUDA_ERROR_NOT_SUPPORTED;
}

/* The tables are private to NVIDIA's driver and runtime. Any id but that of private.h gets a table in the driver's
 * format (its size in bytes, then functions). Each function returns NOT_SUPPORTED, so that a caller fails and does not
 * crash. */
EXPORT CUresult cuGetExportTable(const void **table, const CUuuid *id)
{
    enum { SLOTS = 64 };
    static const void *slots[SLOTS + 1];
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    REQUIRE(table && id, CUDA_ERROR_INVALID_VALUE);
    *table = private_table(id);
    if (*table)
        return CUDA_SUCCESS;
    pthread_mutex_lock(&mutex);
    slots[0] = (const void *)(uintptr_t)sizeof slots;
    for (int i = 1; i <= SLOTS; i++)
        slots[i] = (const void *)(uintptr_t)table_slot;
    pthread_mutex_unlock(&mutex);
    *table = slots;
    return CUDA_SUCCESS;
}
