# SPDX-License-Identifier: Apache-2.0
"""Whether the kernel driver was loaded again: what it keeps in kernel memory, limits of control groups, is gone then,
and whether it enforces any may have changed with its options.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


class DriverLoad:
    """Belongs to one thread. ``lost``: how many limits the driver had lost so far, by those who poll them."""

    def __init__(self, sys_root: Path, lost: Callable[[], int]) -> None:
        self._module = sys_root / "module" / "nvidia"
        self._lost = lost
        self._before = self._signs()

    def again(self) -> bool:
        """True once for each time that a sign shows it. A module that is away now is no sign: nothing is loaded yet."""
        now = self._signs()
        if now == self._before or (now[0] is None and self._before[0] is not None):
            return False
        self._before = now
        return True

    def _signs(self) -> tuple[tuple[int, str] | None, int]:
        """The kernel makes the folder of a module again at each load. None: no such folder is seen."""
        try:
            inode = os.stat(self._module).st_ino
        except OSError:
            return None, self._lost()
        try:
            return (inode, (self._module / "version").read_text()), self._lost()
        except OSError:
            return (inode, ""), self._lost()
