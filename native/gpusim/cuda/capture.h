/* SPDX-License-Identifier: Apache-2.0 */
/* Stream capture: what the other files must know of it. A stream with capture != NULL records instead of running. */
#ifndef GPUSIM_CAPTURE_H
#define GPUSIM_CAPTURE_H

#include "driver.h"

CUresult capture_event(CUstream stream, CUgraphNode *node); /* the node that an event recorded now stands for */
CUresult capture_wait(CUstream stream, struct capture *from, CUgraphNode node);

#endif
