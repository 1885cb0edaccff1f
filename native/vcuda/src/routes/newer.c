/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a program gets for a form of a function that is newer than this library (driver/forms.c): an entry that marks every
 * device due and jumps to the driver's function, with all that it was called with in place. A device that is due is looked
 * at when the next allocation or free ends: what NVML shows beyond the charge is charged then (context/unaccounted.c).
 */
#include "hooks.h"

#include "account/counters.h"

#include <stddef.h>

/* newer_entry.S knows these numbers. */
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
            vgpu_log(LOG_INFO, "%s: this driver's form is newer than this library; what it takes is charged a step later", name);
        else if (there != function)
            continue;
        return (void *)(vgpu_newer_entries + i * ENTRY_BYTES);
    }
    return function; /* more than any driver has */
}
