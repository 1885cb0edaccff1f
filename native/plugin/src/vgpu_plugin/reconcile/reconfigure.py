# SPDX-License-Identifier: Apache-2.0
"""Takes a changed or another configuration, and GPUs that changed, over while the program runs.

A new file is checked against the GPUs first; with a fault in it the old one stays. Slices in use are never taken away:
a GPU whose slices are held keeps its old split until they are free, and the status says so.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable

from .._shared.config.sharing import Piece
from ..allocation.allocator import Allocator
from ..errors import Fatal
from ..inject import driver_files
from ..node.gpus import Gpu, GpuError, GpuSource
from ..node.paths import Paths
from ..offer import settings as node_settings
from ..offer.last_offer import LastOffer
from ..offer.options import Option
from ..offer.pool import Pool
from .config_choice import ConfigChoice

APPLIED, WAITING, REFUSED = "Applied", "Waiting", "Refused"

log = logging.getLogger(__name__)


class Reconfiguration:
    """``look`` belongs to one thread (the one that may ask the driver); everything else may be read by any."""

    def __init__(
        self,
        paths: Paths,
        chosen: list[tuple[Option, str, str]],
        settings: node_settings.Settings,
        source: GpuSource,
        pool: Pool,
        allocator: Allocator,
        held: Callable[[], frozenset[str]],
        choice: ConfigChoice | None = None,
        last_offer: LastOffer | None = None,
    ) -> None:
        self._seen_root = paths.seen_root
        self._last_offer = last_offer or LastOffer(paths.last_offer)
        self._choice = choice or ConfigChoice(paths.config, paths.configs, paths.config_name)
        self._chosen = chosen
        self._source = source
        self._pool = pool
        self._allocator = allocator
        self._held = held
        # None: another file than the one in force is wanted, or it was replaced since it was read; the first look takes
        # it over or says why not.
        self._file: tuple[str, int, int, int] | None = None
        if self.name_of(settings) == self._choice.wanted:
            now = self._identity()
            self._file = now if _says_the_same(settings) else None
        self._gpus = pool.gpus
        self.settings = settings
        # Called after a change with the driver's files, and with the GPUs that are missing.
        self.after: list[Callable[[node_settings.Settings, driver_files.DriverFiles], None]] = []
        self.on_lost: Callable[[str, str], None] = lambda uuid, reason: None
        # Called after each look.
        self.on_look: Callable[[], None] = lambda: None
        self.fault = ""
        self.waiting: list[str] = []
        self._pieces: list[Piece] = []
        self._driver = driver_files.DriverFiles()

    def notes(self) -> list[str]:
        """What a person should know: a file that is refused, GPUs that keep their old slices."""
        out = list(self.settings.warnings)
        if self.fault:
            out.append(f"the configuration was not taken over, the one before stays: {self.fault}")
        out += [f"GPU {uuid} keeps its old slices until the last one in use is free" for uuid in self.waiting]
        return out

    def name_of(self, settings: node_settings.Settings) -> str:
        return self._choice.name_of(settings.path)

    @property
    def name(self) -> str:
        """The named configuration in force; empty: node.yaml."""
        return self.name_of(self.settings)

    def outcome(self) -> tuple[str, str]:
        """A word and a sentence on what became of the configuration that is wanted."""
        force = f"{self.settings.path} is in force"
        if self.fault:
            return REFUSED, f"{force}, the one that is wanted is not taken over: {self.fault}"
        if self.waiting:
            return WAITING, f"{force}; {', '.join(self.waiting)}: the old slices stay until the last in use is free"
        return APPLIED, force

    def begin(self, pieces: list[Piece], driver: driver_files.DriverFiles) -> None:
        """Once at the start, before anything is offered. The pool has what was offered before; GPUs of which nothing is
        held take ``pieces``, the others wait.
        """
        self._pieces, self._driver = pieces, driver
        if self._update([]):
            self._tell()

    def look(self) -> None:
        """One look at label, file and driver; takes over what changed."""
        self._look()
        self.on_look()

    def _look(self) -> None:
        now = self._identity()
        changed = now != self._file
        gpus = self._found()
        if changed:
            self._file = now
            try:
                settings = node_settings.load(
                    self._choice.path(self._choice.wanted), self._chosen, self._choice.follows
                )
                node_settings.make_slices(gpus, settings)
            except Fatal as fault:
                self._refuse(str(fault))
            else:
                self.fault = ""
                self.settings = settings
                self._choice.remember(settings.path)
                log.info("the configuration of %s is in force", settings.path)
        if changed or gpus != self._gpus:
            self.apply(gpus)
        elif self.waiting:
            self._try_again()

    def _refuse(self, fault: str) -> None:
        log.error("the configuration is not taken over, the one before stays: %s", fault)
        self.fault = fault

    def _identity(self) -> tuple[str, int, int, int]:
        """Tells the file that should be in force from what it was; zeros where there is none."""
        name = self._choice.wanted
        try:
            found = os.stat(self._choice.path(name))
        except (OSError, Fatal):
            return name, 0, 0, 0
        return name, found.st_ino, found.st_mtime_ns, found.st_size

    def _found(self) -> list[Gpu]:
        """The GPUs of now; one that is missing stays, for its slices may be in use, and is lost."""
        try:
            found = self._source.gpus()
        except GpuError as fault:
            for gpu in self._gpus:
                self.on_lost(gpu.uuid, str(fault))
            return self._gpus
        known = {gpu.uuid for gpu in found}
        for gpu in self._gpus:
            if gpu.uuid not in known:
                self.on_lost(gpu.uuid, "NVML does not list it")
        return sorted([*found, *(gpu for gpu in self._gpus if gpu.uuid not in known)], key=lambda gpu: gpu.index)

    def apply(self, gpus: list[Gpu]) -> None:
        """Brings pool, allocator and everything after in line with settings and GPUs."""
        try:
            pieces = node_settings.make_slices(gpus, self.settings)
        except Fatal as fault:  # the GPUs changed, and the file does not fit them any more
            self._refuse(str(fault))
            self._gpus = gpus
            return
        self._driver = driver_files.find(self.settings.driver_root, self.settings.dev_root, host_root=self._seen_root)
        self._pieces = pieces
        self._gpus = gpus
        with self._allocator.lock:
            self._update(self.waiting)
            self._allocator.configure(self.settings, self._driver)
        self._tell()

    def _try_again(self) -> None:
        """Whether the slices of a GPU that waits are free by now; nothing else of the node is looked at for it."""
        before = self.waiting
        self._update(before)
        if self.waiting != before:
            self._tell()

    def _update(self, waited: list[str]) -> bool:
        """Gives the pool what is wanted, as far as it is free; whether the pool has other pieces now."""
        with self._allocator.lock:
            before = self._pool.slices
            self.waiting = self._pool.update(self._gpus, self._pieces, self._held())
            offered = self._pool.slices
            self._last_offer.keep(offered)
        for uuid in self.waiting:
            if uuid not in waited:
                log.warning("GPU %s keeps its old slices until the last one in use is free", uuid)
        return offered != before

    def _tell(self) -> None:
        for call in self.after:
            call(self.settings, self._driver)


def _says_the_same(settings: node_settings.Settings) -> bool:
    try:
        return hashlib.sha256(settings.path.read_bytes()).hexdigest() == settings.sha256
    except OSError:
        return False
