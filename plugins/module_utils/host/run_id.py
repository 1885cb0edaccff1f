# SPDX-License-Identifier: Apache-2.0
"""Makes run ids. A run of the isolation check puts its id into the name of each object that it creates. So the
leftovers of a killed run can be distinguished from the objects of a check that still runs. The id holds the pid of the
run's process. It also holds the start time of the process and the id of the boot, because the kernel reuses pids, above
all after a reboot.
"""

from __future__ import annotations

import os
import re
import time

MARK = re.compile(r"(\d+)\.(\d+)\.([0-9a-f]+)")
# Digits of the boot's random id in a run id: containerd accepts names of at most 76 characters.
BOOT_DIGITS = 12
# Matches run ids of former versions, which were only a pid. Still older versions had no run id.
FORMER = re.compile(r"\d*")
# Seconds after which an object without a run id is stale, because no run took that long.
LONGEST_S = 3600.0
# Seconds by which the clock may have been set between the start of a process and the creation of its object.
SET_S = 60.0
# Index of the process's start time in /proc/<pid>/stat, counted from the field after the name.
START = 19


def own(proc: str = "/proc") -> str:
    """Returns the run id of this process: letters, digits and dots."""
    pid = str(os.getpid())
    return f"{pid}.{_start_of(pid, proc)}.{_boot(proc)}"


def has_ended(mark: str, proc: str = "/proc", made: float | None = None) -> bool:
    """Returns whether the run with this id has ended, so that its objects may be removed. A text that is no run id
    gives False. ``made``: when the object was created, in seconds since 1970; it is needed only for the ids of former
    versions.
    """
    if FORMER.fullmatch(mark):
        return _has_former_ended(mark, proc, made)
    found = MARK.fullmatch(mark)
    if not found:
        return False
    pid, start, boot = found.groups()
    return boot != _boot(proc) or start != _start_of(pid, proc)


def _has_former_ended(pid: str, proc: str, made: float | None) -> bool:
    if not pid:
        return made is not None and time.time() - made > LONGEST_S
    start = _start_of(pid, proc)
    if not start:
        return True
    booted = _booted(proc)
    # A process that began after the object was created did not create the object, but reuses the pid.
    began = booted + int(start) / os.sysconf("SC_CLK_TCK")
    return made is not None and booted > 0.0 and began > made + SET_S


def _start_of(pid: str, proc: str) -> str:
    """Returns the clock ticks from the boot to the start of the process, empty if the process is gone."""
    try:
        with open(f"{proc}/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            text = stream.read()
    except OSError:
        return ""
    # The process name, in parentheses, may hold any character, also spaces and parentheses.
    return text.rpartition(")")[2].split()[START]


def _boot(proc: str) -> str:
    with open(f"{proc}/sys/kernel/random/boot_id", encoding="utf-8") as stream:
        return stream.read().replace("-", "").strip()[:BOOT_DIGITS]


def _booted(proc: str) -> float:
    """Returns when the host was started, in seconds since 1970; 0 if /proc does not report it."""
    with open(f"{proc}/stat", encoding="utf-8") as stream:
        found = re.search(r"^btime (\d+)$", stream.read(), re.M)
    return float(found[1]) if found else 0.0
