/* SPDX-License-Identifier: Apache-2.0 */
/* Types of CUDA modules and functions, for module.c, function.c and launch.c. */
#ifndef GPUSIM_MODULE_H
#define GPUSIM_MODULE_H

#include "driver.h"

#define FUNCTION_MAGIC 0x46554e31u
#define KERNEL_MAGIC 0x4b524e31u
#define FUNCTION_ATTRIBUTES 16

struct CUfunc_st {
    uint32_t magic;
    CUmodule module;
    char *name;
    struct kernel_cost cost;
    bool declared;
    int attributes[FUNCTION_ATTRIBUTES];
    unsigned block[3], shared; /* Parameters of the launch calls from before CUDA 4. */
    CUfunction next;
};

/* A kernel or a global variable that a parsed module image declares (image.c). */
struct image_entry {
    char *name;
    uint64_t bytes; /* Size of a global variable; 0 for a kernel. */
    bool managed;
    struct kernel_cost cost;
    bool declared;
    struct image_entry *next;
};

struct image {
    struct image_entry *entries;
    uint64_t code_bytes;
    /* Time in ns that the code takes to load. */
    uint64_t load_ns;
    /* True for machine code, which the simulator does not parse: every name counts as a kernel. */
    bool any_name;
};

/* Finds the global variable of that name; with `managed` only a variable in unified memory. */
CUresult module_global(CUdeviceptr *pointer, size_t *bytes, CUmodule module, const char *name, bool managed);

CUresult image_parse(const void *data, struct image *out);
void image_free(struct image *image);
CUresult image_read_file(const char *path, char **out);

#endif
