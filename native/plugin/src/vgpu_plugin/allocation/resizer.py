# SPDX-License-Identifier: Apache-2.0
"""Changes the size (memory and share of each GPU) of an allocation while its container runs. An allocation is the
slices of GPUs that one container has.

For a larger size, the record (the saved data of the allocation) is saved first, and then the limits file is written.
The larger size is counted as soon as it is decided.

For a smaller size, the limits file is written first. Then the ledger (the container's account of used memory) is
checked, and then the record is saved. The smaller size is counted only from then on. If the plugin is killed in
between, the size of the record is valid, and ``restore`` writes it into the limits file.

On a node with equal slices, a container that grew uses the memory of free slices. These slices are then not offered to
the kubelet (``sizing.surplus``).
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .._shared.config import slices
from .._shared.config.slices import MIB
from .._shared.pods.annotations import Device
from ..errors import NotNow, PluginError, Refused, Unknown
from ..offer.pool import Pool
from . import live_limits, resize_rules, sizing
from .allocation_files import AllocationFiles
from .records import CLAIM, KUBELET, Record, RecordStore
from .resize_rules import Change, Publish, Resized, Wanted
from .sizer import Lender, NoLender, Sizer

# Wait after the limits were lowered. A memory allocation that passed the former limits may not be in the ledger yet; it
# is recorded there within this time.
SETTLE_S = 0.2
# KILL_S is the maximum wait for the OOM killer, because a process ends only at its next driver call. SHOWN_S is the
# maximum wait until the driver reports as little memory as the ledger, because the driver's figures are read only every
# two seconds. LOOK_S is the pause between two checks.
KILL_S, SHOWN_S, LOOK_S = 10.0, 6.0, 0.1

log = logging.getLogger(__name__)


class Resizer:
    """Resizes allocations. The caller must not hold the records' lock. ``sleep`` is the function that waits."""

    def __init__(
        self,
        records: RecordStore,
        pool: Pool,
        files: AllocationFiles,
        sizer: Sizer,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._records = records
        self._pool = pool
        self._files = files
        self._sizer = sizer
        self._sleep = sleep
        # Allocations whose processes still use more than the new size.
        self._leaving: set[str] = set()
        self._withheld: set[str] = set()
        # Returns the bytes that the driver reports as used by (record, GPU UUID), if they exceed the usage in the
        # ledger by more than a tolerance, otherwise 0. The driver's value is checked, because a tenant can forge its
        # ledger.
        self.shown: Callable[[Record, str], int] = lambda _record, _uuid: 0
        # Takes back burst memory from other containers for an allocation that was promised this memory. Burst memory is
        # memory above a container's promised amount.
        self.lender: Lender = NoLender()
        # On a node where the driver enforces limits, sets the driver's limit of an allocation to that of its limits
        # file.
        self.enforce: Callable[[str], str] = lambda _allocation: ""

    def resize(
        self,
        allocation: str,
        wanted: Mapping[str, Wanted],
        kill: bool = False,
        publish: Publish | None = None,
        waits: bool = True,
    ) -> Resized:
        """Gives an allocation new sizes, by GPU UUID. ``kill`` switches the OOM killer on for the allocation, so that a
        size below the current usage is allowed. ``waits`` is true if this call waits for the driver and the OOM killer.
        Otherwise the caller tries again later. Raises PluginError, and then nothing is changed.
        """
        self._make_room(allocation, wanted)
        with self._records.lock:
            record = self._resizable(allocation)
            resize_rules.refuse_bursting(record, wanted)
            before = self._devices(record)
            now = [resize_rules.sized_as(one, wanted) for one in before]
            after = self._sized(record, now, kill)
            used = self._used(record, before, now)
            changes = [Change(old, new, used.get(old.uuid, -1)) for old, new in zip(before, now, strict=True)]
            if after == record:
                live_limits.rewrite(self._files, record)
                return Resized(record, changes)
            if not after.limits.get("oom_killer"):
                resize_rules.refuse_in_use(record, now, used)
                if not waits and self._over(record, resize_rules.lowered(before, now)):
                    raise NotNow(resize_rules.shown_more(record))
            self._refuse_without_room(record, before, now)
            counted = [resize_rules.greater(old, new) for old, new in zip(before, now, strict=True)]
            self._sizer.reserve(self._sized(record, counted, False))
            self.lender.done(allocation)
        try:
            return self._change(record, after, changes, publish, waits)
        finally:
            with self._records.lock:
                if allocation not in self._leaving:
                    self._sizer.release(allocation)
            self.offer()

    def _change(
        self, record: Record, after: Record, changes: list[Change], publish: Publish | None, waits: bool
    ) -> Resized:
        leaving = False
        try:
            if any(one.now.memory_mib < one.before.memory_mib for one in changes):
                leaving = self._lower(
                    record, after, [resize_rules.lesser(one.before, one.now) for one in changes], waits
                )
            tell = functools.partial(publish or _nobody, [one.now for one in changes], leaving)
            # The order of the steps makes sure that the size that the cluster counts is never below the real size, even
            # if a step fails.
            grows = any(resize_rules.greater(one.before, one.now) != one.before for one in changes)
            steps: list[Callable[[], object]] = [functools.partial(self._put, after, leaving), tell]
            for step in reversed(steps) if grows else steps:
                step()
        except BaseException:
            self._put_back(record)
            raise
        live_limits.rewrite(self._files, after)
        self.enforce(after.id)
        for one in changes:
            log.info(
                "allocation %s: GPU %s: from %d MiB and %d %% to %d MiB and %d %%",
                *(record.id, *one.before[:3], *one.now[1:3]),
            )
        return Resized(after, changes, leaving)

    def _put(self, after: Record, leaving: bool) -> None:
        with self._records.lock:
            if self._records.get(after.id) is None:
                raise NotNow(f"allocation {after.id} ended while it was resized")
            self._records.put(after)
            if leaving:
                self._leaving.add(after.id)

    def _put_back(self, record: Record) -> None:
        with self._records.lock:
            found = self._records.get(record.id)
            if found is None:
                return
            if found != record:
                self._records.put(record)
            self._leaving.discard(record.id)
            live_limits.rewrite(self._files, record)

    def _lower(self, record: Record, after: Record, lesser: list[Device], waits: bool) -> bool:
        """Lowers the limits to the smaller of the former and the new size. Returns True if the OOM killer has not freed
        enough memory yet. Raises Refused if the container has allocated more memory meanwhile.
        """
        low = self._sized(record, lesser, bool(after.limits.get("oom_killer")))
        with self._records.lock:
            if self._records.get(record.id) is None:
                raise NotNow(f"allocation {record.id} ended before it was resized")
            live_limits.rewrite(self._files, low)
        self._sleep(SETTLE_S)
        kills = bool(after.limits.get("oom_killer"))
        if not kills:
            resize_rules.refuse_in_use(record, lesser, live_limits.used(self._files, record))
        lowered = resize_rules.lowered(self._devices(record), lesser)
        patience = (KILL_S if kills else SHOWN_S) if waits else LOOK_S
        for _look in range(round(patience / LOOK_S)):
            if not self._over(record, lowered):
                return False
            self._sleep(LOOK_S)
        if not kills:
            raise NotNow(resize_rules.shown_more(record))
        return True

    def _over(self, record: Record, devices: list[Device]) -> bool:
        """Returns whether the container's programs use more than these sizes. The larger value of the ledger and of the
        driver counts. Raises NotNow.
        """
        used = live_limits.used(self._files, record)
        return any(max(used.get(one.uuid, 0), self.shown(record, one.uuid)) > one.memory_mib * MIB for one in devices)

    def known(self) -> list[Record]:
        """Returns the records whose containers hold memory. The records of ended pods are left out. Such a record is
        kept for a minute, in which another pod may already have its slices.
        """
        with self._records.lock:
            ids = {one.id for one in self._sizer.others()}
            return [one for one in self._records.all() if one.id in ids]

    # --- the requested size

    def _resizable(self, allocation: str) -> Record:
        record = self._records.get(allocation)
        if record is None:
            raise Unknown(f"there is no allocation {allocation}; see: vgpuctl status")
        if not record.limits or any(one.get("unlimited") for one in record.limits["devices"]):
            raise Refused(
                f"allocation {allocation} has GPUs that libvgpu does not share, so it has no size; expected a slice "
                "of mode vcuda, see: vgpuctl slices"
            )
        if record.kind == CLAIM:
            raise Refused(
                f"allocation {allocation} belongs to a claim, whose size the kube-scheduler allocated and counts; "
                "expected an allocation of a pod, a lease or vgpuctl run. Create another claim for another size"
            )
        if record.limits.get("deny"):
            raise NotNow(f"allocation {allocation} has no size yet; try again when its container has started")
        if self._sizer.reserved(allocation):
            raise NotNow(
                f"allocation {allocation}: an earlier change of its size is not done yet; try again. If processes use "
                "more than that size, end them first"
            )
        return record

    def promises(self, record: Record) -> bool:
        """Returns whether the record's percent of the SMs is promised to the container, and not only a limit."""
        return record.kind == KUBELET and self._sizer.settings.requested

    def _devices(self, record: Record) -> list[Device]:
        """Returns the sizes of a record in MiB and percent of the SMs. On a node that promises shares, 0 percent means
        no limit.
        """
        promises = self.promises(record)
        return [
            Device(
                one["uuid"],
                -(-one["memory_bytes"] // MIB),
                record.cores.get(one["uuid"], 0) if promises else one["sm_percent"],
            )
            for one in record.limits["devices"]
        ]

    def _sized(self, record: Record, devices: list[Device], kill: bool) -> Record:
        """Returns a copy of the record with new sizes. A size in bytes that is not a whole number of MiB stays as it is
        if its number of MiB does not change.
        """
        rows = []
        for had, old, new in zip(record.limits["devices"], self._devices(record), devices, strict=True):
            memory = had["memory_bytes"] if new.memory_mib == old.memory_mib else new.memory_mib * MIB
            percent = had["sm_percent"] if new.cores == old.cores else new.cores or sizing.WHOLE
            rows.append({**had, "memory_bytes": memory, "sm_percent": percent})
        if rows == record.limits["devices"] and not (kill and not record.limits.get("oom_killer")):
            return record
        limits: dict[str, Any] = {sizing.SIZED: 1, **record.limits, "devices": rows}
        if kill:
            limits["oom_killer"] = True
        cores = {one.uuid: one.cores for one in devices if one.cores} if self.promises(record) else record.cores
        return replace(record, limits=limits, cores=cores)

    # --- checks before a resize

    def _make_room(self, allocation: str, wanted: Mapping[str, Wanted]) -> None:
        """If the allocation requests more memory than it has, takes back burst memory from other containers. This is
        done only if the new size fits next to the memory that others were promised.
        """
        with self._records.lock:
            record = self._records.get(allocation)
            if record is None or not record.limits or record.limits.get("deny"):
                return
            more = {
                one.uuid: sizing.Bounds(size.memory_mib, size.memory_mib)
                for one in self._devices(record)
                if (size := wanted.get(one.uuid, Wanted())).memory_mib is not None
                and size.memory_mib > one.memory_mib
                and not size.burst
            }
            others = sizing.held(self._sizer.others(record), promised=True) if more else {}
            for uuid in more:
                room = sizing.room_mib(self._pool.gpu(uuid), self._sizer.settings.config)
                if others.get(uuid, sizing.Held()).memory_mib + (wanted[uuid].memory_mib or 0) > room:
                    return
        if more:
            self.lender.give_back(record, more)

    def _used(self, record: Record, before: list[Device], now: list[Device]) -> dict[str, int]:
        """Returns GPU UUID → bytes in use. If the usage cannot be read and the container only grows, the result is
        empty and no error is raised.
        """
        shrinks = any(new.memory_mib < old.memory_mib for old, new in zip(before, now, strict=True))
        try:
            return live_limits.used(self._files, record)
        except NotNow:
            if shrinks:
                raise
            return {}

    def _refuse_without_room(self, record: Record, before: list[Device], now: list[Device]) -> None:
        """Raises Refused if a larger size does not fit on its GPU. A size that stays the same or shrinks
        always fits.
        """
        others = self._sizer.others(record)
        held, shares = sizing.held(others), sizing.held(others, limits=True)
        settings = self._sizer.settings
        for old, new in zip(before, now, strict=True):
            gpu = self._pool.gpu(new.uuid)
            memory = new.memory_mib if new.memory_mib > old.memory_mib else 0
            more = new.cores > old.cores
            cores = new.cores if more and self.promises(record) else 0
            fault = sizing.misfit(
                gpu, settings.config, held.get(new.uuid, sizing.Held()), Device(new.uuid, memory, cores)
            )
            if more and not fault and not settings.requested:
                at = [one for one in self._pool.slices if one.uuid == new.uuid]
                fault = sizing.crowded(at, shares.get(new.uuid, sizing.Held()), new.cores)
                fault = fault and f"GPU {new.uuid}: {fault}"
            if fault:
                raise Refused(
                    f"allocation {record.id}: {fault}; request less, or make another allocation smaller first"
                )

    # --- regular work

    def restore(self) -> None:
        """Writes the sizes of the records into the limits files, and notes which containers use more than their size.
        Called after a restart of the plugin.
        """
        with self._records.lock:
            for record in self._records.all():
                if not record.limits or record.limits.get("deny"):
                    continue
                try:
                    # The limits are written before the ledger is read, so that they are correct even if a tenant has
                    # damaged the ledger.
                    live_limits.rewrite(self._files, record)
                    used = live_limits.used(self._files, record)
                except NotNow as fault:
                    log.debug("%s", fault)  # The missing files are created when the container starts.
                    continue
                if record.kind == CLAIM or not record.limits.get("oom_killer"):
                    # Without an OOM killer the usage cannot exceed the size. If the ledger shows more, a tenant has
                    # forged it, to take memory from other containers.
                    continue
                devices = self._devices(record)
                if any(used.get(one.uuid, 0) > one.memory_mib * MIB for one in devices):
                    held = [
                        one._replace(memory_mib=max(one.memory_mib, -(-used.get(one.uuid, 0) // MIB)))
                        for one in devices
                    ]
                    self._leaving.add(record.id)
                    self._sizer.reserve(self._sized(record, held, False))
        self.offer()

    def leaving(self, allocation: str) -> bool:
        """Returns whether processes of an allocation still use more than its size."""
        return allocation in self._leaving

    def poll(self) -> None:
        """Checks the containers that were resized to less memory than they used. Once their processes have freed the
        memory, stops counting the former size, and offers the slices that fit again.
        """
        with self._records.lock:
            for allocation in list(self._leaving):
                record = self._records.get(allocation)
                try:
                    gone = record is None or not self._over(record, self._devices(record))
                except PluginError:
                    continue
                if gone:
                    self._leaving.discard(allocation)
                    self._sizer.release(allocation)
        self.offer()

    def offer(self) -> None:
        """Updates which slices are offered to the kubelet. A slice is withheld if a container that grew uses its
        memory.
        """
        with self._records.lock:
            desired: set[str] = set()
            sized = any(sizing.SIZED in one.limits for one in self._records.all())
            if sized and not self._sizer.settings.requested:
                records = self._sizer.others()
                for gpu in self._pool.gpus:
                    at = [one for one in self._pool.slices if one.uuid == gpu.uuid and self._pool.limited(one.id)]
                    share = slices.share_of(gpu.facts(), self._sizer.settings.config)
                    if at and share is not None:
                        desired |= sizing.surplus(at, records, sizing.capacity_mib(gpu, share))
            # Slices of leases (reservations for programs on this host) are left out, because leases.py withholds and
            # releases them.
            desired = {one for one in desired if not self._records.lease_of(one)}
            for slice_id in self._withheld - desired:
                if not self._records.lease_of(slice_id):
                    self._pool.give_back(slice_id)
            for slice_id in desired - self._withheld:
                self._pool.withhold(slice_id, "a resized container uses its memory")
            self._withheld = desired

    def notes(self) -> list[str]:
        """Returns warnings for the node's administrator."""
        if not self._withheld:
            return []
        count = f"{len(self._withheld)} slice{'s are' if len(self._withheld) > 1 else ' is'}"
        return [f"{count} not offered, because resized containers use their memory; see: vgpuctl slices"]


def _nobody(_devices: list[Device], _leaving: bool) -> None:
    pass
