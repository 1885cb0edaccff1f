# SPDX-License-Identifier: Apache-2.0
"""Detects that the kernel driver was reloaded: a reload clears the limits of control groups that the driver keeps in
kernel memory, and new module options may change whether it enforces limits.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


class DriverLoad:
    """For one thread only. ``lost`` returns the number of limits that the driver has lost so far."""

    def __init__(self, sys_root: Path, lost: Callable[[], int]) -> None:
        self._module = sys_root / "module" / "nvidia"
        self._lost = lost
        self._before = self._signs()

    def again(self) -> bool:
        """Returns True once for each detected reload. A missing module is no reload, because no driver is
        loaded yet.
        """
        now = self._signs()
        if now == self._before or (now[0] is None and self._before[0] is not None):
            return False
        self._before = now
        return True

    def _signs(self) -> tuple[tuple[int, str] | None, int]:
        """Returns signs of a reload: the kernel creates a module's folder at each load. None: the folder is missing."""
        try:
            inode = os.stat(self._module).st_ino
        except OSError:
            return None, self._lost()
        try:
            return (inode, (self._module / "version").read_text()), self._lost()
        except OSError:
            return (inode, ""), self._lost()
