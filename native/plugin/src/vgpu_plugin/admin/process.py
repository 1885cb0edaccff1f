# SPDX-License-Identifier: Apache-2.0
"""Metrics of the plugin's own process, under the names that Prometheus' client libraries use."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from .exposition import Exposition

TYPES = {
    "process_cpu_seconds_total": ("counter", "CPU time that the program used."),
    "process_resident_memory_bytes": ("gauge", "Resident memory of the program."),
    "process_start_time_seconds": ("gauge", "Start time of the program, in seconds since 1970."),
    "process_open_fds": ("gauge", "Number of file descriptors that the program has open."),
    "process_max_fds": ("gauge", "Maximum number of open file descriptors."),
}
SELF = Path("/proc/self")


def text() -> str:
    """Returns the metrics of this process. Values that cannot be read are left out."""
    found = Exposition(TYPES)
    try:
        # The second field of /proc/self/stat is the program's name in parentheses, which may contain spaces. So the
        # fields are counted from the closing parenthesis.
        fields = (SELF / "stat").read_text().rpartition(")")[2].split()
        ticks, pages = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
        boot = next(float(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if "btime" in line)
        found.add("process_cpu_seconds_total", (int(fields[11]) + int(fields[12])) / ticks)
        found.add("process_resident_memory_bytes", int(fields[21]) * pages)
        found.add("process_start_time_seconds", boot + int(fields[19]) / ticks)
        found.add("process_open_fds", len(os.listdir(SELF / "fd")))
    except (OSError, ValueError, IndexError, StopIteration):
        pass
    found.add("process_max_fds", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return found.text()
