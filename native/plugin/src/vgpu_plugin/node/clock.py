# SPDX-License-Identifier: Apache-2.0
"""A clock that survives restarts of the program and that nobody can set. It has two values: the kernel's time since
boot, and the id of the boot.
"""

from __future__ import annotations

import time
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Clock:
    def now(self) -> float:
        """Returns the seconds since boot, including suspend. They do not change when the wall clock is set."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def boot_id(self) -> str:
        """Returns the id of this boot. Times of different boots cannot be compared."""
        try:
            return _BOOT_ID.read_text().strip()
        except OSError:
            return "unknown"
