/* SPDX-License-Identifier: Apache-2.0 */
/* Tests src/routes/newer_entry.S alone. If a program looks up a driver function whose parameters the library does not
 * know, the library returns one of the entries of that file instead of the driver's function. Each entry must pass all
 * arguments on to its driver function. Each entry must also mark every device, so that the library then checks the
 * device's memory. */
#include "account/counters.h"

#include <stdio.h>
#include <string.h>

#define ENTRIES 64
#define ENTRY_BYTES 32

struct counters vgpu_counters[VGPU_MAX_DEVICES];
void *_Atomic vgpu_newer_functions[ENTRIES];
extern const char vgpu_newer_entries[ENTRIES * ENTRY_BYTES];

typedef long (*function_type)(long, long, long, long, long, long, long, long, long, long, double, double, double, double);

static long sum(long a, long b, long c, long d, long e, long f, long g, long h, long i, long j, double k, double l, double m,
                double n)
{
    return a + 2 * b + 3 * c + 4 * d + 5 * e + 6 * f + 7 * g + 8 * h + 9 * i + 10 * j + (long)(k + 2 * l + 3 * m + 4 * n);
}

static long other(long a, long b, long c, long d, long e, long f, long g, long h, long i, long j, double k, double l, double m,
                  double n)
{
    return -sum(a, b, c, d, e, f, g, h, i, j, k, l, m, n);
}

int main(void)
{
    long expected = sum(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2, 3, 4);
    for (int i = 0; i < ENTRIES; i++)
        vgpu_newer_functions[i] = i % 3 ? (void *)sum : (void *)other;
    for (int i = 0; i < ENTRIES; i++) {
        function_type entry = (function_type)(vgpu_newer_entries + i * ENTRY_BYTES);
        struct counters marked = {.due = 1};
        memset(vgpu_counters, 0, sizeof vgpu_counters);
        if (entry(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2, 3, 4) != (i % 3 ? expected : -expected))
            return 1 + i;
        for (int device = 0; device < VGPU_MAX_DEVICES; device++)
            if (memcmp(&vgpu_counters[device], &marked, sizeof marked) != 0)
                return 100 + device;
    }
    puts("ok");
    return 0;
}
