/* SPDX-License-Identifier: Apache-2.0 */
/* gpusimctl: the truth about the simulated host, and its faults, for tests and people. */
#include "sim.h"

#include <stdio.h>

int main(void)
{
    if (sim_attach(SIM_ROLE_TOOL) != SIM_OK) {
        fprintf(stderr, "gpusimctl: %s\n", sim_error());
        return 1;
    }
    return 0;
}
