/* SPDX-License-Identifier: Apache-2.0 */
/* Stream capture: what the other files must know of it. A stream with capture != NULL records instead of running. */
#ifndef GPUSIM_CAPTURE_H
#define GPUSIM_CAPTURE_H

#include "driver.h"

CUresult capture_event(CUstream stream, CUgraphNode *node); /* the node that an event recorded now stands for */
CUresult capture_wait(CUstream stream, struct capture *from, CUgraphNode node);
/* For calls that a capture forbids (allocating, querying events, …): refused, and the capture is void, where this
 * thread's mode and the capture's say so. One load when nothing is captured. */
CUresult capture_forbids(void);

#endif
