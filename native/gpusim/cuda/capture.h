/* SPDX-License-Identifier: Apache-2.0 */
/* Interface of stream capture, which records the operations of a stream into a graph and does not run them. A stream is
 * being captured if its field `capture` is not NULL. A "hostile" driver has behaviours that CUDA allows and most
 * drivers avoid (hostile.h). */
#ifndef GPUSIM_CAPTURE_H
#define GPUSIM_CAPTURE_H

#include "driver.h"

enum capture_mode { MODE_GLOBAL = 0, MODE_THREAD_LOCAL = 1, MODE_RELAXED = 2 };

/* Records an event in the stream's capture: returns the graph node for which the event stands, and the capture's id
 * (never 0, never reused). */
CUresult capture_event(CUstream stream, CUgraphNode *node, uint64_t *id);
CUresult capture_wait(CUstream stream, uint64_t from, CUgraphNode node);
/* Called if the program queries, or awaits on the host, an event that was recorded in the capture with this id. Returns
 * CAPTURED_EVENT; a hostile driver also invalidates the capture. */
CUresult capture_asked(uint64_t id);
/* Called after a wrong use of the stream, such as the record of another context's event. A hostile driver invalidates
 * the stream's capture, if there is one. */
void capture_spoil(CUstream stream);
/* Begins a capture. `into` is NULL for a new graph. Otherwise it is an existing graph that the capture updates: the
 * captured operations must match its nodes in number, kind and order. */
CUresult capture_begin(CUstream handle, int mode, CUgraph into);
CUresult capture_end(CUstream handle, CUgraph *out);
/* Called by functions that a capture may forbid (allocations, event queries, …). Returns an error and invalidates the
 * capture if this thread's mode and the capture's mode forbid the call. Costs one load while no stream is captured. */
CUresult capture_forbids(void);
/* Like capture_forbids(), for calls that only a hostile driver refuses. */
CUresult capture_forbids_also(void);

#endif
