# SPDX-License-Identifier: Apache-2.0
"""The memory limits that the driver itself enforces on the control group (cgroup) of each container. This module reads
them regularly and compares them with the limits file, the file with the desired limits of an allocation (the slices of
GPUs that one container has). It sets lost limits again, and clears the limits of ended containers.

When a container starts, a CDI hook sets its limits and writes the file ``driver-limit``, which names the control group
and the limits that were set. ``Status.used`` is the driver's own count of the container's memory, which no program in
the container can change.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._shared.abi import files as abi_files
from .._shared.gpu.memory_limits import UNLIMITED, Limits
from ..node.gpus import GpuError, GpuSource
from .enforcement import DRIVER, Enforcement, host_group

# Files in the folder of an allocation. If an allocation has no folder, the files are ``<id>.driver-limit`` and
# ``<id>.limits``.
FILE, LIMITS = "driver-limit", "limits"
LOST = "the driver's limit was {found}, expected {expected}; it was set again"
UNSET = "the driver's limit is {found}, expected {expected}, and cannot be set: {why}"

NO_HOOK = (
    "no CDI hook ran for its container: the container was started without CDI, or before the driver enforced limits; "
    "or the program runs outside containers. Start it again by CDI"
)

NOTHING = Limits(0, UNLIMITED, 0)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Active:
    """The content of the file ``driver-limit``, which the hook wrote. ``hard`` maps GPU UUIDs to limits in bytes, and
    ``group`` is the folder of the control group.
    """

    allocation: str
    group: str
    inode: int
    by_driver: bool
    reason: str
    hard: dict[str, int]
    shared: bool = False


@dataclass(frozen=True)
class Status:
    """The driver's limit of one allocation on one GPU, as of the last poll. ``fault`` is empty if the limit is as
    expected.
    """

    allocation: str
    uuid: str
    expected: int
    found: int
    used: int
    fault: str = ""


class DriverLimits:
    """Checks and repairs the driver's limits of all allocations. Only one thread may call ``poll``, and any thread may
    read ``state``.
    """

    def __init__(self, root: Path, cgroup_root: Path, source: GpuSource, enforcement: Enforcement) -> None:
        """``root`` is the folder of all allocations."""
        self._root = root
        self._cgroup_root = cgroup_root
        self._source = source
        self._enforcement = enforcement
        self.state: tuple[Status, ...] = ()
        self.repaired = 0
        # Number of limits that the driver lost after they were set, for example when the driver was reloaded.
        self.lost = 0
        # Allocation → the reason why the driver does not limit its container.
        self.without: dict[str, str] = {}
        # Returns whether any process has the allocation's ledger (the file in which the library counts used memory)
        # open. If so, its container uses the library.
        self.in_use: Callable[[str], bool] = abi_files.ledger_in_use
        # Function that is called with an allocation and a message if its limit was lost or cannot be set.
        self.tell: Callable[[str, str], None] = lambda _allocation, _text: None
        self._reported: set[tuple[str, str, str]] = set()
        # Limits that were cleared after their container ended: the allocation, and the inode of the container's control
        # group. A later container of the same allocation gets another group, so its limits are still set and checked.
        self._cleared: set[tuple[str, int]] = set()

    def poll(self) -> None:
        """Checks the driver's limits of each running container and sets wrong ones again. Clears the limits of ended
        containers.
        """
        found: list[Status] = []
        without: dict[str, str] = {}
        for one in self._all():
            if not self._lives(one):
                # The limit is cleared while the control group still exists. With the misc controller the driver
                # identifies a group by its address, so it would apply a remaining limit to the next group with the same
                # address.
                if self._is_there(one) and (one.allocation, one.inode) not in self._cleared:
                    self._clear(one)
                    self._cleared.add((one.allocation, one.inode))
                continue
            if not one.by_driver:
                without[one.allocation] = one.reason
                continue
            found += [self._one(one, uuid, bytes_) for uuid, bytes_ in self._expected(one).items()]
        for allocation in self._without_hook(one.allocation for one in self._all() if self._lives(one)):
            without[allocation] = NO_HOOK
            self._say(allocation, "", NO_HOOK)
        self.state, self.without = tuple(found), without

    def _without_hook(self, limited: Iterable[str]) -> list[str]:
        """Returns the allocations whose container uses the library but got no limit of the driver, because no hook ran
        for it.
        """
        if not self._enforcement.verdict.by_driver:
            return []
        known = frozenset(limited)
        folders = [one for one in self._names() if one not in known]
        return [one for one in folders if self.in_use(f"{self._root}/{one}/rw/ledger")]

    def apply(self, allocation: str) -> str:
        """Sets the driver's limits to those of the current limits file, for example after a resize. Returns an error
        message, or an empty string.
        """
        for one in self._all([allocation]):
            if one.by_driver and self._lives(one):
                states = [self._one(one, uuid, hard) for uuid, hard in self._expected(one).items()]
                return next((state.fault for state in states if state.found != state.expected), "")
        return ""

    def clear(self, allocation: str) -> None:
        """Clears the driver's limits of an ended allocation if its control group still exists, and removes the hook's
        files.
        """
        for one in self._all([allocation]):
            if self._is_there(one):
                self._clear(one)
        self._cleared = {one for one in self._cleared if one[0] != allocation}
        for name in (f"{allocation}/{FILE}", f"{allocation}.{FILE}"):
            (self._root / name).unlink(missing_ok=True)

    def _clear(self, active: Active) -> None:
        for uuid in active.hard if active.by_driver else ():
            with contextlib.suppress(GpuError):
                self._source.limit_group(uuid, active.group, UNLIMITED)

    def count(self) -> int:
        """Returns the number of limits that the driver lost."""
        return self.lost

    def notes(self) -> list[str]:
        """Returns warnings for the node's administrator."""
        verdict = self._enforcement.verdict
        out = [verdict.line()] if self._enforcement.requested == DRIVER and not verdict.by_driver else []
        out += [f"allocation {one.allocation} on {one.uuid}: {one.fault}" for one in self.state if one.fault]
        alone = "only the library enforces its memory limit"
        return out + [f"allocation {name}: {alone}: {why}" for name, why in self.without.items()]

    # --- one container -------------------------------------------------------------------------------------------

    def _one(self, active: Active, uuid: str, expected: int) -> Status:
        before = self._now(active, uuid)
        if before is not None and (before.soft, before.hard) == (0, expected):
            return Status(active.allocation, uuid, expected, before.hard, before.used)
        self.lost += before is None or before.hard == UNLIMITED
        why = "the container uses more than this limit, or the driver lost it"
        try:
            self._source.limit_group(uuid, active.group, expected)
        except GpuError as refused:
            why = str(refused)
        now = self._now(active, uuid) or before or NOTHING
        held = (now.soft, now.hard) == (0, expected)
        self.repaired += held
        words = {"found": _mib(before or NOTHING), "expected": _mib(Limits(0, expected, 0)), "why": why}
        fault = (LOST if held else UNSET).format(**words)
        return self._report(active, Status(active.allocation, uuid, expected, now.hard, now.used, fault))

    def _now(self, active: Active, uuid: str) -> Limits | None:
        """Returns the driver's limits of the group, or None if the driver reports none. With the misc controller it
        reports none if neither the group nor a parent has a limit.
        """
        try:
            return self._source.group_limits(uuid, active.group)
        except GpuError:
            return None

    def _report(self, active: Active, status: Status) -> Status:
        self._say(active.allocation, f"{status.uuid}: ", status.fault)
        return status

    def _say(self, allocation: str, where: str, fault: str) -> None:
        key = allocation, where, fault
        if key not in self._reported:
            self._reported.add(key)
            log.warning("allocation %s: %s%s", allocation, where, fault)
            self.tell(allocation, where + fault)

    def _expected(self, active: Active) -> dict[str, int]:
        """Returns GPU UUID → expected bytes: the limit of the current limits file, but at most the GPU's memory. If
        several allocations share the control group, returns the sum of their limits, because the hook has set the sum.
        """
        if active.shared:
            return active.hard
        for name in (f"{active.allocation}/{LIMITS}", f"{active.allocation}.{LIMITS}"):
            try:
                limits = abi_files.parse_limits((self._root / name).read_bytes())
            except (OSError, abi_files.LayoutError):
                continue
            return {one["uuid"]: _hard(one) for one in limits["devices"] if one["uuid"] in active.hard}
        return active.hard

    def _is_there(self, active: Active) -> bool:
        try:
            return os.stat(active.group).st_ino == active.inode
        except OSError:
            return False

    def _lives(self, active: Active) -> bool:
        if not self._is_there(active):
            return False
        try:
            return "populated 0" not in Path(active.group, "cgroup.events").read_text()
        except OSError:
            return True

    def _all(self, names: Iterable[str] | None = None) -> list[Active]:
        found = (self._read(name) for name in (self._names() if names is None else names))
        return [one for one in found if one is not None]

    def _names(self) -> list[str]:
        """Returns the names of all allocations, with or without a folder."""
        try:
            entries = sorted(os.listdir(self._root))
        except OSError:
            return []
        ending = f".{FILE}"
        return [one.removesuffix(ending) for one in entries if one.endswith(ending) or "." not in one]

    def _read(self, allocation: str) -> Active | None:
        for name in (f"{allocation}/{FILE}", f"{allocation}.{FILE}"):
            try:
                words: dict[str, Any] = json.loads((self._root / name).read_text())
                return Active(
                    allocation,
                    host_group(self._cgroup_root, str(words["group"])),
                    int(words["inode"]),
                    words["enforcement"] == "driver",
                    str(words["reason"]),
                    {str(one["uuid"]): int(one["hard"]) for one in words["devices"]},
                    bool(words.get("shared_with")),
                )
            except (OSError, ValueError, KeyError, TypeError):
                continue
        return None


def _hard(device: dict[str, Any]) -> int:
    if device["unlimited"]:
        return UNLIMITED
    card = device.get("card_bytes", 0)
    return min(device["memory_bytes"], card) if card else device["memory_bytes"]


def _mib(limits: Limits) -> str:
    hard = "no limit" if limits.hard == UNLIMITED else f"{limits.hard >> 20} MiB"
    return f"{hard}, soft {limits.soft >> 20} MiB" if limits.soft else hard
