/* SPDX-License-Identifier: Apache-2.0 */
/*
 * race PROCESSES ROUNDS
 *
 * Tests whether processes that allocate at the same moment exceed the limit. In every round all processes wait at a
 * barrier and then allocate two thirds of the free memory, so only one can get it. Ends with one line of JSON; "over"
 * is the number of rounds in which more than one process got the memory.
 */
#include "gpu.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>

struct board {
    pthread_barrier_t ready, asked, freed;
    _Atomic unsigned winners, over, none, broken, other;
    _Atomic int status;
    _Atomic size_t piece;
};

static int racer(struct board *board, int first, unsigned rounds)
{
    CUcontext context;
    size_t free_bytes = 0, total;
    gpu_open();
    CUresult status = CALL(cuInit, 0);
    if (status == CUDA_SUCCESS)
        status = CALL(cuCtxCreate_v2, &context, 0, 0);
    if (status != CUDA_SUCCESS) {
        atomic_store(&board->status, status);
        atomic_fetch_add(&board->broken, 1);
    }
    pthread_barrier_wait(&board->ready); /* All contexts are created now. */
    if (first && CALL(cuMemGetInfo_v2, &free_bytes, &total) == CUDA_SUCCESS)
        atomic_store(&board->piece, free_bytes / 3 * 2);
    for (unsigned i = 0; i < rounds; i++) {
        CUdeviceptr pointer = 0;
        pthread_barrier_wait(&board->ready);
        if (atomic_load(&board->broken))
            break; /* Every process reads `broken` after the same barrier, so all stop. */
        status = CALL(cuMemAlloc_v2, &pointer, atomic_load(&board->piece));
        if (status == CUDA_SUCCESS)
            atomic_fetch_add(&board->winners, 1);
        else if (status != CUDA_ERROR_OUT_OF_MEMORY)
            atomic_fetch_add(&board->other, 1);
        pthread_barrier_wait(&board->asked);
        if (first) {
            unsigned winners = atomic_exchange(&board->winners, 0);
            board->over += winners > 1;
            board->none += winners == 0;
        }
        if (status == CUDA_SUCCESS && CALL(cuMemFree_v2, pointer) != CUDA_SUCCESS)
            atomic_fetch_add(&board->other, 1);
        pthread_barrier_wait(&board->freed);
    }
    return 0;
}

int main(int argc, char **argv)
{
    if (argc != 3)
        gpu_fail("usage: race PROCESSES ROUNDS", argc);
    unsigned processes = (unsigned)atoi(argv[1]), rounds = (unsigned)atoi(argv[2]);
    struct board *board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (board == MAP_FAILED)
        gpu_fail("mmap", 0);
    pthread_barrierattr_t shared;
    pthread_barrierattr_init(&shared);
    pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&board->ready, &shared, processes);
    pthread_barrier_init(&board->asked, &shared, processes);
    pthread_barrier_init(&board->freed, &shared, processes);
    for (unsigned i = 0; i < processes; i++)
        if (fork() == 0) /* No process may call the driver before the fork. */
            _exit(racer(board, i == 0, rounds));
    int status;
    unsigned died = 0;
    while (wait(&status) > 0)
        died += status != 0;
    printf("{\"processes\": %u, \"rounds\": %u, \"piece\": %zu, \"over\": %u, \"none\": %u, \"broken\": %u, \"status\": %d, "
           "\"other\": %u, \"died\": %u}\n",
           processes, rounds, board->piece, board->over, board->none, board->broken, board->status, board->other, died);
    return 0;
}
