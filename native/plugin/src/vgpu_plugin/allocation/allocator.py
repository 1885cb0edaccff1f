# SPDX-License-Identifier: Apache-2.0
"""Allocate and PreStartContainer: from slice ids to the files, mounts and environment of a container."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .._shared.config import sharing
from .._shared.config.sharing import MPS, VCUDA, Piece
from .._shared.config.slices import MIB
from .._shared.pods.annotations import Device
from ..errors import NotNow, Refused, Taken
from ..inject import cdi, handover
from ..inject.driver_files import DriverFiles
from ..node import checkpoint
from ..node.gpus import Gpu
from ..node.paths import Paths
from ..offer import settings as node_settings
from ..offer.pool import Pool
from ..offer.preference import gpu_of
from . import sizing
from .allocation_files import LIBRARY_FILE, AllocationFiles
from .library import CurrentLibrary
from .limit_devices import limit_devices
from .records import KUBELET, Record, RecordStore
from .substitution import on_gpus, substitute

if TYPE_CHECKING:
    from .pod_sizes import PodSizes

log = logging.getLogger(__name__)


class OutsideUse(Protocol):
    """Who knows of containers that Kubernetes did not start."""

    def look_at(self, slice_id: str) -> bool:
        """Whether such a container holds a slice now."""

    def deny(self, slice_ids: tuple[str, ...], denied: bool) -> None:
        """Keeps them from slices that were given out, or lets them again."""


@dataclass(frozen=True)
class Answer:
    """What a container gets. ``devices`` are (container path, host path, permissions)."""

    allocation: str
    slice_ids: tuple[str, ...]
    envs: dict[str, str]
    mounts: list[tuple[str, str, bool]]
    devices: list[tuple[str, str, str]] = field(default_factory=list)
    cdi_devices: list[str] = field(default_factory=list)
    annotations: dict[str, str] = field(default_factory=dict)


class Allocator:
    """Thread-safe: one lock over records and files, so that a slice is never given out and collected at once."""

    def __init__(
        self, paths: Paths, settings: node_settings.Settings, pool: Pool, records: RecordStore, files: AllocationFiles
    ) -> None:
        self._paths = paths
        self.settings = settings
        self._pool = pool
        self._files = files
        self.hand_over = settings.hand_over(paths.host_root, can_cdi=False)
        # What keeps a slice from being used on two sides (static_slices.py).
        self.outside: OutsideUse | None = None
        # Whether the kubelet has called GetPreferredAllocation, which those before 1.19 do not know.
        self.kubelet_asks = False
        # Who knows what pods asked for (pod_sizes.py); None where no API server is known.
        self.sizes: PodSizes | None = None
        self.records = records
        self.lock = threading.RLock()
        # Sizes that are decided and not yet written down: the API server is told in between, without the lock.
        self._sizing: dict[str, Record] = {}
        self._library = CurrentLibrary()
        # UUID → flags in the limits of its slices, and of which settings and GPU they are.
        self._flags: dict[str, tuple[node_settings.Settings, Gpu, dict[str, Any]]] = {}

    def configure(self, settings: node_settings.Settings, driver: DriverFiles) -> None:
        """From now on allocations are made by these settings; those that exist stay as they are."""
        with self.lock:
            can_cdi = self._paths.cdi_dir is not None and any(
                name == "libcuda.so.1" for name, _host in driver.libraries
            )
            before, self.settings = self.hand_over, settings
            self.hand_over = settings.hand_over(self._paths.host_root, can_cdi)
            if self.hand_over != before:
                log.info("hand-over: %s (%s)", ", ".join(self.hand_over.strategies), self.hand_over.reason)

    def allocate(self, requests: Iterable[Iterable[str]]) -> list[Answer]:
        """One answer for each container; where one cannot be made, none is kept."""
        made: list[Answer] = []
        with self.lock:
            try:
                for ids in requests:
                    made.append(self.grant(list(ids), KUBELET))
            except Exception:
                for answer in made:
                    self.forget(answer.allocation)
                raise
        return made

    def grant(self, ids: list[str], kind: str, **lease: Any) -> Answer:
        """Makes one allocation with its files."""
        with self.lock:
            pieces = self._pool.resolve(ids)
            asked = tuple(ids)
            if kind == KUBELET:
                ids, pieces = self._given(ids, pieces)
                self._refuse_leased(pieces)
            else:
                self._refuse_held(pieces)
            self._refuse_outside(pieces)
            self._refuse_several(pieces)
            devices = self._devices(pieces)
            given = tuple(ids)
            allocation = os.urandom(8).hex()
            limits: dict[str, Any] = {}
            library = ""
            if any(piece.mode == VCUDA for piece in pieces):
                limits = self._limits(allocation, devices)
                if self.settings.requested and kind == KUBELET:
                    limits["deny"] = True  # its size is written when it starts, and not before
                elif self.settings.requested or self._sized_beside(devices):
                    self._refuse_oversold(devices, asked)
                library = str(self.library())
            asked = () if given == asked else asked
            record = Record(allocation, kind, given, limits, library, asked=asked, **lease)
            if limits:
                self._make_files(record)
            try:
                self._write_down(record)
            except BaseException:
                self._remove_files(record.id)
                raise
            if self.outside is not None:
                self.outside.deny(record.slice_ids, True)
                # Asked again: a container outside may have begun while the files were made, before it was denied.
                try:
                    self._refuse_outside(pieces)
                except NotNow:
                    self.forget(record.id)
                    raise
            log.info("allocation %s (%s): %s", record.id, kind, ", ".join(ids))
            try:
                return self._answer(record, pieces)
            except Refused:
                self.forget(record.id)
                raise

    def _given(self, ids: list[str], pieces: list[Piece]) -> tuple[list[str], list[Piece]]:
        """The slices for ids of the kubelet: others where it cannot spread them itself (substitution.py)."""
        if any(piece.mode != VCUDA for piece in pieces):
            return ids, pieces
        spread = self.settings.legacy_preferred and not self.kubelet_asks
        if not spread and not self.records.substituted:
            return ids, pieces
        _generation, offers = self._pool.offers(pieces[0].resource)
        given = substitute(ids, offers, self.records.all(), spread, self.settings.packed)
        return given, pieces if given == ids else self._pool.resolve(given)

    def _sized_beside(self, devices: list[dict[str, Any]]) -> bool:
        """Whether containers of asked sizes still hold these GPUs, from before a change of sliceSizing."""
        uuids = {one["uuid"] for one in devices}
        sized = (one.limits["devices"] for one in self.records.all() if "priority" in one.limits)
        return any(device["uuid"] in uuids for held in sized for device in held)

    def _refuse_oversold(self, devices: list[dict[str, Any]], asked: Iterable[str]) -> None:
        """Of an equal slice: it may be more than what pods of other sizes left."""
        before = self._held(asked)
        for one in devices:
            wanted = Device(one["uuid"], one["memory_bytes"] // MIB, 0)
            gpu = self._pool.gpu(one["uuid"])
            if fault := sizing.lacks(gpu, self.settings.config, before.get(gpu.uuid, sizing.Held()), wanted):
                raise Taken(fault)

    def _held(self, without: Iterable[str]) -> dict[str, sizing.Held]:
        """What containers hold of each GPU; those that the kubelet no longer knows hold nothing, and neither do those
        with an id of ``without``, which are one container's: they are of its pod, and do not run when it does.
        """
        found = checkpoint.read(self._paths.checkpoint)
        own = frozenset(without)
        return sizing.held(
            one
            for one in (self._sizing.get(known.id, known) for known in self.records.all())
            if own.isdisjoint(one.kubelet_ids)
            and (found is None or one.kind != KUBELET or found.holds(one.id, frozenset(one.kubelet_ids)))
        )

    def asked_for_preference(self) -> None:
        """The kubelet of now asks, so its choice holds."""
        if self.settings.legacy_preferred and not self.kubelet_asks:
            log.warning("legacyPreferred has no effect: this kubelet asks for a preference itself")
        self.kubelet_asks = True

    def _write_down(self, record: Record) -> None:
        try:
            self.records.put(record)
        except OSError as fault:
            raise NotNow(
                f"allocation {record.id} cannot be written down in {self._paths.records}: {fault}; make room there"
            ) from fault

    def _refuse_leased(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            if lease := self.records.lease_of(piece.id):
                raise NotNow(
                    f"slice {piece.id} is leased to a check on this host (allocation {lease}); start the pod again"
                )

    def _refuse_outside(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            if self.outside is not None and self.outside.look_at(piece.id):
                raise NotNow(
                    f"slice {piece.id} is used by a container outside Kubernetes on this host; stop it, or start the "
                    "pod again so that it gets another slice"
                )

    def _refuse_held(self, pieces: list[Piece]) -> None:
        """Of a lease: an Allocate may have come between its look and this lock."""
        holders = {one: record.id for record in self.records.all() for one in record.slice_ids}
        for piece in pieces:
            if piece.id in holders:
                raise Taken(f"slice {piece.id} is held by allocation {holders[piece.id]}; see: vgpuctl status")

    def _refuse_several(self, pieces: list[Piece]) -> None:
        """NVIDIA's failRequestsGreaterThanOne, which is for shared resources alone."""
        if len(pieces) < 2:
            return
        for piece in pieces:
            if piece.mode in sharing.SHARED_BY_NVIDIA and sharing.refuses_several(piece.mode, self.settings.config):
                raise Refused(
                    f"the container asks for {len(pieces)} of {piece.resource}, whose GPUs are shared by {piece.mode}: "
                    "more than one gives no more of a GPU; ask for 1, or set failRequestsGreaterThanOne: false"
                )

    def _limits(self, allocation: str, devices: list[dict[str, Any]]) -> dict[str, Any]:
        gpus = [self._pool.gpu(device["uuid"]) for device in devices]
        return {"allocation": allocation, "devices": devices, **self._flags_of(gpus)}

    def _flags_of(self, gpus: list[Gpu]) -> dict[str, Any]:
        """The same for every slice of a GPU until settings or GPU change, and in fractions to work out."""
        if len(gpus) > 1:
            return self.settings.limit_flags(gpus)
        (gpu,) = gpus
        known = self._flags.get(gpu.uuid)
        if known is None or known[0] is not self.settings or known[1] is not gpu:
            known = self._flags[gpu.uuid] = self.settings, gpu, self.settings.limit_flags(gpus)
        return known[2]

    def _devices(self, pieces: list[Piece]) -> list[dict[str, Any]]:
        return limit_devices(pieces, self.settings, len(self._pool.gpus))

    def library(self) -> Path:
        """The version folder that ``current`` names now. Raises Refused where there is no library."""
        return self._library.folder(self.settings.library_root)

    def _make_files(self, record: Record) -> None:
        try:
            self._files.make(record)
        except OSError as fault:
            self._remove_files(record.id)
            raise NotNow(f"allocation {record.id}: its files cannot be made: {fault}") from fault

    def _answer(self, record: Record, pieces: list[Piece]) -> Answer:
        envs: dict[str, str] = {}
        mounts: list[tuple[str, str, bool]] = []
        if record.limits:
            # Video memory is charged to nobody, so the capability that uses it is withheld.
            envs["NVIDIA_DRIVER_CAPABILITIES"] = "compute,utility"
            mounts += self._files.mounts(record)
        if mps := next((one for one in pieces if one.mode == MPS), None):
            envs.update(handover.mps_environment(mps.resource))
            mounts += handover.mps_mounts(Path(self.settings.flags["mpsRoot"]), mps.resource, self._paths.seen_root)
        envs.update(handover.features(self.settings.config))
        gpus = list({piece.uuid: self._pool.gpu(piece.uuid) for piece in pieces}.values())
        devices = {piece.device: piece for piece in pieces}
        by_index = self.hand_over.id_strategy == "index"
        names = [Pool.runtime_name(one, self._pool.gpu(one.uuid), by_index) for one in devices.values()]
        if self.hand_over.by_cdi:
            self._refuse_unnamed(gpus, devices)
        parts = self.hand_over.parts(gpus, record.id, names, list(devices))
        return Answer(
            record.id,
            record.slice_ids,
            {**envs, **parts.envs},
            mounts + parts.mounts,
            parts.devices,
            parts.cdi_devices,
            parts.annotations,
        )

    def _refuse_unnamed(self, gpus: list[Gpu], devices: Iterable[str]) -> None:
        """A MIG device that no CDI file can name: its container would not start, and say less about why."""
        for gpu in gpus:
            for mig in gpu.mig:
                try:
                    if mig.uuid in devices:
                        cdi.mig_nodes(gpu, mig, self._paths.host_root / "proc", self.settings.dev_root)
                except OSError as fault:
                    raise Refused(f"{mig.uuid} cannot be handed over by CDI: {fault}") from None

    def prestart(self, ids: list[str]) -> None:
        """Makes the files anew before a start: /run is empty after a reboot, and a restarted container starts at zero.

        Several records may hold the same slices (an init container and a container of one pod); which of them starts is
        not told, and only one of them runs at a time.
        """
        with self.lock:
            self._refuse_sick(ids)
            # A container that runs keeps what it was given, also where the node offers other slices by now.
            records = self.records.with_ids(ids)
            if not records:
                if all(piece.mode != VCUDA for piece in self._pool.resolve(ids)):
                    return
                records = self._rebuild(ids)
            if not records:
                raise Refused(
                    f"slices {', '.join(ids)}: neither {self._paths.records} nor the kubelet's checkpoint knows an "
                    "allocation of them; delete the pod so that it is admitted anew"
                )
        for record in records:
            if record.limits.get("deny"):
                self._size(record)  # asks the API server, so without the lock
        with self.lock:
            self._refuse_sick(ids)
            records = self.records.with_ids(ids)
            if not records:
                raise NotNow(f"slices {', '.join(ids)}: their allocation ended while its size was asked for")
            for record in records:
                if not record.limits:
                    continue
                if not (Path(record.library) / LIBRARY_FILE).is_file():
                    raise Refused(
                        f"allocation {record.id}: {record.library}/{LIBRARY_FILE} is gone, and the container mounts "
                        "that version; delete the pod so that it is admitted anew"
                    )
                self._make_files(record)

    def _refuse_sick(self, ids: list[str]) -> None:
        for piece in (self._pool.piece(one) for one in ids):
            if piece is not None:
                self._pool.refuse_sick(piece)

    def planned(self, available: Sequence[str], size: int) -> list[str]:
        """Free slices of the GPUs that the scheduler planned for the container that comes now; advice, maybe none."""
        if not self.settings.requested or self.sizes is None:
            return []
        chosen: list[str] = []
        for uuid in self.sizes.expected(size):
            free = (one for one in available if gpu_of(one) == uuid and one not in chosen)
            chosen += [one for one in [next(free, "")] if one]
        return chosen

    def _size(self, record: Record) -> None:
        """Writes down the size that the pod of a record asked for. Raises Refused where it was not planned, or does not
        fit on the GPUs that the kubelet chose.
        """
        if self.sizes is None:
            raise NotNow(f"allocation {record.id} waits for its size, and this program knows no API server")
        owner = self.sizes.owner(record)
        plan = self.sizes.plan(owner)
        planned = next(part.devices for part in plan if part.container == owner.container)
        try:
            devices = self._reserve(record, planned, self.sizes.priority(owner, self.settings.config))
        except Refused as fault:
            self.sizes.tell(owner, "VgpuNoRoom", str(fault))
            raise Refused(f"pod {owner.name}: {fault}") from None
        try:
            if {one.uuid for one in devices} != {one.uuid for one in planned}:
                log.info("pod %s: given %s instead of what was planned", owner.name, [one.uuid for one in devices])
                self.sizes.write_given(owner, sizing.with_part(plan, owner.container, devices))
            with self.lock:
                if self.records.get(record.id) is None:
                    raise NotNow(f"allocation {record.id} ended while its size was told to the API server")
                self._write_down(self._sizing[record.id])
            log.info("allocation %s: sizes of pod %s", record.id, owner.name)
        finally:
            with self.lock:
                del self._sizing[record.id]

    def _reserve(self, record: Record, planned: Sequence[Device], priority: int) -> list[Device]:
        """Decides a size and keeps its room while the API server is told. Raises Refused where it does not fit."""
        with self.lock:
            if record.id in self._sizing:
                raise NotNow(f"allocation {record.id}: another call finds out its size now; it is tried again")
            given = [self._pool.gpu(one["uuid"]) for one in record.limits["devices"]]
            devices = sizing.assign(planned, given, self.settings.config, self._held(record.kubelet_ids))
            limits = {key: value for key, value in record.limits.items() if key != "deny"}
            limits.update(devices=sizing.limits_of(devices), priority=priority)
            cores = {one.uuid: one.cores for one in devices if one.cores}
            self._sizing[record.id] = replace(record, limits=limits, cores=cores)
            return devices

    def _rebuild(self, ids: list[str]) -> list[Record]:
        """Records that were lost, from the answers of Allocate that the kubelet keeps."""
        found = checkpoint.read(self._paths.checkpoint)
        rebuilt = []
        for entry in found.entries if found else ():
            if entry.allocation and entry.slice_ids == frozenset(ids):
                offers = self._pool.offers()[1]
                given = on_gpus(entry.uuids, ids, offers, self.records.all())
                limits = self._limits(entry.allocation, self._devices(self._pool.resolve(given)))
                library = entry.library or str(self.library())
                asked = () if given == ids else tuple(ids)
                if self.settings.requested:
                    limits["deny"] = True
                record = Record(entry.allocation, KUBELET, tuple(given), limits, library, asked=asked)
                self._write_down(record)
                rebuilt.append(record)
        return rebuilt

    def forget(self, allocation: str) -> None:
        """Ends an allocation: its files and its record."""
        with self.lock:
            self._remove_files(allocation)
            record = self.records.get(allocation)
            self.records.drop(allocation)
            if record is not None and self.outside is not None:
                self.outside.deny(record.slice_ids, False)

    def _remove_files(self, allocation: str) -> None:
        try:
            self._files.remove(allocation)
        except OSError as fault:
            log.warning("allocation %s: its files remain: %s", allocation, fault)
