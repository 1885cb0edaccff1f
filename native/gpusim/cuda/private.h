/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a test reaches past every hook: cuGetExportTable with an id of gpusim's own. It stands for what a driver and the
 * runtime that comes with it settle between themselves, and says nothing of NVIDIA's own tables, which are not answered.
 */
#ifndef GPUSIM_PRIVATE_H
#define GPUSIM_PRIVATE_H

#include <stddef.h>

/* The 16 bytes of the id, as text without its end: 6770 7573 696d 2d70 7269 7661 7465 2d31. */
#define GPUSIM_PRIVATE_ID "gpusim-private-1"

enum gpusim_moment { GPUSIM_MODULE_LOADED = 1, GPUSIM_LIBRARY_LOADED = 2, GPUSIM_CONTEXT_CREATED = 3 };

/* Called on the caller's thread, inside the driver's call. handle: the module, the library or the context. */
typedef void (*gpusim_callback)(void *data, enum gpusim_moment moment, void *handle);

/* Results are CUresult, contexts CUcontext. */
struct gpusim_private {
    size_t bytes; /* of this table */
    int (*primary_retain)(void **context, int device);
    int (*primary_release)(int device);
    int (*set_current)(void *context);
    /* One a process, NULL ends it. NOT_SUPPORTED where the profile has no `hostile = callbacks`. */
    int (*subscribe)(gpusim_callback callback, void *data);
    /* What a program asks the kernel driver for itself, in the name of the process that opened it: a forked child may, which
     * the driver API refuses. 1: it has these bytes of the GPU until it ends. */
    int (*raw_take)(int device, size_t bytes);
};

#endif
