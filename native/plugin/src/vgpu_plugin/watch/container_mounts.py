# SPDX-License-Identifier: Apache-2.0
"""Checks in each poll whether the containers of allocations (slices of one container each) still see our files, and
whether other files are mounted over them. Our files are the library that limits the container, and one share (the
folder /dev/vgpu/<number> with limits and ledger) for each allocation of the container.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..allocation.allocation_files import AllocationFiles
from ..allocation.records import Record
from ..node.paths import CONTAINER_LEDGER, CONTAINER_SHARE
from . import mounts
from .mounts import Place, Table
from .processes import Process, Processes
from .rule import FOREIGN, Suspicion

# Path of the ledger (the file in which the library counts memory) below the folder of a share. This path is the same in
# every share.
LEDGER = CONTAINER_LEDGER.removeprefix(CONTAINER_SHARE)


@dataclass(frozen=True)
class Verdict:
    """The result for one list of mounts. ``foreign``: a description of each mount over our files; ``old``: whether the
    container has the mounts of an older version of this program; ``shows_ledger``: whether the ledger is among the
    mounts.
    """

    table: Table
    places: tuple[Place, ...]
    foreign: tuple[str, ...]
    old: bool
    shows_ledger: bool


class ContainerMounts:
    """Judges the mounts of containers. Each list of mounts is judged only once, because most lists are unchanged since
    the last poll and equal for all processes of a container.
    """

    def __init__(self, files: AllocationFiles, processes: Processes) -> None:
        self._files = files
        self._processes = processes
        self._node = Table()
        self._own_root = True
        # (allocation, library) → (the node's mounts for which the expected mounts were computed, the expected mounts).
        self._places: dict[tuple[str, str], tuple[Table, tuple[Place, ...]]] = {}
        # Path on the node → the same path without symbolic links. The result changes only with the node's setup, so it
        # is cached.
        self._real: dict[str, str] = {}
        # (id() of a list of mounts, allocation) → its verdict. The verdict holds a reference to the list, so Python
        # cannot give the same id() to another list.
        self._verdicts: dict[tuple[int, str], Verdict] = {}
        self._used: set[tuple[int, str]] = set()

    def begin_look(self) -> None:
        """Starts a poll: reads the node's own mounts."""
        self._node = self._processes.table("self")
        self._own_root = self._processes.sees_own_root()

    def end_look(self) -> None:
        self._verdicts = {key: one for key, one in self._verdicts.items() if key in self._used}
        known = {allocation for _table, allocation in self._used}
        gone = [key for key in self._places if key[0] not in known]
        for key in gone:
            del self._places[key]
        if gone:
            self._real.clear()
        self._used.clear()

    def judge(
        self, record: Record, processes: Iterable[Process], claims: Sequence[Record] = ()
    ) -> tuple[list[Suspicion], bool | None]:
        """Returns the foreign mounts of one container's processes, and whether the container has the mounts of an older
        version (None if the ledger is not among the mounts of any process). ``claims``: the records of other claims
        (Dynamic Resource Allocation) whose shares the container may have mounted too.
        """
        if not record.library or not self._node.rows:
            return [], None
        places = self._of(record)
        others = {place.point: place for one in claims if one.limits for place in self._of(one)}
        wrong: list[Process] = []
        texts: list[str] = []
        old: bool | None = None
        for process in processes:
            table = self._processes.table(process.pid)
            verdict = self._verdict(table, record, places, others)
            if verdict.foreign:
                wrong.append(process)
                texts += [one for one in verdict.foreign if one not in texts]
            if verdict.shows_ledger:
                old = verdict.old
        if not wrong:
            return [], old
        more = f"; and {len(texts) - 1} more" if len(texts) > 1 else ""
        return [Suspicion(FOREIGN, tuple((one, 0) for one in wrong), detail=texts[0] + more)], old

    def _verdict(self, table: Table, record: Record, places: tuple[Place, ...], others: Mapping[str, Place]) -> Verdict:
        key = id(table), record.id
        self._used.add(key)
        known = self._verdicts.get(key)
        if known is not None and known.table is table and known.places is places:
            return known
        ledger = next(one for one in places if one.point.endswith(LEDGER))
        old = mounts.has_old_mounts(table, ledger)
        # If the ledger is not among a process's mounts, the process has left the container's folders, for example by
        # chroot. So its missing mounts are not reported. Missing mounts of an older version are never reported, because
        # symbolic links in the image may have moved them to other paths.
        shows_ledger = bool(mounts.ledger_points(table, ledger))
        if old:
            expected = self._places_of(self._files.old_mounts(record))
            foreign = mounts.foreign(table, expected, mounts.OLD_GUARDED, complete=False)
        else:
            foreign = mounts.foreign(table, places, mounts.GUARDED, shows_ledger, others)
        self._verdicts[key] = Verdict(table, places, tuple(foreign), old, shows_ledger)
        return self._verdicts[key]

    def _of(self, record: Record) -> tuple[Place, ...]:
        """Returns the expected mounts of an allocation. While the mounts stay equal, the same object is returned, so
        that verdicts stay valid.
        """
        key = record.id, record.library
        node, before = self._places.get(key, (None, ()))
        if node is self._node:
            return before
        now = self._places_of(self._files.expected_mounts(record))
        self._places[key] = self._node, before if now == before else now
        return self._places[key][1]

    def _places_of(self, listed: Iterable[tuple[str, str, bool]]) -> tuple[Place, ...]:
        return tuple(self._place(inside, host) for inside, host, _read_only in listed)

    def _place(self, inside: str, host: str) -> Place:
        real = self._real.get(host)
        if real is None:
            real = self._real[host] = os.path.realpath(host)
        return mounts.place_of(self._node, inside, real, self._own_root)
