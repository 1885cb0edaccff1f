/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tests gate.c alone. The gate holds back allocations while a thread compares the ledger with NVML's figures. Here a
 * reader shuts the gate and queries NVML, which does not respond. An allocation that waited too long forces its way
 * through, and the reader can see this. A short wait ends without force. A reader that shuts the gate repeatedly must
 * let waiting allocations through in between.
 */
#include "account/account.h"
#include "events.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
            exit(1); \
        } \
    } while (0)

enum { DEVICE = 3, ROUNDS = 20 };
struct counters vgpu_counters[VGPU_MAX_DEVICES] = {[DEVICE] = {.device = DEVICE}};
const struct events vgpu_events;
static _Atomic bool through;

static void *allocates(void *unused)
{
    (void)unused;
    FLIGHT(DEVICE);
    through = true;
    return NULL;
}

/* Shuts the gate for `us` microseconds, or with 0 until the allocation went through. Returns whether the allocation
 * forced its way through the gate. */
static bool forced(unsigned us)
{
    pthread_t thread;
    through = false;
    CHECK(gate_shut(DEVICE) && !gate_forced(DEVICE));
    pthread_create(&thread, NULL, allocates, NULL);
    if (us)
        usleep(us);
    while (!us && !through)
        usleep(1000);
    bool found = gate_forced(DEVICE);
    gate_open(DEVICE);
    pthread_join(thread, NULL);
    CHECK(through && atomic_load(&vgpu_counters[DEVICE].flying) == 0);
    return found;
}

/* Returns whether a gate shut for 2 ms was not forced. Tries ten times, since a sleep may last too long on a busy machine. */
static bool shut_shortly(void)
{
    for (int i = 0; i < 10; i++)
        if (!forced(2000))
            return true;
    return false;
}

/* Shuts the gate for 5 ms again and again until the allocation went through. Returns how often it shut the gate. */
static int shut_while_it_waits(void)
{
    pthread_t thread;
    int times = 0;
    through = false;
    CHECK(gate_shut(DEVICE));
    pthread_create(&thread, NULL, allocates, NULL);
    do {
        usleep(5000);
        gate_open(DEVICE);
        CHECK(gate_shut(DEVICE));
        times++;
    } while (!through);
    gate_open(DEVICE);
    pthread_join(thread, NULL);
    return times;
}

int main(void)
{
    alarm(20);
    CHECK(shut_shortly());
    CHECK(forced(0));
    CHECK(shut_shortly());
    /* On a busy machine a thread may start or wake late, so only most of the rounds must be quick. */
    int quick = 0;
    for (int i = 0; i < ROUNDS; i++)
        quick += shut_while_it_waits() <= 3;
    if (quick < ROUNDS * 3 / 4)
        fprintf(stderr, "%d of %d rounds were quick\n", quick, ROUNDS);
    CHECK(quick >= ROUNDS * 3 / 4);
    puts("ok");
    return 0;
}
