/* SPDX-License-Identifier: Apache-2.0 */
/* Table of cuGetProcAddress, written by generate.py. Sorted by name, then legacy before per-thread, then version. */
#ifndef GPUSIM_PROCADDRESS_H
#define GPUSIM_PROCADDRESS_H

#include "cuda_abi.h"

struct proc_address {
    const char *name;
    int version; /* first CUDA version that gets this symbol */
    int per_thread;
    void *symbol;
};

extern const struct proc_address proc_addresses[];
extern const unsigned proc_address_count;

#endif
