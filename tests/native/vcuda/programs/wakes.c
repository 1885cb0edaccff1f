/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Simulates 100 s of the library's controller thread, which sleeps and wakes up to check timing events. The library
 * limits the rate of these wake-ups. Usage: wakes SEED EVERY_US. The thread requests a wake-up about every EVERY_US.
 * Prints the most wake-ups in any second, the longest delay of a wake-up in us, and the number of wake-ups that came
 * too early.
 */
#include "compute/pace.h"

#include <stdio.h>
#include <stdlib.h>

enum { MOST = 1000000 };
static uint64_t at[MOST];

int main(int argc, char **argv)
{
    struct wakes wakes = {0};
    unsigned seed = argc > 2 ? (unsigned)atoi(argv[1]) : 1;
    uint64_t every = argc > 2 ? (uint64_t)atoll(argv[2]) * US : US, now = 5000 * MS, end = now + 100000 * MS, late = 0;
    int count = 0, most = 0, early = 0;
    while (now < end && count < MOST) {
        seed = seed * 1103515245u + 12345u;
        uint64_t wanted = now + every / 2 + (seed >> 8) % (every + 1), granted = wakes_take(&wakes, wanted);
        late = granted - wanted > late ? granted - wanted : late;
        early += granted < wanted;
        now = at[count++] = granted;
    }
    for (int first = 0, last = 0; last < count; last++) {
        while (at[last] - at[first] >= 1000 * MS)
            first++;
        most = last - first + 1 > most ? last - first + 1 : most;
    }
    printf("%d %llu %d\n", most, (unsigned long long)(late / US), early);
    return 0;
}
