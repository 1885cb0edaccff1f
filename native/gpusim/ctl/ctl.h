/* SPDX-License-Identifier: Apache-2.0 */
#ifndef GPUSIM_CTL_H
#define GPUSIM_CTL_H

#include "sim.h"

/* The reports of gpusimctl (report.c). Each function takes the lock of the simulated host's state itself. */
void report_devices(bool json);
void report_usage(bool json);
void report_limits(bool json);
void report_log(bool json, uint64_t window_ns, bool intervals);

#endif
