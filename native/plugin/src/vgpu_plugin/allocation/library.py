# SPDX-License-Identifier: Apache-2.0
"""Which version of the library new containers get: the folder that the link ``current`` leads to."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import Refused
from .allocation_files import LIBRARY_FILE


class CurrentLibrary:
    """Every Allocate asks, so the link is followed again only where it leads to another folder than the one known."""

    def __init__(self) -> None:
        self._folder = ""
        self._known: tuple[int, int] | None = None

    def folder(self, root: Path) -> Path:
        """Raises Refused where there is no library."""
        current = f"{root}/current"
        now = _identity(current)
        if now is None or now != self._known or now != _identity(self._folder):
            self._folder, self._known = os.path.realpath(current), now
        if not os.path.isfile(f"{self._folder}/{LIBRARY_FILE}"):
            raise Refused(f"{current}/{LIBRARY_FILE} does not exist on this node; the role vcuda installs it")
        return Path(self._folder)


def _identity(path: str) -> tuple[int, int] | None:
    """Tells the folder that a path leads to from every other; None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
