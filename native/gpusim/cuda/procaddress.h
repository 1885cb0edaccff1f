/* SPDX-License-Identifier: Apache-2.0 */
/* The table of cuGetProcAddress, which generate.py writes. It is sorted by name, then by stream kind (legacy before
 * per-thread), then by version. */
#ifndef GPUSIM_PROCADDRESS_H
#define GPUSIM_PROCADDRESS_H

#include "cuda_abi.h"

struct proc_address {
    const char *name;
    int version; /* The first CUDA version for which cuGetProcAddress returns this symbol. */
    int per_thread;
    void *symbol;
};

extern const struct proc_address proc_addresses[];
extern const unsigned proc_address_count;

#endif
