/* SPDX-License-Identifier: Apache-2.0 */
/* The simulated GPU of the model; gpu.h describes it. It runs the queued work of the contexts and records for how long
 * the GPU is busy. */
#include "gpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void gpu_start(struct gpu *gpu, int contexts, uint64_t slice_ns, uint64_t switch_ns, uint64_t end_ns)
{
    memset(gpu, 0, sizeof *gpu);
    gpu->contexts = contexts;
    gpu->slice_ns = slice_ns;
    gpu->switch_ns = switch_ns;
    gpu->end_ns = end_ns;
    gpu->holder = -1;
    for (int i = 0; i < contexts; i++)
        gpu->bins[i] = calloc(end_ns / BIN_NS + 2, sizeof **gpu->bins);
}

uint64_t gpu_depth(const struct gpu *gpu, int context)
{
    return gpu->context[context].tail - gpu->context[context].head;
}

static void put(struct gpu *gpu, int context, struct item item)
{
    struct context *c = &gpu->context[context];
    if (c->tail - c->head >= DEPTH) {
        fprintf(stderr, "model: the queue of context %d is full\n", context);
        exit(2);
    }
    c->queue[c->tail++ % DEPTH] = item;
}

void gpu_put(struct gpu *gpu, int context, uint64_t ns, uint64_t *passed)
{
    put(gpu, context, (struct item){.left = ns, .passed = passed});
}

void gpu_put_aside(struct gpu *gpu, int context, uint64_t ns)
{
    put(gpu, context, (struct item){.aside = ns});
}

static void note(struct gpu *gpu, int context, uint64_t from, uint64_t to)
{
    gpu->busy[context] += to - from;
    while (from < to && from < gpu->end_ns) {
        uint64_t edge = (from / BIN_NS + 1) * BIN_NS, until = to < edge ? to : edge;
        gpu->bins[context][from / BIN_NS] += (uint32_t)(until - from);
        from = until;
    }
}

/* Returns whether the context has a kernel to run. Events at the head of the queue take no time, so this function
 * completes them first. */
static bool ready(struct gpu *gpu, int context)
{
    struct context *c = &gpu->context[context];
    for (; c->head != c->tail; c->head++) {
        struct item *item = &c->queue[c->head % DEPTH];
        if (item->passed)
            *item->passed = gpu->now;
        else if (!item->aside)
            return true;
        else if (!item->until)
            item->until = gpu->now + item->aside;
        if (item->until > gpu->now)
            return false;
    }
    return false;
}

/* Returns the earliest time before `to` at which a copy or host callback ends, or `to`. */
static uint64_t back(const struct gpu *gpu, uint64_t to)
{
    for (int i = 0; i < gpu->contexts; i++) {
        const struct context *c = &gpu->context[i];
        uint64_t until = c->head != c->tail ? c->queue[c->head % DEPTH].until : 0;
        to = until > gpu->now && until < to ? until : to;
    }
    return to;
}

void gpu_advance(struct gpu *gpu, uint64_t to)
{
    while (gpu->now < to) {
        int holder = gpu->holder;
        bool has_work = holder >= 0 && ready(gpu, holder);
        if (!has_work || gpu->now >= gpu->slice_end) {
            int next = -1;
            for (int step = 1; step <= gpu->contexts && next < 0; step++) {
                int other = holder < 0 ? step - 1 : (holder + step) % gpu->contexts;
                if (other != holder && ready(gpu, other))
                    next = other;
            }
            if (next >= 0) {
                gpu->switch_until = holder < 0 ? gpu->now : gpu->now + gpu->switch_ns;
                gpu->slice_end = gpu->switch_until + gpu->slice_ns;
                gpu->holder = next;
            } else if (has_work) {
                gpu->slice_end = gpu->now + gpu->slice_ns;
            } else {
                gpu->now = back(gpu, to);
                if (gpu->now == to)
                    return;
            }
            continue;
        }
        if (gpu->now < gpu->switch_until) {
            uint64_t until = gpu->switch_until < to ? gpu->switch_until : to;
            gpu->switching += until - gpu->now;
            gpu->now = until;
            continue;
        }
        struct context *c = &gpu->context[holder];
        struct item *item = &c->queue[c->head % DEPTH];
        uint64_t until = gpu->now + item->left;
        if (until > gpu->slice_end)
            until = gpu->slice_end;
        if (until > to)
            until = to;
        note(gpu, holder, gpu->now, until);
        item->left -= until - gpu->now;
        gpu->now = until;
        if (!item->left)
            c->head++;
    }
    for (int i = 0; i < gpu->contexts; i++)
        ready(gpu, i);
}

double gpu_share(const struct gpu *gpu, int context, uint64_t from, uint64_t window)
{
    double sum = 0;
    for (uint64_t bin = from / BIN_NS; bin < (from + window) / BIN_NS; bin++)
        sum += gpu->bins[context][bin];
    return 100.0 * sum / (double)window;
}
