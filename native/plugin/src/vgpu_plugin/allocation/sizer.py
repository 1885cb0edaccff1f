# SPDX-License-Identifier: Apache-2.0
"""Applies the size that a container's pod requested (setting ``sliceSizing: requested``). It reads the plan of the
scheduler (the chosen GPUs and sizes) from the API server, reserves the memory and cores on the node, and saves the size
in the record, the saved data of the allocation.

The lock is not held while the API server is asked. In this time the decided size is not saved yet, so this program
keeps it as a reservation and counts it like a saved size.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from .._shared.pods.annotations import Device
from ..errors import NotNow, Refused
from ..node import checkpoint
from ..offer.pool import Pool
from ..offer.preference import gpu_of
from ..offer.settings import Settings
from . import sizing
from .pod_mounts import MountCheck
from .records import KUBELET, Record, RecordStore

if TYPE_CHECKING:
    from .pod_sizes import PodSizes

# The keys of a device in a record's limits that stay when the container gets its size.
KEPT = ("card_bytes", sizing.PLACE)

log = logging.getLogger(__name__)


class Lender(Protocol):
    """Interface of burst.Burst, which manages burst memory. This is memory above a container's promised amount, which
    it may use until another container needs it.
    """

    def give_back(self, record: Record, wanted: Mapping[str, sizing.Bounds], promised: bool = True) -> None:
        """Takes back unused burst memory of other containers on these GPUs, so that the container of ``record`` can get
        the memory that it wants. If that is not enough and ``promised`` is true, it also takes back memory in use, for
        which the OOM killer kills processes.
        """

    def done(self, allocation: str) -> None:
        """Ends the wait of an allocation for memory. Called when it has its promised memory or no longer needs it."""

    def with_waiting(self, others: Sequence[Record], record: Record) -> list[Record]:
        """Returns the records of ``others``, and those of the containers that wait for promised memory and may run at
        the same time as the container of ``record``.
        """


class NoLender:
    """Takes the place of burst.Burst on a node without burst memory."""

    def give_back(self, record: Record, wanted: Mapping[str, sizing.Bounds], promised: bool = True) -> None:
        pass

    def done(self, allocation: str) -> None:
        pass

    def with_waiting(self, others: Sequence[Record], record: Record) -> list[Record]:
        return list(others)


class Short(Exception):
    """Raised if other containers still use promised memory as burst memory. It has two values by GPU UUID: the promised
    amount and the limit that the container should get, and the MiB that are missing.
    """

    def __init__(self, wanted: dict[str, sizing.Bounds], missing: dict[str, int]) -> None:
        super().__init__()
        self.wanted, self.missing = wanted, missing


class Sizer:
    """Decides and saves the sizes of containers. ``pods`` finds the pods and their plans at the API server; it is None
    if no API server is configured. ``mounts`` checks a pod's mounts; its client of the API server may have another
    timeout. ``settings`` may be replaced only while the records' lock is held.
    """

    def __init__(
        self,
        records: RecordStore,
        pool: Pool,
        checkpoint_file: Path,
        settings: Settings,
        pods: PodSizes | None = None,
        mounts: MountCheck | None = None,
    ) -> None:
        self._records = records
        self._pool = pool
        self._checkpoint_file = checkpoint_file
        self.settings = settings
        self._pods = pods
        self.mounts = mounts or MountCheck(pods)
        # The manager of burst memory (burst.Burst). It is set by assembly.py.
        self.lender: Lender = NoLender()
        # Sizes that are decided and not yet saved: allocation → its record with the new size.
        self._reserved: dict[str, Record] = {}

    def planned(self, available: Sequence[str], size: int, must: Sequence[str]) -> list[str]:
        """Returns ``must`` and free slices of the other GPUs that the scheduler planned for the container that is
        admitted now, at most ``size`` together. The result is only a hint for the kubelet, and may have fewer slices.
        """
        chosen = list(must)
        if not self.settings.requested or self._pods is None or len(chosen) >= size:
            return chosen
        for uuid in self._pods.expected(size):
            free = next((one for one in available if gpu_of(one) == uuid), "")
            if free and len(chosen) < size and uuid not in map(gpu_of, chosen):
                chosen.append(free)
        return chosen

    def held(self, record: Record | None = None) -> dict[str, sizing.Held]:
        """Returns GPU UUID → memory and cores that the records of ``others`` hold."""
        return sizing.held(self.others(record))

    def others(self, record: Record | None = None) -> list[Record]:
        """Returns the records whose containers may run at the same time as the container of ``record``, or without it
        all records. Records of containers that the kubelet no longer knows are left out.
        """
        found = checkpoint.read(self._checkpoint_file)
        return [
            one
            for one in (self._reserved.get(known.id, known) for known in self._records.all())
            if (record is None or sizing.together(record, one))
            and (found is None or one.kind != KUBELET or found.holds(one.id, frozenset(one.kubelet_ids)))
        ]

    def reserve(self, record: Record) -> None:
        """Counts this record instead of the saved record of its allocation, until ``release`` is called. The caller
        holds the records' lock.
        """
        self._reserved[record.id] = record

    def release(self, allocation: str) -> None:
        self._reserved.pop(allocation, None)

    def reserved(self, allocation: str) -> bool:
        """Returns whether an allocation has a size that is decided and not yet saved."""
        return allocation in self._reserved

    def size(self, record: Record) -> None:
        """Saves the size that the pod of a record requested. Raises Refused in three cases: the pod has no plan, it
        mounts a volume over the allocation's files, or the size does not fit on the GPUs that the kubelet chose. The
        caller must not hold the lock.
        """
        if self._pods is None:
            raise NotNow(
                f"allocation {record.id} needs its size from the API server, and this program has no --kubeconfig"
            )
        owner = self._pods.owner(record)
        self.mounts.refuse(owner, record)
        plan = self._pods.plan(owner)
        planned = next(part.devices for part in plan if part.container == owner.container)
        record = sizing.placed(record, sizing.place_in(plan, owner.container, owner.pod["metadata"]["uid"]))
        try:
            devices = self._reserve_promised(record, planned, self._pods.priority(owner, self.settings.config))
        except Refused as fault:
            self._pods.report(owner, "VgpuNoRoom", str(fault))
            raise Refused(f"pod {owner.name}: {fault}") from None
        try:
            if {one.uuid for one in devices} != {one.uuid for one in planned}:
                log.info(
                    "pod %s: it gets the GPUs %s instead of the planned GPUs", owner.name, [one.uuid for one in devices]
                )
                self._pods.write_given(owner, sizing.with_part(plan, owner.container, devices))
            with self._records.lock:
                if self._records.get(record.id) is None:
                    raise NotNow(f"allocation {record.id} ended while its size was reported to the API server")
                self._records.put(self._reserved[record.id])
            log.info("allocation %s: sizes of pod %s", record.id, owner.name)
        finally:
            with self._records.lock:
                del self._reserved[record.id]

    def _reserve_promised(self, record: Record, planned: Sequence[Device], priority: int) -> list[Device]:
        """Reserves the size like _reserve. If other containers use the memory as burst memory, takes it back and tries
        once more. Raises NotNow if the memory is still in use after that.
        """
        for last in (False, True):
            try:
                return self._reserve(record, planned, priority)
            except Short as fault:
                if last:
                    short = ", ".join(f"{mib} MiB of GPU {uuid}" for uuid, mib in fault.missing.items())
                    raise NotNow(
                        f"allocation {record.id}: {short} are promised to it, but still used as burst memory by other "
                        "containers; its start is tried again until they have freed that memory"
                    ) from None
                self.lender.give_back(record, fault.wanted)
        raise AssertionError  # This line is never reached, because the loop returns or raises.

    def _reserve(self, record: Record, planned: Sequence[Device], priority: int) -> list[Device]:
        """Decides the size of a container and reserves it, so that it is counted while the API server is asked. Raises
        Refused if the size does not fit, and Short if other containers use the promised memory as burst memory.
        """
        with self._records.lock:
            if record.id in self._reserved:
                raise NotNow(f"allocation {record.id}: another call is reading its size; the start is tried again")
            given_limits = record.limits["devices"]
            given = [self._pool.gpu(one["uuid"]) for one in given_limits]
            others = self.others(record)
            config, held = self.settings.config, sizing.held(others)
            devices = sizing.assign(planned, given, config, sizing.held(others, promised=True))
            room = {one.uuid: sizing.room_mib(one, config) for one in given}
            free = {uuid: mib - held.get(uuid, sizing.Held()).memory_mib for uuid, mib in room.items()}
            missing = {one.uuid: one.memory_mib - free[one.uuid] for one in devices}
            if any(mib > 0 for mib in missing.values()):
                wanted = {one.uuid: sizing.Bounds(one.memory_mib, one.memory_mib + one.burst_mib) for one in devices}
                raise Short(wanted, {uuid: mib for uuid, mib in missing.items() if mib > 0})
            limits = {key: value for key, value in record.limits.items() if key != "deny"}
            kept = {one["uuid"]: {key: one[key] for key in KEPT if key in one} for one in given_limits}
            rows = [{**one, **kept[one["uuid"]]} for one in sizing.limits_of(devices)]
            claimed = sizing.held(self.lender.with_waiting(others, record))
            for one in rows:
                if sizing.PROMISED in one:
                    # The container's first limit includes all free memory, because a program may ask for the size of
                    # the GPU's memory only once.
                    spare = room[one["uuid"]] - claimed.get(one["uuid"], sizing.Held()).memory_mib
                    one["memory_bytes"] = max(one[sizing.PROMISED], min(one[sizing.LIMIT], spare)) * sizing.MIB
            limits.update(devices=rows, priority=priority)
            cores = {one.uuid: one.cores for one in devices if one.cores}
            self._reserved[record.id] = replace(record, limits=limits, cores=cores)
            # The container no longer waits, because its memory is reserved now. Both changes are made under one lock,
            # so that the memory is never counted twice.
            self.lender.done(record.id)
            return devices
