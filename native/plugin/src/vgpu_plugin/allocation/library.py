# SPDX-License-Identifier: Apache-2.0
"""Finds the library libvgpu.so that new containers get. The link ``current`` points to the folder of its version."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import Refused
from .allocation_files import LIBRARY_FILE


class CurrentLibrary:
    """Caches the target of the link, because every Allocate needs it. The link is resolved again only after it was
    changed.
    """

    def __init__(self) -> None:
        self._folder = ""
        self._known: tuple[int, int] | None = None

    def folder(self, root: Path) -> Path:
        """Returns the folder of the library version. Raises Refused if no library is installed."""
        current = f"{root}/current"
        now = _identity(current)
        if now is None or now != self._known or now != _identity(self._folder):
            self._folder, self._known = os.path.realpath(current), now
        if not os.path.isfile(f"{self._folder}/{LIBRARY_FILE}"):
            raise Refused(f"{current}/{LIBRARY_FILE} does not exist on this node; the role vcuda installs it")
        return Path(self._folder)


def _identity(path: str) -> tuple[int, int] | None:
    """Returns device and inode of the folder that a path points to, or None if the path does not exist."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
