/* SPDX-License-Identifier: Apache-2.0 */
/* This program kills itself while it holds the lock of the simulator's state. At this moment all of its memory is
 * charged to the process, but only a part to the GPU. */
#include "sim.h"

#include <signal.h>
#include <stdio.h>

int main(void)
{
    if (sim_attach(SIM_ROLE_CUDA) != SIM_OK) {
        fprintf(stderr, "%s\n", sim_error());
        return 1;
    }
    sim_lock();
    sim_state()->procs[sim_slot()].use[0].memory += 123456;
    sim_state()->gpus[0].used += 1000; /* This charge is smaller than that of the process on purpose. */
    raise(SIGKILL);
    return 1;
}
