# SPDX-License-Identifier: Apache-2.0
"""Shares of claims: the parts of GPUs that ResourceClaims (Dynamic Resource Allocation) got on this node. For each
request of a claim, a record (the saved data of the share) and files are created once, and are kept until the kubelet
unprepares the claim.

The cluster's scheduler allocated the requested shares, but it may be wrong, for example after a pod was deleted by
force, or if two schedulers run. So the node checks again whether the shares fit next to everything else on the GPU:
containers of the device plugin, leases (slices reserved on this host) and other claims.

Each share takes a free slice of its GPU, so that the device plugin cannot allocate the same slice.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .._shared.abi import files as abi_files
from .._shared.config.sharing import VCUDA, Piece
from .._shared.config.slices import MIB
from .._shared.pods.annotations import Device
from ..errors import NotNow, PluginError, Refused, Taken
from . import admission, sizing
from .allocation_files import LIBRARY_FILE, MOST_CLAIMS, AllocationFiles
from .allocator import Allocator
from .records import CLAIM, Record

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """One request of a claim. ``parts`` are (UUID of the device, MiB, percent of the SMs); None as MiB or percent means
    all of the device. ``flags`` are written into the limits file.
    """

    request: str
    parts: tuple[tuple[str, int | None, int | None], ...]
    flags: Mapping[str, Any] = field(default_factory=dict)


def allocation_id(uid: str, request: str) -> str:
    """Returns an allocation id that is computed from the claim and the request only. So it is the same after a reboot,
    and after the record was lost.
    """
    return hashlib.sha256(f"{uid}/{request}".encode()).hexdigest()[:16]


class ClaimShares:
    """Creates and ends the shares of claims. Each method takes the allocator's lock, so two calls for one claim run one
    after the other.
    """

    def __init__(self, allocator: Allocator, files: AllocationFiles) -> None:
        self._allocator = allocator
        self._files = files

    def of(self, uid: str) -> list[Record]:
        return [one for one in self._allocator.records.all() if one.kind == CLAIM and one.claim == uid]

    def prepare(
        self, uid: str, holder: str, wanted: Sequence[Wanted], publish: Callable[[list[Record]], None]
    ) -> list[Record]:
        """Returns the record of each request, and creates its files. Existing files are kept, because containers may
        have them mounted. ``publish`` writes the records into a CDI file for the container runtime. If one request
        fails, all allocations created by this call are ended. Raises PluginError.
        """
        made: list[Record] = []
        with self._allocator.lock:
            self._end_others(uid, wanted)
            try:
                records = [self._one(uid, holder, one, made) for one in wanted]
                publish(records)
            except BaseException:
                for record in made:
                    self._allocator.forget(record.id)
                raise
        return records

    def _end_others(self, uid: str, wanted: Sequence[Wanted]) -> None:
        """Ends allocations that the same claim had before. A claim that a user created outlives its pods, so the
        scheduler may allocate other devices to it later.
        """
        now = {one.request: one for one in wanted}
        for record in self.of(uid):
            if record.request in now and self._is_of(record, now[record.request]):
                continue
            if record.limits and abi_files.ledger_in_use(f"{self._files.folder(record.id)}/rw/ledger"):
                raise NotNow(
                    f"request {record.request} of the claim had another share here, which a program still uses; end "
                    "the containers of the claim's former pod"
                )
            log.info("allocation %s ends, because its claim has another allocation now", record.id)
            self._allocator.forget(record.id)

    def _is_of(self, record: Record, wanted: Wanted) -> bool:
        pieces = [self._allocator.pool.piece(one) for one in record.slice_ids]
        devices = [one.device if one else "" for one in pieces]
        if not record.limits:
            return devices == [uuid for uuid, _mib, _cores in wanted.parts]
        known = [(one["uuid"], one["memory_bytes"], one["sm_percent"]) for one in record.limits["devices"]]
        return known == [(one["uuid"], one["memory_bytes"], one["sm_percent"]) for one in self._devices(wanted)]

    def _one(self, uid: str, holder: str, wanted: Wanted, made: list[Record]) -> Record:
        known = self._allocator.records.get(allocation_id(uid, wanted.request))
        if known is not None:
            if known.limits:
                self._make_whole(known)
            return known
        record = self._new(uid, holder, wanted)
        pieces = [piece for one in record.slice_ids if (piece := self._allocator.pool.piece(one)) is not None]
        self._allocator.keep(record, pieces)
        made.append(record)
        log.info("allocation %s (%s): request %s of %s", record.id, CLAIM, wanted.request, holder)
        return record

    def _make_whole(self, record: Record) -> None:
        """Creates the missing files of a record again. After a reboot all files are missing."""
        if not (Path(record.library) / LIBRARY_FILE).is_file():
            raise Refused(
                f"allocation {record.id}: {record.library}/{LIBRARY_FILE} is gone, and containers of the claim mount "
                "that version; delete the pods of the claim"
            )
        try:
            if self._files.lacks(record):
                self._files.mend(record)
        except OSError as fault:
            raise NotNow(
                f"allocation {record.id}: its files cannot be created in {self._files.root}: {fault}"
            ) from fault

    def _new(self, uid: str, holder: str, wanted: Wanted) -> Record:
        pieces = self._pieces(wanted)
        admission.refuse_outside(pieces, self._allocator.outside.poll_slice)
        record = Record(
            allocation_id(uid, wanted.request),
            CLAIM,
            tuple(one.id for one in pieces),
            holder=holder,
            claim=uid,
            request=wanted.request,
        )
        if all(piece.mode != VCUDA for piece in pieces):
            return record
        devices = self._devices(wanted)
        self._refuse_oversold(wanted, devices)
        self._allocator.enforcement.refuse_unproved()
        devices = self._allocator.enforcement.with_cards(devices)
        limits = {"allocation": record.id, "devices": devices, **wanted.flags}
        promised = self._promised(wanted)
        library = str(self._allocator.library())
        return replace(record, limits=limits, cores=promised, library=library, number=self._number())

    def _devices(self, wanted: Wanted) -> list[dict[str, Any]]:
        """Returns the devices for the limits file. If two parts are on one device, the device has the sum of their
        sizes."""
        out: dict[str, dict[str, Any]] = {}
        for uuid, mib, cores in wanted.parts:
            device = out.setdefault(uuid, {"uuid": uuid, "memory_bytes": 0, "sm_percent": 0})
            device["memory_bytes"] += (mib or 0) * MIB
            device["sm_percent"] = min(sizing.WHOLE, device["sm_percent"] + (cores or sizing.WHOLE))
        return list(out.values())

    def _promised(self, wanted: Wanted) -> dict[str, int]:
        """Returns GPU UUID → promised percent of the SMs. If several parts are on one device, their percents are added
        up. The result is empty on a node with equal slices, because there the percent is only a limit.
        """
        out: dict[str, int] = {}
        for uuid, _mib, percent in wanted.parts if self._allocator.settings.requested else ():
            out[uuid] = out.get(uuid, 0) + (percent or 0)
        return {uuid: percent for uuid, percent in out.items() if percent}

    def _pieces(self, wanted: Wanted) -> list[Piece]:
        """Returns a free slice for each part. Raises Taken if a device has no free slice, and NotNow if a device is
        unhealthy.
        """
        pool = self._allocator.pool
        held = {one for record in self._allocator.records.all() for one in record.slice_ids}
        chosen: list[Piece] = []
        for uuid, mib, _cores in wanted.parts:
            mine = [one for one in pool.slices if one.device == uuid]
            free = [one for one in mine if one.id not in held and one not in chosen and not pool.outside(one.id)]
            if not mine:
                raise Refused(f"this node has no device {uuid} for request {wanted.request}")
            if reason := pool.unhealthy_reason(mine[0].uuid):
                raise NotNow(f"{uuid} is unhealthy: {reason}")
            if (mine[0].mode == VCUDA) != (mib is not None):
                raise Refused(f"{uuid} is now shared in another mode; delete the claim's pods")
            if not free:
                raise Taken(f"{uuid}: all {len(mine)} of its slots are held by others; see: vgpuctl status")
            chosen.append(free[0])
        return chosen

    def _refuse_oversold(self, wanted: Wanted, devices: list[dict[str, Any]]) -> None:
        allocator = self._allocator
        held = allocator.sizer.held()
        promised = self._promised(wanted)
        for one in devices:
            asked = Device(one["uuid"], one["memory_bytes"] // MIB, promised.get(one["uuid"], 0))
            before = held.get(one["uuid"], sizing.Held())
            if fault := sizing.misfit(allocator.pool.gpu(one["uuid"]), allocator.settings.config, before, asked):
                raise Taken(fault)

    def _number(self) -> int:
        used = {one.number for one in self._allocator.records.all() if one.kind == CLAIM and one.limits}
        number = next((one for one in range(MOST_CLAIMS) if one not in used), None)
        if number is None:
            raise Taken(
                f"{MOST_CLAIMS} shares of claims exist on this node, the maximum that containers have mount points for"
            )
        return number

    def end(self, uid: str) -> list[str]:
        """Ends all allocations of a claim, and returns them. An unknown claim is no error."""
        with self._allocator.lock:
            ended = [one.id for one in self.of(uid)]
            for allocation in ended:
                self._allocator.forget(allocation)
        return ended

    def restore(self) -> list[str]:
        """Creates the missing files of all claims when the plugin starts. Returns an error message for each share whose
        files cannot be created.
        """
        faults = []
        with self._allocator.lock:
            for record in [one for one in self._allocator.records.all() if one.kind == CLAIM and one.limits]:
                try:
                    self._make_whole(record)
                except PluginError as fault:
                    faults.append(str(fault))
        return faults
