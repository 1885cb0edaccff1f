# SPDX-License-Identifier: Apache-2.0
"""Detects that the kernel driver was reloaded. This matters for two reasons: the driver keeps the limits of control
groups in kernel memory, so a reload clears them, and new module options may change whether the driver enforces limits.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


class DriverLoad:
    """Notices reloads of the driver. Only one thread may use it. ``lost`` returns the number of limits that the driver
    has lost so far. A new loss shows that the driver was reloaded.
    """

    def __init__(self, sys_root: Path, lost: Callable[[], int]) -> None:
        self._module = sys_root / "module" / "nvidia"
        self._lost = lost
        self._before = self._signs()

    def again(self) -> bool:
        """Returns True once for each detected reload. A missing module does not count as a reload, because no driver is
        loaded yet.
        """
        now = self._signs()
        if now == self._before or (now[0] is None and self._before[0] is not None):
            return False
        self._before = now
        return True

    def _signs(self) -> tuple[tuple[int, str] | None, int]:
        """Returns values that change at a reload, because the kernel creates the folder of a module at each load. The
        first value is None if the folder is missing.
        """
        try:
            inode = os.stat(self._module).st_ino
        except OSError:
            return None, self._lost()
        try:
            return (inode, (self._module / "version").read_text()), self._lost()
        except OSError:
            return (inode, ""), self._lost()
