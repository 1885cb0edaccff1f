# SPDX-License-Identifier: Apache-2.0
"""Which configuration of the node is in force: node.yaml, or one of the named files beside it that the node's label
chose. The name that was taken over last is kept over restarts, for the API server may be away then.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from pathlib import Path

from .._shared.config import node_config
from ..errors import Fatal

# A key of a ConfigMap has no folder in it, and neither has a name of ours.
NAME = re.compile(r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?\Z")
LABEL = node_config.CONFIG_LABEL


class ConfigChoice:
    """``follows``: whether somebody watches the node's label; without it node.yaml is in force. Thread-safe."""

    def __init__(self, base: Path, folder: Path, memory: Path, follows: bool = False) -> None:
        self.base = base
        self._folder = folder
        self._memory = memory
        self.follows = follows
        self._lock = threading.Lock()
        self._wanted = self._remembered() if follows else ""

    @property
    def wanted(self) -> str:
        """The name that the label says; empty: node.yaml."""
        with self._lock:
            return self._wanted

    def choose(self, name: str) -> None:
        with self._lock:
            self._wanted = name

    def names(self) -> list[str]:
        """Of the files that are there; a ConfigMap's keys may lack the suffix. Raises OSError; no folder holds none."""
        try:
            found = [entry.name for entry in os.scandir(self._folder) if entry.is_file()]
        except FileNotFoundError:
            return []
        return sorted({one.removesuffix(node_config.CONFIG_SUFFIX) for one in found if not one.startswith(".")})

    def path(self, name: str) -> Path:
        """The file of a name. Raises Fatal where there is none, or the folder cannot be read."""
        if not name:
            return self.base
        try:
            if NAME.match(name):
                for file in (f"{name}{node_config.CONFIG_SUFFIX}", name):
                    if (self._folder / file).is_file():
                        return self._folder / file
            there = ", ".join(self.names()) or "none"
        except OSError as fault:
            raise Fatal(
                f'the label {LABEL} of the node names "{name}", and {self._folder} cannot be read: {fault.strerror}; '
                "correct the folder, or remove the label for the node's own configuration"
            ) from fault
        raise Fatal(
            f'the label {LABEL} of the node names "{name}", which {self._folder} does not hold; it holds {there}; '
            "correct the label, or remove it for the node's own configuration"
        )

    def name_of(self, path: Path) -> str:
        """The name of a file in force; empty: node.yaml."""
        return path.name.removesuffix(node_config.CONFIG_SUFFIX) if path.parent == self._folder else ""

    def remember(self, path: Path) -> None:
        """A name that was taken over. A full disk costs no more than node.yaml at the next start."""
        if not self.follows:
            return
        with contextlib.suppress(OSError):
            fresh = self._memory.with_suffix(".new")
            fresh.write_text(self.name_of(path) + "\n")
            os.replace(fresh, self._memory)

    def _remembered(self) -> str:
        try:
            return self._memory.read_text().strip()
        except (OSError, ValueError):
            return ""
