/* SPDX-License-Identifier: Apache-2.0 */
#ifndef GPUSIM_CTL_H
#define GPUSIM_CTL_H

#include "sim.h"

/* Functions of report.c. They take the lock themselves. */
void report_devices(bool json);
void report_usage(bool json);
void report_limits(bool json);
void report_log(bool json, uint64_t window_ns, bool intervals);

#endif
