/* SPDX-License-Identifier: Apache-2.0 */
/* Interface of stream capture. A stream with capture != NULL records its operations and does not run them. */
#ifndef GPUSIM_CAPTURE_H
#define GPUSIM_CAPTURE_H

#include "driver.h"

enum capture_mode { MODE_GLOBAL = 0, MODE_THREAD_LOCAL = 1, MODE_RELAXED = 2 };

/* Returns the node that an event recorded now refers to, and the capture's id (never 0, never reused). */
CUresult capture_event(CUstream stream, CUgraphNode *node, uint64_t *id);
CUresult capture_wait(CUstream stream, uint64_t from, CUgraphNode node);
/* For a query of, or a wait for, an event of that capture: returns CAPTURED_EVENT; a hostile driver also invalidates
 * the capture. */
CUresult capture_asked(uint64_t id);
/* After a wrong use of the stream: invalidates the stream's capture, if any, on a hostile driver. */
void capture_spoil(CUstream stream);
/* Begins a capture. into: NULL, or a graph whose nodes get the captured operations (same number, kinds and order). */
CUresult capture_begin(CUstream handle, int mode, CUgraph into);
CUresult capture_end(CUstream handle, CUgraph *out);
/* For calls that a capture forbids (allocations, event queries, …): returns an error and invalidates the capture, if
 * this thread's mode and the capture's mode forbid the call. Costs one load while no stream is captured. */
CUresult capture_forbids(void);
/* Does the same for calls that only a hostile driver refuses. */
CUresult capture_forbids_also(void);

#endif
