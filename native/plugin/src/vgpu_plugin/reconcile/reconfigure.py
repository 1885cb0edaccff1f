# SPDX-License-Identifier: Apache-2.0
"""Applies a changed or newly selected configuration, and changed GPUs, while the program runs.

A new file is first checked against the GPUs; if it is invalid, the old configuration stays active. Allocated slices
(parts of GPUs) are never removed: a GPU with allocated slices keeps its old split until they are free, and the status
reports that. The configuration may change from slices of the device plugin to claims (Dynamic Resource Allocation), or
back. Then the program exits once no container has a claim, and its systemd unit restarts it.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable

from .._shared.config.sharing import Piece
from ..allocation.allocator import Allocator
from ..allocation.records import CLAIM
from ..errors import Fatal, Unknown
from ..inject import driver_files
from ..node.gpus import Gpu, GpuError, GpuSource
from ..offer import settings as node_settings
from ..offer.last_offer import LastOffer, with_lost
from .config_choice import ConfigChoice

APPLIED, WAITING, REFUSED = "Applied", "Waiting", "Refused"
NOT_LISTED = "NVML does not list it"
ADVICE = "reset or replace it; it is then offered again automatically"

log = logging.getLogger(__name__)


class Reconfiguration:
    """Compares the active configuration and GPUs with the files and the driver, and applies changes. Only the thread
    that may call the driver may call ``poll``; any thread may read the other members.
    """

    def __init__(
        self,
        choice: ConfigChoice,
        settings: node_settings.Settings,
        source: GpuSource,
        allocator: Allocator,
        held: Callable[[], frozenset[str]],
        last_offer: LastOffer,
    ) -> None:
        """``held`` returns the ids of the slices in use."""
        self._choice = choice
        self._source = source
        self._pool = allocator.pool
        self._allocator = allocator
        self._held = held
        self._last_offer = last_offer
        # Identity of the file that was last applied. It is None if the label names another file, or if the file was
        # replaced after it was read. In both cases the first poll applies the desired file, or reports why it cannot.
        self._file: tuple[str, int, int, int] | None = None
        if self.name_of(settings) == self._choice.wanted:
            now = self._identity()
            self._file = now if _says_the_same(settings) else None
        self._gpus = self._pool.gpus
        self.settings = settings
        # Functions that are called after each change, with the settings and the driver's files.
        self.after: list[Callable[[node_settings.Settings, driver_files.DriverFiles], None]] = []
        self.on_lost: Callable[[str, str], None] = lambda uuid, reason: None
        # Function that makes the polling thread poll soon.
        self.poll_soon: Callable[[], None] = lambda: None
        # Function that returns whether the kernel driver was reloaded since the last call.
        self.loaded_again: Callable[[], bool] = lambda: False
        # UUID → reason, for each known GPU that is missing.
        self.lost: dict[str, str] = {}
        # Index → error, for each GPU that the driver counts but that could never be read.
        self.unknown: dict[int, str] = {}
        self._forgotten: frozenset[str] = frozenset()
        # Function that ends the program. After a change between slices and claims, the program needs other parts, so it
        # must be started again.
        self.end: Callable[[], None] = lambda: None
        # Function that is called after each poll.
        self.on_poll: Callable[[], None] = lambda: None
        # Functions of other parts of the program; each returns messages that ``notes`` includes.
        self.more_notes: list[Callable[[], list[str]]] = []
        self.fault = ""
        self.waiting: list[str] = []
        self._pieces: list[Piece] = []
        self._driver = driver_files.DriverFiles()

    def notes(self) -> list[str]:
        """Returns messages for the administrator: a refused file, GPUs that keep their old slices, lost GPUs, errors of
        other parts.
        """
        out = list(self.settings.warnings)
        if self.fault:
            out.append(f"the configuration was not applied, the one before stays: {self.fault}")
        out += [f"GPU {uuid} keeps its old slices until the last one in use is free" for uuid in self.waiting]
        for gpu in self._pool.gpus:
            if reason := self.lost.get(gpu.uuid):
                name = f"GPU {gpu.index} ({gpu.model}, {gpu.uuid})"
                out.append(f"{name} is lost: {reason}; {ADVICE}; if it was removed for good: vgpuctl forget {gpu.uuid}")
        out += [f"GPU {index} is lost: {reason}; {ADVICE}" for index, reason in self.unknown.items()]
        return out + [note for notes in self.more_notes for note in notes()]

    def name_of(self, settings: node_settings.Settings) -> str:
        return self._choice.name_of(settings.path)

    @property
    def name(self) -> str:
        """The name of the active named configuration; empty means node.yaml."""
        return self.name_of(self.settings)

    def outcome(self) -> tuple[str, str]:
        """Returns (reason, message) that tell whether the desired configuration is active."""
        active = f"{self.settings.path} is active"
        if self.fault:
            return REFUSED, f"{active}, the desired one is not applied: {self.fault}"
        if self.waiting:
            return WAITING, f"{active}; {', '.join(self.waiting)}: the old slices stay until the last in use is free"
        return APPLIED, active

    def forget(self, uuid: str) -> None:
        """Stops reporting a lost GPU that will not come back. Raises Unknown if it is not lost."""
        if uuid not in self.lost:
            raise Unknown(f"GPU {uuid} is not lost; lost now: {', '.join(self.lost) or 'none'}; see: vgpuctl status")
        log.info("GPU %s is no longer reported as lost: vgpuctl forget", uuid)
        self._forgotten |= {uuid}
        self.poll_soon()

    def begin(self, pieces: list[Piece], driver: driver_files.DriverFiles) -> None:
        """Runs once at the start, before slices are offered. The pool then contains the slices that were offered before
        the restart. GPUs without allocated slices get ``pieces`` at once, the others when their slices are free.
        """
        self._pieces, self._driver = pieces, driver
        if self._update([]):
            self._notify()

    def watch_policy(self) -> str:
        """Returns the policy for processes that use a GPU without the library's limits."""
        return self.settings.watch

    def poll(self) -> None:
        """Checks the node's label, the configuration file and the driver once, and applies changes."""
        self._poll()
        self.on_poll()

    def _poll(self) -> None:
        now = self._identity()
        changed = now != self._file
        gpus = self.find_gpus()
        if changed:
            self._file = now
            try:
                settings = self._choice.load(self._choice.wanted)
                node_settings.make_slices(gpus, settings)
            except Fatal as fault:
                self._refuse(str(fault))
            else:
                changed = settings.claims == self.settings.claims
                (self._take_over if changed else self._change_way)(settings)
        again = self.loaded_again()
        if again:
            log.info("the driver was reloaded, or lost its limits: this program checks again what enforces memory")
        if changed or again or gpus != self._gpus:
            self.apply(gpus)
        elif self.waiting:
            self._try_again()

    def _take_over(self, settings: node_settings.Settings) -> None:
        self.fault = ""
        self.settings = settings
        self._choice.remember(settings.path)
        log.info("the configuration of %s is active", settings.path)

    def _change_way(self, settings: node_settings.Settings) -> None:
        """Ends the program for a change between slices and claims. If claims are in use, the program continues, because
        only the running program can end them; the next poll checks again.
        """
        held = sorted({one.holder for one in self._allocator.records.all() if one.kind == CLAIM})
        if held and not settings.claims:
            self._file = None
            self._refuse(
                f"{settings.path} no longer sets flags.allocation: dra, but containers still use {', '.join(held)}; "
                "drain the node"
            )
            return
        log.info("%s changes flags.allocation: the program exits, and its unit restarts it", settings.path)
        # Without this call, the next start would read the same configuration as before and exit again.
        self._choice.remember(settings.path)
        self.end()

    def _refuse(self, fault: str) -> None:
        if fault != self.fault:
            log.error("the configuration is not applied, the one before stays: %s", fault)
        self.fault = fault

    def _identity(self) -> tuple[str, int, int, int]:
        """Returns name, inode, modification time and size of the desired file, so that a replaced file is noticed;
        zeros if the file does not exist.
        """
        name = self._choice.wanted
        try:
            found = os.stat(self._choice.path(name))
        except (OSError, Fatal):
            return name, 0, 0, 0
        return name, found.st_ino, found.st_mtime_ns, found.st_size

    def find_gpus(self) -> list[Gpu]:
        """Returns the current GPUs. A GPU that is missing stays in the list and is reported as lost, because its slices
        may be allocated.
        """
        before = [gpu for gpu in self._gpus if gpu.uuid not in self._forgotten]
        try:
            found = self._source.gpus()
            unreadable = self._source.unreadable()
        except GpuError as fault:
            found, unreadable = [], dict.fromkeys((gpu.index for gpu in before), str(fault))
        here = {gpu.uuid for gpu in found}
        self._forgotten -= here
        gpus = with_lost(found, before)
        lost = {gpu.uuid: unreadable.pop(gpu.index, NOT_LISTED) for gpu in gpus if gpu.uuid not in here}
        self.lost, self.unknown = lost, unreadable
        for uuid, reason in lost.items():
            self.on_lost(uuid, reason)
        return gpus

    def apply(self, gpus: list[Gpu]) -> None:
        """Applies settings and GPUs to the pool and the allocator, and calls all functions in ``after``."""
        try:
            pieces = node_settings.make_slices(gpus, self.settings)
        except Fatal as fault:  # The GPUs have changed, and the configuration does not fit the new ones.
            self._refuse(str(fault))
            self._gpus = gpus
            return
        root = self._choice.paths.seen_root
        self._driver = driver_files.find(self.settings.driver_root, self.settings.dev_root, host_root=root)
        self._pieces = pieces
        self._gpus = gpus
        with self._allocator.lock:
            self._update(self.waiting)
            self._allocator.configure(self.settings, self._driver)
        self._notify()

    def _try_again(self) -> None:
        """Checks only whether the slices of waiting GPUs are free now, so that their new slices can be offered."""
        before = self.waiting
        self._update(before)
        if self.waiting != before:
            self._notify()

    def _update(self, waited: list[str]) -> bool:
        """Updates the slices of all free GPUs in the pool. Returns whether the pool's slices changed."""
        with self._allocator.lock:
            before = self._pool.slices
            self.waiting = self._pool.update(self._gpus, self._pieces, self._held())
            offered = self._pool.slices
            self._last_offer.persist(offered, self._gpus)
        for uuid in self.waiting:
            if uuid not in waited:
                log.warning("GPU %s keeps its old slices until the last one in use is free", uuid)
        return offered != before

    def _notify(self) -> None:
        for call in self.after:
            call(self.settings, self._driver)


def _says_the_same(settings: node_settings.Settings) -> bool:
    try:
        return hashlib.sha256(settings.path.read_bytes()).hexdigest() == settings.sha256
    except OSError:
        return False
