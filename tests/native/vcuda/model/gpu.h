/* SPDX-License-Identifier: Apache-2.0 */
/* The simulated GPU of the model (model.c). Each CUDA context has a first-in, first-out queue of work. The GPU runs one
 * context at a time and switches between them in time slices. A log records when each context ran. */
#ifndef MODEL_GPU_H
#define MODEL_GPU_H

#include <stdbool.h>
#include <stdint.h>

#define CONTEXTS 16
#define DEPTH 2048u
#define BIN_NS 1000000ull

struct item {
    uint64_t left; /* Remaining kernel time in ns; 0 for an event. */
    uint64_t aside; /* Duration in ns of a copy or host callback, which occupies the stream but not the GPU. */
    uint64_t until; /* Time at which the copy or host callback ends; 0 before it starts. */
    uint64_t *passed; /* For an event: where the GPU writes the time at which it passed the event. */
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
    uint32_t *bins[CONTEXTS]; /* The log: for each context and millisecond, for how many ns the context ran kernels. */
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
