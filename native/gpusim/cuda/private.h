/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A private table of functions with which a test bypasses every hook of a library that intercepts the driver API.
 * cuGetExportTable returns the table for an id of gpusim. The functions simulate the private interface between a driver
 * and its runtime. NVIDIA's own private tables are not simulated.
 */
#ifndef GPUSIM_PRIVATE_H
#define GPUSIM_PRIVATE_H

#include <stddef.h>

/* The 16 bytes of the id, text without a terminating zero: 6770 7573 696d 2d70 7269 7661 7465 2d31. */
#define GPUSIM_PRIVATE_ID "gpusim-private-1"

enum gpusim_moment { GPUSIM_MODULE_LOADED = 1, GPUSIM_LIBRARY_LOADED = 2, GPUSIM_CONTEXT_CREATED = 3 };

/* A tool's callback. The driver calls it inside a driver call, on the caller's thread. handle is the module, the
 * library or the context. */
typedef void (*gpusim_callback)(void *data, enum gpusim_moment moment, void *handle);

/* Results are CUresult, contexts CUcontext. */
struct gpusim_private {
    size_t bytes; /* Size of this table. */
    int (*primary_retain)(void **context, int device);
    int (*primary_release)(int device);
    int (*set_current)(void *context);
    /* Subscribes the process's only tool; NULL unsubscribes. Returns NOT_SUPPORTED without `hostile = callbacks`. */
    int (*subscribe)(gpusim_callback callback, void *data);
    /* Allocates in the name of the process that opened the driver, as an ioctl of the kernel driver would. A forked
     * child may call it, although the driver API refuses a forked child. Returns 1 if the calling process now has these
     * bytes until it ends. */
    int (*raw_take)(int device, size_t bytes);
};

#endif
