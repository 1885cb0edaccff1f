/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tests gate.c alone. While a thread of the library compares its charges with NVML's figures, it shuts the gate, and
 * allocations of other threads wait. An allocation that waits too long, for example because NVML does not respond, goes
 * through the shut gate; the gate is then "forced", and the comparing thread can see this. If the gate is shut only
 * briefly, no allocation may force it. If a thread shuts the gate repeatedly, a waiting allocation must go through
 * while the gate is open in between.
 */
#include "account/account.h"
#include "check.h"
#include "events.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

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

/* Shuts the gate while another thread allocates: for `us` microseconds, or until the allocation has gone through if
 * `us` is 0. Returns whether the gate was forced. */
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

/* Shuts the gate for 2 ms. Returns true if the allocation waited until the gate opened. Tries up to ten times, because
 * on a busy machine the sleep may last so long that the allocation forces the gate. */
static bool shut_shortly(void)
{
    for (int i = 0; i < 10; i++)
        if (!forced(2000))
            return true;
    return false;
}

/* Shuts the gate for 5 ms, opens it and shuts it again, until the allocation has gone through. Returns how often the
 * gate was shut again. */
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
    /* A round is quick if the gate is shut again at most three times before the allocation goes through. On a busy
     * machine a thread may start or wake late, so only most of the rounds must be quick. */
    int quick = 0;
    for (int i = 0; i < ROUNDS; i++)
        quick += shut_while_it_waits() <= 3;
    if (quick < ROUNDS * 3 / 4)
        fprintf(stderr, "%d of %d rounds were quick\n", quick, ROUNDS);
    CHECK(quick >= ROUNDS * 3 / 4);
    puts("ok");
    return 0;
}
