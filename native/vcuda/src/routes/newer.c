/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Has the entries for driver functions whose version is newer than this library (driver/forms.c). A program gets an
 * entry in place of such a function. The entry sets the flag `due` for every device and jumps to the driver's function
 * with all parameters unchanged. Because of the flag, the next allocation or free compares the memory that NVML shows
 * with the charge, and charges the difference (context/unaccounted.c).
 */
#include "hooks.h"

#include "account/counters.h"

#include <stddef.h>

/* newer_entry.S uses these numbers, so they must not be changed here alone. */
#define ENTRIES 64
#define ENTRY_BYTES 32
_Static_assert(offsetof(struct counters, due) == 8 && sizeof(struct counters) == 64 && VGPU_MAX_DEVICES == 16, "newer_entry.S");

void *_Atomic vgpu_newer_functions[ENTRIES];
extern const char vgpu_newer_entries[ENTRIES * ENTRY_BYTES];

void *newer_form(const char *name, void *function)
{
    for (int i = 0; i < ENTRIES; i++) {
        void *there = NULL;
        if (atomic_compare_exchange_strong(&vgpu_newer_functions[i], &there, function))
            vgpu_log(LOG_INFO, "%s: the driver's version is newer than this library, so its memory is charged at a later call", name);
        else if (there != function)
            continue;
        return (void *)(vgpu_newer_entries + i * ENTRY_BYTES);
    }
    /* No entry is left, so the program gets the function itself. This happens only if the program uses more than 64
     * such functions. */
    return function;
}
