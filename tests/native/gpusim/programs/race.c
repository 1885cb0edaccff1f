/* SPDX-License-Identifier: Apache-2.0 */
/* Several threads concurrently charge memory to a simulated GPU and end their charges. Usage: race THREADS ROUNDS
 * BYTES. Fails if more than the GPU's memory was charged at any time, or if a charge is left at the end. */
#include "sim.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

static unsigned rounds;
static uint64_t bytes;

static void *run(void *unused)
{
    (void)unused;
    for (unsigned i = 0; i < rounds; i++) {
        if (sim_charge(0, SIM_MEMORY, bytes) != SIM_OK)
            continue;
        sim_lock();
        bool over = sim_state()->gpus[0].used > sim_state()->gpus[0].total;
        sim_unlock();
        if (over) {
            fprintf(stderr, "more bytes charged than the GPU has\n");
            exit(1);
        }
        sim_uncharge(0, SIM_MEMORY, bytes);
    }
    return NULL;
}

int main(int argc, char **argv)
{
    pthread_t threads[16];
    unsigned count = argc == 4 ? (unsigned)atoi(argv[1]) : 0;
    if (count < 1 || count > 16 || sim_attach(SIM_ROLE_CUDA) != SIM_OK) {
        fprintf(stderr, "usage: race THREADS ROUNDS BYTES; %s\n", sim_error());
        return 1;
    }
    rounds = (unsigned)atoi(argv[2]);
    bytes = strtoull(argv[3], NULL, 10);
    for (unsigned i = 0; i < count; i++)
        pthread_create(&threads[i], NULL, run, NULL);
    for (unsigned i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
    uint64_t left = sim_usage_bytes(&sim_state()->procs[sim_slot()].use[0]);
    if (left)
        fprintf(stderr, "%llu bytes left\n", (unsigned long long)left);
    return left != 0;
}
