# SPDX-License-Identifier: Apache-2.0
"""A clock that survives program restarts and cannot be set: the kernel's time since boot, with the boot's id."""

from __future__ import annotations

import time
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Clock:
    def now(self) -> float:
        """Returns seconds since boot, including suspend; setting the wall clock does not change them."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def boot_id(self) -> str:
        """Returns the id of this boot; times of another boot cannot be compared with times of this one."""
        try:
            return _BOOT_ID.read_text().strip()
        except OSError:
            return "unknown"
