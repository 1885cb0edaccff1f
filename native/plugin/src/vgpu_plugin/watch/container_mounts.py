# SPDX-License-Identifier: Apache-2.0
"""What the containers of allocations have mounted at our paths, look by look."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from ..allocation.allocation_files import AllocationFiles
from ..allocation.records import Record
from ..node.paths import CONTAINER_LEDGER
from . import mounts
from .mounts import Place, Table
from .processes import Process, Processes
from .rule import FOREIGN, Suspicion


@dataclass(frozen=True)
class Places:
    """What the node mounts for one allocation, now and by a former version."""

    node: Table
    new: tuple[Place, ...]
    old: tuple[Place, ...]
    ledger: Place


@dataclass(frozen=True)
class Verdict:
    """Of one list of mounts: what is foreign there, and whether the container has the mounts of a former version."""

    table: Table
    places: Places
    foreign: tuple[str, ...]
    old: bool


class ContainerMounts:
    """Each list of mounts is judged once: most are as in the look before, and the same for all of a container."""

    def __init__(self, files: AllocationFiles, processes: Processes) -> None:
        self._files = files
        self._processes = processes
        self._node = Table()
        self._own_root = True
        self._places: dict[tuple[str, str], Places] = {}
        # (identity of the list, allocation) → its verdict, which keeps the list.
        self._verdicts: dict[tuple[int, str], Verdict] = {}
        self._used: set[tuple[int, str]] = set()

    def begin_look(self) -> None:
        """Reads the node's own mounts."""
        self._node = self._processes.table("self")
        self._own_root = self._processes.sees_own_root()

    def end_look(self) -> None:
        self._verdicts = {key: one for key, one in self._verdicts.items() if key in self._used}
        known = {allocation for _table, allocation in self._used}
        self._places = {key: one for key, one in self._places.items() if key[0] in known}
        self._used.clear()

    def judge(self, record: Record, processes: Iterable[Process]) -> tuple[list[Suspicion], bool | None]:
        """What is foreign among the mounts of the processes of one container; whether these are the old ones, None
        where no process shows any.
        """
        if not record.library or not self._node.rows:
            return [], None
        places = self._of(record)
        wrong: list[Process] = []
        texts: list[str] = []
        old: bool | None = None
        for process in processes:
            table = self._processes.table(process.pid)
            verdict = self._verdict(table, record.id, places)
            if verdict.foreign:
                wrong.append(process)
                texts += [one for one in verdict.foreign if one not in texts]
            if mounts.ledger_points(table, places.ledger):
                old = verdict.old
        if not wrong:
            return [], old
        more = f"; and {len(texts) - 1} more" if len(texts) > 1 else ""
        return [Suspicion(FOREIGN, tuple((one, 0) for one in wrong), detail=texts[0] + more)], old

    def _verdict(self, table: Table, allocation: str, places: Places) -> Verdict:
        key = id(table), allocation
        self._used.add(key)
        known = self._verdicts.get(key)
        if known is not None and known.table is table and known.places is places:
            return known
        old = mounts.has_old_mounts(table, places.ledger)
        # One that shows no ledger has left the container's folders, as below chroot: what it does not have is no
        # fault. A container of a former version may have its files elsewhere, where its image had links.
        complete = bool(mounts.ledger_points(table, places.ledger)) and not old
        expected, guarded = (places.old, mounts.OLD_GUARDED) if old else (places.new, mounts.GUARDED)
        foreign = tuple(mounts.foreign(table, expected, guarded, complete))
        self._verdicts[key] = Verdict(table, places, foreign, old)
        return self._verdicts[key]

    def _of(self, record: Record) -> Places:
        key = record.id, record.library
        known = self._places.get(key)
        if known is not None and known.node is self._node:
            return known
        new, old = (
            tuple(self._place(inside, host) for inside, host, _read_only in listed)
            for listed in (self._files.expected_mounts(record), self._files.old_mounts(record))
        )
        ledger = next(one for one in new if one.point == CONTAINER_LEDGER)
        self._places[key] = Places(self._node, new, old, ledger)
        return self._places[key]

    def _place(self, inside: str, host: str) -> Place:
        return mounts.place_of(self._node, inside, os.path.realpath(host), self._own_root)
