/* SPDX-License-Identifier: Apache-2.0 */
/* The simulated GPU of the model. Contexts run in time slices, each context has a FIFO queue, and a log records the
 * busy time. */
#ifndef MODEL_GPU_H
#define MODEL_GPU_H

#include <stdbool.h>
#include <stdint.h>

#define CONTEXTS 16
#define DEPTH 2048u
#define BIN_NS 1000000ull

struct item {
    uint64_t left; /* remaining kernel time in ns; 0 for an event */
    uint64_t aside; /* ns for which a copy or host callback occupies the stream but not the GPU */
    uint64_t until; /* time at which the copy or host callback ends; 0 before it starts */
    uint64_t *passed; /* for an event: the GPU writes here the time at which it passed the event */
};

struct context {
    struct item queue[DEPTH];
    uint64_t head, tail;
};

struct gpu {
    uint64_t now, slice_end, switch_until;
    uint64_t slice_ns, switch_ns, end_ns;
    int holder, contexts;
    struct context context[CONTEXTS];
    uint32_t *bins[CONTEXTS]; /* the log: for each context, the ns of each millisecond in which it ran kernels */
    uint64_t busy[CONTEXTS], switching;
};

void gpu_start(struct gpu *gpu, int contexts, uint64_t slice_ns, uint64_t switch_ns, uint64_t end_ns);
void gpu_put(struct gpu *gpu, int context, uint64_t ns, uint64_t *passed);
/* Queues `ns` of work that uses no GPU time (a copy, a host callback) on the context's stream. */
void gpu_put_aside(struct gpu *gpu, int context, uint64_t ns);
uint64_t gpu_depth(const struct gpu *gpu, int context);
void gpu_advance(struct gpu *gpu, uint64_t to);
/* Returns the context's share of the GPU in the window that starts at `from`, in percent. */
double gpu_share(const struct gpu *gpu, int context, uint64_t from, uint64_t window);

#endif
