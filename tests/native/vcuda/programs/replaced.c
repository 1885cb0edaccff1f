/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tests controller.c, the library's controller thread, alone. Usage: replaced SEED.
 *
 * A fence is a pair of timing events around launches. The controller thread settles fences: it reads their events and
 * charges the launches. If this thread blocks inside the driver, the library starts a new controller thread in its
 * place. In this test other threads add fences while the controller threads block repeatedly. Each fence must still be
 * settled soon. Prints how often a controller thread blocked. This file simulates the contexts.
 */
#include "compute/limiter.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { CONTEXTS = 3, THREADS = 3, ROUNDS = 4, PUTS = 150 };
#define FORGOTTEN_NS (10000 * MS) /* The time limit is generous, because the test machine may be busy. */

/* --- stubs of the rest of the library ---------------------------------------------------------------------------------- */

void *vgpu_real[FUNCTION_COUNT];
struct thread_calls vgpu_threads;
_Atomic int vgpu_log_level = LOG_ERROR;
void vgpu_log_line(enum log_level level, const char *format, ...)
{
    (void)level;
    (void)format;
}

uint64_t limiter_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static _Atomic int put_into[CONTEXTS], open_fences, times_stuck;
static pthread_mutex_t settling[CONTEXTS] = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER};
/* For how long the controller thread blocks when it reads events of context 0. */
static _Atomic unsigned stuck_us;

bool fence_open(void)
{
    return atomic_load(&open_fences) != 0;
}

bool fence_park(uint64_t patience_ns)
{
    (void)patience_ns;
    return true;
}

void fence_settle_context(CUcontext context, uint64_t now)
{
    (void)context;
    (void)now;
}

void fence_wake_waiters(void)
{
}

static struct place {
    char unused;
} places[CONTEXTS];

struct place *fence_place_after(const struct place *place)
{
    size_t next = place ? (size_t)(place - places) + 1 : 0;
    return next < CONTEXTS ? &places[next] : NULL;
}

uint64_t fence_settle_place(struct place *at, uint64_t now, bool *did)
{
    size_t place = (size_t)(at - places);
    *did = true;
    if (pthread_mutex_trylock(&settling[place]))
        return UINT64_MAX;
    int count = atomic_exchange(&put_into[place], 0);
    unsigned us = place == 0 && count ? atomic_load(&stuck_us) : 0;
    if (us) {
        atomic_fetch_add(&times_stuck, 1);
        usleep(us);
    }
    atomic_fetch_sub(&open_fences, count);
    uint64_t again = atomic_load(&put_into[place]) ? now + FENCE_SOON_NS : UINT64_MAX;
    pthread_mutex_unlock(&settling[place]);
    return again;
}

/* --- the program ------------------------------------------------------------------------------------------------ */

static void put(unsigned context)
{
    atomic_fetch_add(&put_into[context], 1);
    atomic_fetch_add(&open_fences, 1);
    controller_tell(limiter_now());
}

static void *puts_many(void *data)
{
    unsigned seed = *(unsigned *)data;
    for (int i = 0; i < PUTS; i++) {
        for (int count = rand_r(&seed) % 20; count; count--)
            put((unsigned)rand_r(&seed) % CONTEXTS);
        usleep((unsigned)rand_r(&seed) % 3000);
    }
    return NULL;
}

static void until_settled(void)
{
    uint64_t from = limiter_now();
    while (fence_open()) {
        usleep(100);
        if (limiter_now() - from > FORGOTTEN_NS) {
            fprintf(stderr, "%d fences were not settled\n", atomic_load(&open_fences));
            exit(1);
        }
    }
}

int main(int argc, char **argv)
{
    unsigned seed = argc > 1 ? (unsigned)atoi(argv[1]) : 1, seeds[THREADS];
    vgpu_threads.create = pthread_create;
    vgpu_threads.detach = pthread_detach;
    put(1); /* The controller thread starts with the second fence. */
    put(1);
    for (int round = 0; round < ROUNDS; round++) {
        pthread_t threads[THREADS];
        stuck_us = round % 3 ? 40000 + (unsigned)rand_r(&seed) % 60000 : 0;
        for (int i = 0; i < THREADS; i++) {
            seeds[i] = (unsigned)rand_r(&seed);
            pthread_create(&threads[i], NULL, puts_many, &seeds[i]);
        }
        for (int i = 0; i < THREADS; i++)
            pthread_join(threads[i], NULL);
        until_settled();
        /* From now on one fence at a time is added, so that it finds the controller thread asleep or about to sleep. */
        for (int single = 0; single < 20; single++) {
            usleep((unsigned)rand_r(&seed) % 8000);
            put((unsigned)rand_r(&seed) % CONTEXTS);
            until_settled();
        }
    }
    printf("%d\n", atomic_load(&times_stuck));
    return 0;
}
