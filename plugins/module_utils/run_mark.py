# SPDX-License-Identifier: Apache-2.0
"""The mark by which a run of the isolation check names what it makes, so that what a killed one left can be told from
what a living one uses: its pid, when that process started, and the boot. A pid alone is soon another's, after a reboot
above all.
"""

from __future__ import annotations

import os
import re

MARK = re.compile(r"(\d+)\.(\d+)\.([0-9a-f]+)")
# Of the boot's random id; containerd takes no name of more than 76 characters.
BOOT_DIGITS = 12
# In /proc/<pid>/stat, counted from the field after the name.
START = 19


def own(proc: str = "/proc") -> str:
    """Of this process: letters, digits and dots."""
    pid = str(os.getpid())
    return f"{pid}.{_start_of(pid, proc)}.{_boot(proc)}"


def is_over(mark: str, proc: str = "/proc") -> bool:
    """Whether the run with this mark has ended, so that what is named after it may go. What is no mark names none of
    our runs.
    """
    found = MARK.fullmatch(mark)
    if not found:
        return False
    pid, start, boot = found.groups()
    return boot != _boot(proc) or start != _start_of(pid, proc)


def _start_of(pid: str, proc: str) -> str:
    """Clock ticks from the boot to the start of the process, empty where it is gone."""
    try:
        with open(f"{proc}/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            text = stream.read()
    except OSError:
        return ""
    # The name, in parentheses, may hold anything.
    return text.rpartition(")")[2].split()[START]


def _boot(proc: str) -> str:
    with open(f"{proc}/sys/kernel/random/boot_id", encoding="utf-8") as stream:
        return stream.read().replace("-", "").strip()[:BOOT_DIGITS]
