# SPDX-License-Identifier: Apache-2.0
"""Memory above what a container was promised: used while its card has it free and nobody was promised that.

A pod may be promised less than its limit (the shared core's ``pods/burst``). Room is given out by promises; the limits
of one card together never exceed it. So a burst limit lies between promise and limit, is set by a resize like any other
(resizer.py), and is lowered before somebody else gets what was promised to him. What programs hold is not taken from
them but by the OOM killer's rule of their own slice: else the newcomer waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from .._shared.config.slices import MIB
from ..errors import NotNow, PluginError
from ..offer.pool import Pool
from ..offer.preference import gpu_of
from . import live_limits, sizing
from .allocation_files import AllocationFiles
from .records import Record, RecordStore
from .resizer import Resizer, Wanted
from .sizer import Sizer
from .sizing import Bounds

# A newcomer whose room is in use is asked for again by the kubelet, about each ten seconds; one that is not any more
# holds nothing back after this time.
PATIENCE_S = 60.0

log = logging.getLogger(__name__)


class Holder(NamedTuple):
    """Of one GPU, in MiB. ``used``: below which its limit does not go."""

    bounds: Bounds
    used: int = 0


def spread(room: int, holders: Sequence[Holder]) -> list[int]:
    """What each may use now, in MiB: its promise and an equal part of ``room``, the MiB that nobody was promised, up to
    its limit. One that uses more keeps that, and the others share what is left."""
    kept: dict[int, int] = {}
    while True:
        free = max(0, room - sum(used - holders[n].bounds.promised for n, used in kept.items()))
        out = dict(kept)
        rest = [n for n in range(len(holders)) if n not in kept]
        # Who wants least first: what it leaves is for the others.
        for count, n in enumerate(sorted(rest, key=lambda n: holders[n].bounds.above)):
            more = min(holders[n].bounds.above, free // (len(rest) - count))
            out[n] = holders[n].bounds.promised + more
            free -= more
        over = {n: holders[n].used for n in rest if holders[n].used > out[n]}
        if not over:
            return [out[n] for n in range(len(holders))]
        kept.update(over)


class _Slice(NamedTuple):
    """The records that share slices of one GPU: an init container and those after it. The greatest counts."""

    records: tuple[Record, ...]
    bounds: Bounds
    now: int
    used: int
    kills: bool


class Burst:
    """Thread-safe; the caller holds no lock."""

    def __init__(
        self,
        records: RecordStore,
        pool: Pool,
        files: AllocationFiles,
        sizer: Sizer,
        resizer: Resizer,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._records = records
        self._pool = pool
        self._files = files
        self._sizer = sizer
        self._resizer = resizer
        self._now = now
        self._one_at_a_time = threading.Lock()
        # Who waits for what was promised to him: by allocation, what of each GPU, and until when that is believed.
        self._waiting: dict[str, tuple[dict[str, Bounds], float]] = {}

    def waits_for(self, uuid: str, without: str = "") -> int:
        """MiB that others wait for, which nobody may burst into."""
        with self._records.lock:
            return sum(
                wanted[uuid].promised for one, (wanted, _until) in self._waits() if one != without and uuid in wanted
            )

    def _waits(self) -> list[tuple[str, tuple[dict[str, Bounds], float]]]:
        return [entry for entry in self._waiting.items() if entry[1][1] > self._now()]

    def give_back(self, allocation: str, wanted: Mapping[str, Bounds], promised: bool = True) -> None:
        """Has the burst memory given back that is in the way of what an allocation was promised, as far as it is free
        or the OOM killer's rule of a slice takes it. What is not waits, and no burst grows meanwhile. For what nobody
        was ``promised`` no process ends."""
        with self._records.lock:
            if not self._bursts():
                return
            self._waiting[allocation] = dict(wanted), self._now() + PATIENCE_S
        self._resizer.poll()
        for uuid in wanted:
            self._share_out(uuid, kills=(False, True) if promised else (False,))

    def done(self, allocation: str) -> None:
        """It has what it was promised, or wants it no more."""
        with self._records.lock:
            self._waiting.pop(allocation, None)

    def poll(self) -> None:
        """Each GPU's free memory is shared out again: pods come and go, programs take and free."""
        with self._records.lock:
            self._waiting = dict(self._waits())
            bursts = self._bursts()
        for gpu in self._pool.gpus if bursts else ():
            self._share_out(gpu.uuid)

    def _bursts(self) -> bool:
        """Whether anybody may; on most nodes nobody, and what the kubelet knows is not read then."""
        return any(sizing.PROMISED in row for one in self._records.all() for row in one.limits.get("devices") or [])

    def _share_out(self, uuid: str, kills: Sequence[bool] = (False,)) -> None:
        with self._one_at_a_time:
            for kill in kills:
                with self._records.lock:
                    others = self._sizer.others(())
                    slices_of = self._slices(uuid, others)
                    targets = self._targets(uuid, others, slices_of, kill) if slices_of else []
                # What becomes less first, for the others get that.
                for shrinks in (True, False):
                    for one, target in zip(slices_of, targets, strict=True):
                        if target != one.now and (target < one.now) == shrinks:
                            self._set(one, uuid, target)

    def _targets(self, uuid: str, others: Sequence[Record], slices_of: Sequence[_Slice], kill: bool) -> list[int]:
        """``kill``: a slice with an OOM killer is lowered below what it uses, but only as far as others wait for it."""
        gpu = self._pool.gpu(uuid)
        promised = sizing.held(others, promised=True).get(uuid, sizing.Held()).memory_mib
        comers = [Holder(wanted[uuid]) for _one, (wanted, _until) in self._waits() if uuid in wanted]
        room = sizing.room_mib(gpu, self._sizer.settings.config) - promised - sum(one.bounds.promised for one in comers)
        # Where nobody waits, no limit of theirs is lowered: one that is in use the moment after would end a process.
        floors = [one.now if one.kills and not comers else one.used for one in slices_of]
        if kill and room < sum(max(0, used - one.bounds.promised) for one, used in zip(slices_of, floors, strict=True)):
            floors = [0 if one.kills else used for one, used in zip(slices_of, floors, strict=True)]
        holders = [Holder(one.bounds, used) for one, used in zip(slices_of, floors, strict=True)]
        return spread(room, [*holders, *comers])[: len(slices_of)]

    def _slices(self, uuid: str, others: Sequence[Record]) -> list[_Slice]:
        """Those of a GPU that may burst; one whose ledger cannot be read keeps its limit."""
        together: dict[frozenset[str], list[Record]] = {}
        for record in others:
            if sizing.bounds_of(record, uuid) is not None:
                ids = frozenset(one for one in record.slice_ids if gpu_of(one) == uuid)
                together.setdefault(ids, []).append(record)
        return [self._slice(uuid, tuple(found)) for found in together.values()]

    def _slice(self, uuid: str, found: tuple[Record, ...]) -> _Slice:
        bounds = [known for one in found if (known := sizing.bounds_of(one, uuid)) is not None]
        rows = [row for one in found for row in one.limits["devices"] if row["uuid"] == uuid]
        now = max(-(-row["memory_bytes"] // MIB) for row in rows)
        try:
            used = max(-(-live_limits.used(self._files, one).get(uuid, 0) // MIB) for one in found)
        except NotNow as fault:
            log.debug("%s", fault)
            used = now
        return _Slice(
            found,
            Bounds(max(one.promised for one in bounds), max(one.limit for one in bounds)),
            now,
            used,
            any(one.limits.get("oom_killer") for one in found),
        )

    def _set(self, one: _Slice, uuid: str, target: int) -> None:
        for record in one.records:
            bounds = sizing.bounds_of(record, uuid)
            assert bounds is not None
            mine = max(bounds.promised, min(bounds.limit, target))
            try:
                self._resizer.resize(record.id, {uuid: Wanted(mine, burst=True)}, waits=False)
            except PluginError as fault:
                # It took more meanwhile, or ends: the next poll or newcomer finds it as it is then.
                log.info("allocation %s: its burst limit of GPU %s is not %d MiB: %s", record.id, uuid, mine, fault)
