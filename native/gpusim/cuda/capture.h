/* SPDX-License-Identifier: Apache-2.0 */
/* Stream capture: what the other files must know of it. A stream with capture != NULL records instead of running. */
#ifndef GPUSIM_CAPTURE_H
#define GPUSIM_CAPTURE_H

#include "driver.h"

enum capture_mode { MODE_GLOBAL = 0, MODE_THREAD_LOCAL = 1, MODE_RELAXED = 2 };

/* The node that an event recorded now stands for, and the capture's number (never 0, never used again). */
CUresult capture_event(CUstream stream, CUgraphNode *node, uint64_t *id);
CUresult capture_wait(CUstream stream, uint64_t from, CUgraphNode node);
/* An event of that capture was asked or waited for: CAPTURED_EVENT, and on a hostile driver the capture is void. */
CUresult capture_asked(uint64_t id);
void capture_spoil(CUstream stream); /* a wrong use of it: its capture, if it is in one, is void on a hostile driver */
/* into: NULL, or a graph whose nodes get the operations captured, which must be as many and of the same kinds in order. */
CUresult capture_begin(CUstream handle, int mode, CUgraph into);
CUresult capture_end(CUstream handle, CUgraph *out);
/* For calls that a capture forbids (allocating, querying events, …): refused, and the capture is void, where this
 * thread's mode and the capture's say so. One load when nothing is captured. */
CUresult capture_forbids(void);
CUresult capture_forbids_also(void); /* … for calls that only a hostile driver refuses then */

#endif
