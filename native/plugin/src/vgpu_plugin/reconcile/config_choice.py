# SPDX-License-Identifier: Apache-2.0
"""The configuration that is active on the node: node.yaml, or one of the named files next to it that the node's label
selects.

The name of the last active file is saved over restarts, because the API server may be unreachable when the program
starts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from pathlib import Path

from .._shared.config import node_config
from .._shared.config.sharing import Piece
from ..errors import Fatal
from ..node.gpus import Gpu
from ..node.paths import Paths
from ..offer import settings as node_settings
from ..offer.options import Option
from ..offer.settings import Settings

# Names are valid if they could be keys of a ConfigMap. So a name from the label cannot contain a path.
NAME = re.compile(r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?\Z")
LABEL = node_config.CONFIG_LABEL

log = logging.getLogger(__name__)


class ConfigChoice:
    """Knows the selected name and loads its file. ``chosen``: settings of flags and environment, which override the
    file. ``follows``: whether the node's label is followed; otherwise node.yaml is active. The class is thread-safe.
    """

    def __init__(
        self, paths: Paths, chosen: list[tuple[Option, str, str]] | None = None, follows: bool = False
    ) -> None:
        self.paths = paths
        self.chosen = chosen or []
        self.follows = follows
        self._folder = paths.configs
        self._memory = paths.config_name
        self._lock = threading.Lock()
        self._wanted = self._remembered() if follows else ""

    @property
    def wanted(self) -> str:
        """The name in the node's label; an empty name means node.yaml."""
        with self._lock:
            return self._wanted

    def choose(self, name: str) -> None:
        with self._lock:
            self._wanted = name

    def load(self, name: str) -> Settings:
        """Returns the settings of the file with this name. Raises Fatal."""
        return node_settings.load(self.path(name), self.chosen, self.follows)

    def first_settings(self) -> Settings:
        """Returns the settings of the last active named file if they are valid, otherwise those of node.yaml. Raises
        Fatal.
        """
        if name := self.wanted:
            try:
                return self.load(name)
            except Fatal as fault:
                log.error("node.yaml is active: %s", fault)
        return self.load("")

    def first_pieces(self, gpus: list[Gpu], settings: Settings) -> tuple[Settings, list[Piece]]:
        """Returns the settings to start with, and the slices that the GPUs have with them: ``settings``, or those of
        node.yaml if ``settings`` do not fit the GPUs. Raises Fatal.
        """
        try:
            return settings, node_settings.make_slices(gpus, settings)
        except Fatal as fault:
            if settings.path == self.paths.config:
                raise
            log.error("node.yaml is active: %s", fault)
        settings = self.load("")
        return settings, node_settings.make_slices(gpus, settings)

    def names(self) -> list[str]:
        """Returns the names of the configuration files. A suffix .yaml is removed; files from a ConfigMap may have
        none. If the folder does not exist, the list is empty. Raises OSError.
        """
        try:
            found = [entry.name for entry in os.scandir(self._folder) if entry.is_file()]
        except FileNotFoundError:
            return []
        return sorted({one.removesuffix(node_config.CONFIG_SUFFIX) for one in found if not one.startswith(".")})

    def path(self, name: str) -> Path:
        """Returns the file of a name. Raises Fatal if it does not exist or the folder cannot be read."""
        if not name:
            return self.paths.config
        try:
            if NAME.match(name):
                for file in (f"{name}{node_config.CONFIG_SUFFIX}", name):
                    if (self._folder / file).is_file():
                        return self._folder / file
            there = ", ".join(self.names()) or "none"
        except OSError as fault:
            raise Fatal(
                f'the label {LABEL} of the node names "{name}", but {self._folder} cannot be read: {fault.strerror}; '
                "correct the folder, or remove the label for the node's own configuration"
            ) from fault
        raise Fatal(
            f'the label {LABEL} of the node names "{name}", but {self._folder} only has {there}; '
            "correct the label, or remove it for the node's own configuration"
        )

    def name_of(self, path: Path) -> str:
        """Returns the configuration's name for a file; node.yaml has an empty name."""
        return path.name.removesuffix(node_config.CONFIG_SUFFIX) if path.parent == self._folder else ""

    def remember(self, path: Path) -> None:
        """Saves the name of the active file. If the write fails (full disk), the next start uses node.yaml."""
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
