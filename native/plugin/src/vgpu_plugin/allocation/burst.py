# SPDX-License-Identifier: Apache-2.0
"""Burst memory: memory above a container's promised amount. A container may use it while it is free on the GPU and not
promised to others.

A pod may be promised less than its limit (``pods/burst`` of the shared modules). The promises decide whether a new
container fits on a GPU. The current limits of all containers of a GPU never add up to more than the GPU's memory. So
the current limit of a container lies between its promise and the pod's limit.

A resize (resizer.py) sets the current limit, and lowers it before another container gets its promised memory. If that
memory is in use, it is taken back only from a slice with an OOM killer, which kills processes above the limit.
Otherwise the new container waits.
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
from .resize_rules import Wanted
from .resizer import Resizer
from .sizer import Sizer
from .sizing import Bounds

# Time for which memory is kept free for a waiting container. If its promised memory is still in use, the kubelet tries
# again about every ten seconds to start the container. If the kubelet stops trying, the memory is free for others after
# this time.
PATIENCE_S = 60.0

log = logging.getLogger(__name__)


class Holder(NamedTuple):
    """One container on one GPU, in MiB: its bounds (promised memory and maximum limit) and its usage. ``spread``
    returns no limit below ``used``.
    """

    bounds: Bounds
    used: int = 0


def spread(room: int, holders: Sequence[Holder]) -> list[int]:
    """Returns the current limit of each holder, in MiB. A holder gets its promise and an equal part of ``room``, the
    MiB of the GPU that no container was promised. It never gets more than its maximum limit. A holder that already uses
    more than this keeps what it uses, and the others share the rest.
    """
    kept: dict[int, int] = {}
    while True:
        free = max(0, room - sum(used - holders[n].bounds.promised for n, used in kept.items()))
        out = dict(kept)
        rest = [n for n in range(len(holders)) if n not in kept]
        # The holders that can use the least extra memory come first, so that the part that they cannot use goes to the
        # others.
        for count, n in enumerate(sorted(rest, key=lambda n: holders[n].bounds.above)):
            more = min(holders[n].bounds.above, free // (len(rest) - count))
            out[n] = holders[n].bounds.promised + more
            free -= more
        over = {n: holders[n].used for n in rest if holders[n].used > out[n]}
        if not over:
            return [out[n] for n in range(len(holders))]
        kept.update(over)


class _Slice(NamedTuple):
    """All records (saved data of containers) of one pod that share slices of one GPU: an init container and the
    containers that run after it. Only one of these containers runs at a time, so each number is the largest value of
    the records. The numbers are MiB above a container's base, which is 0 or more.

    The base of a container is its promised memory. If it is the only container of its pod at its time, its base is all
    that the pod was promised, because no other container may use that memory.
    """

    records: tuple[tuple[Record, int], ...]
    most: int
    now: int
    used: int
    kills: bool


class _Wait(NamedTuple):
    """The wait of a container for its promised memory: its record with that memory as its size, GPU UUID → promise and
    limit, and the time at which the wait expires.
    """

    record: Record
    wanted: Mapping[str, Bounds]
    until: float


class Burst:
    """Sets the current limits of containers with burst memory. It is thread-safe, and the caller must not hold the
    records' lock.
    """

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
        # Allocations that wait for their promised memory.
        self._waiting: dict[str, _Wait] = {}

    def with_waiting(self, others: Sequence[Record], record: Record | None = None) -> list[Record]:
        """Returns the records of ``others``, and those of the containers that wait, with the memory that was promised
        to them. A waiting container counts within its pod, because the pod's promise may already include its memory. If
        ``record`` is given, only containers that may run at the same time as its container are added.
        """
        with self._records.lock:
            waiting = {
                one: wait.record
                for one, wait in self._waits()
                if record is None or (one != record.id and sizing.together(record, wait.record))
            }
            return [*(one for one in others if one.id not in waiting), *waiting.values()]

    def _waits(self) -> list[tuple[str, _Wait]]:
        return [entry for entry in self._waiting.items() if entry[1].until > self._now()]

    def give_back(self, record: Record, wanted: Mapping[str, Bounds], promised: bool = True) -> None:
        """Lowers the current limits of other containers so that the container of a record can get its promised memory.
        It takes back free memory. If that is not enough and ``promised`` is true, it also takes back memory that a
        slice's OOM killer frees by killing processes. If that is not enough either, the container waits. Until the wait
        ends, that memory is added to no current limit.
        """
        with self._records.lock:
            if not self._bursts():
                return
            self._waiting[record.id] = _Wait(sizing.with_memory(record, wanted), wanted, self._now() + PATIENCE_S)
        self._resizer.poll()
        for uuid in wanted:
            self._share_out(uuid)
            if promised and self._short(record, uuid, wanted[uuid].promised):
                self._share_out(uuid, kill=True)

    def _short(self, record: Record, uuid: str, mib: int) -> bool:
        """Returns whether a container with this promise does not fit next to the current limits of others."""
        with self._records.lock:
            held = self._sizer.held(record).get(uuid, sizing.Held()).memory_mib
        return held + mib > self._room(uuid)

    def _room(self, uuid: str) -> int:
        return sizing.room_mib(self._pool.gpu(uuid), self._sizer.settings.config)

    def done(self, allocation: str) -> None:
        """Ends the wait of an allocation. Called when it has its promised memory or no longer needs it."""
        with self._records.lock:
            self._waiting.pop(allocation, None)

    def poll(self) -> None:
        """Distributes the free memory of each GPU again. This is needed regularly, because pods start and end, and
        programs allocate and free memory.
        """
        with self._records.lock:
            self._waiting = dict(self._waits())
            bursts = self._bursts()
        for gpu in self._pool.gpus if bursts else ():
            self._share_out(gpu.uuid)

    def _bursts(self) -> bool:
        """Returns whether any container may use burst memory. On most nodes none may, and then the kubelet's checkpoint
        need not be read.
        """
        return any(sizing.PROMISED in row for one in self._records.all() for row in one.limits.get("devices") or [])

    def _share_out(self, uuid: str, kill: bool = False) -> None:
        with self._one_at_a_time:
            with self._records.lock:
                others = self._sizer.others()
                slices_of = self._slices(uuid, others)
                targets = self._targets(uuid, others, slices_of, kill) if slices_of else []
            # Limits that shrink are set first, because limits that grow use the memory that becomes free.
            for shrinks in (True, False):
                for one, target in zip(slices_of, targets, strict=True):
                    if target != one.now and (target < one.now) == shrinks:
                        self._set(one, uuid, target)

    def _targets(self, uuid: str, others: Sequence[Record], slices_of: Sequence[_Slice], kill: bool) -> list[int]:
        """Returns the new limit of each slice, as MiB above the bases of its containers. If ``kill`` is true, the limit
        of a slice with an OOM killer may be set below its usage, but only as far as other containers wait for memory.
        """
        promised = sizing.held(self.with_waiting(others), promised=True).get(uuid, sizing.Held()).memory_mib
        comers = [Holder(wait.wanted[uuid]) for _one, wait in self._waits() if uuid in wait.wanted]
        room = self._room(uuid) - promised
        # The limit of a slice with an OOM killer is lowered only while a container waits. Otherwise a program could
        # allocate memory a moment later and would be killed without need.
        floors = [one.now if one.kills and not comers else one.used for one in slices_of]
        if kill and room < sum(floors):
            floors = [0 if one.kills else used for one, used in zip(slices_of, floors, strict=True)]
        holders = [Holder(Bounds(0, one.most), used) for one, used in zip(slices_of, floors, strict=True)]
        return spread(room, [*holders, *comers])[: len(slices_of)]

    def _slices(self, uuid: str, others: Sequence[Record]) -> list[_Slice]:
        """Returns the slices of a GPU that may use burst memory. A slice whose usage cannot be read is treated as if it
        used its whole limit.
        """
        together: dict[frozenset[str], list[tuple[Record, int]]] = {}
        for record in others:
            if (bounds := sizing.bounds_of(record, uuid)) is not None:
                ids = frozenset(one for one in record.slice_ids if gpu_of(one) == uuid)
                place = sizing.place_of(record)
                base = bounds.promised if place and not place.alone else self._promised_to_pod(record, uuid, others)
                together.setdefault(ids, []).append((record, base))
        return [self._slice(uuid, tuple(found)) for found in together.values()]

    @staticmethod
    def _promised_to_pod(record: Record, uuid: str, others: Sequence[Record]) -> int:
        """Returns how many MiB of a GPU the pod of a record was promised."""
        known = sizing.pods_on_slices(others)
        key = sizing.pod_of(record, uuid, known)
        mates = [one for one in others if sizing.pod_of(one, uuid, known) == key]
        return sizing.held(mates, promised=True)[uuid].memory_mib

    def _slice(self, uuid: str, found: tuple[tuple[Record, int], ...]) -> _Slice:
        most, now, used = 0, 0, 0
        for record, base in found:
            bounds = sizing.bounds_of(record, uuid)
            assert bounds is not None
            limit = next(-(-row["memory_bytes"] // MIB) for row in record.limits["devices"] if row["uuid"] == uuid)
            try:
                uses = -(-live_limits.used(self._files, record).get(uuid, 0) // MIB)
            except NotNow as fault:
                log.debug("%s", fault)
                uses = limit
            most, now, used = max(most, bounds.limit - base), max(now, limit - base), max(used, uses - base)
        return _Slice(found, most, now, used, any(one.limits.get("oom_killer") for one, _base in found))

    def _set(self, one: _Slice, uuid: str, target: int) -> None:
        for record, base in one.records:
            bounds = sizing.bounds_of(record, uuid)
            assert bounds is not None
            mine = max(bounds.promised, min(bounds.limit, base + target))
            try:
                self._resizer.resize(record.id, {uuid: Wanted(mine, burst=True)}, waits=False)
            except PluginError as fault:
                # The new limit was refused, because the container allocated more memory meanwhile or is ending. The
                # next poll sees its new state.
                log.info("allocation %s: its burst limit of GPU %s is not %d MiB: %s", record.id, uuid, mine, fault)
