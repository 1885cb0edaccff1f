# SPDX-License-Identifier: Apache-2.0
"""Time that outlives the program and that nobody can set: the kernel's clock since boot, with the boot's id."""

from __future__ import annotations

import time
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Clock:
    def now(self) -> float:
        """Seconds since boot, suspend included; setting the wall clock does not change it."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def boot_id(self) -> str:
        """Tells one boot from the next: a time of another boot means nothing in this one."""
        try:
            return _BOOT_ID.read_text().strip()
        except OSError:
            return "unknown"
