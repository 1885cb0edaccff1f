# SPDX-License-Identifier: Apache-2.0
"""Allocate and PreStartContainer: from slice ids to the files, mounts and environment of a container.

Who is refused says admission.py; which size a pod gets, sizer.py; what its container sees, answer.py.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from .._shared.config.sharing import VCUDA, Piece
from ..errors import NotNow, Refused
from ..inject.driver_files import DriverFiles
from ..node import checkpoint
from ..node.gpus import Gpu
from ..node.paths import Paths
from ..offer.pool import Pool
from ..offer.settings import Settings
from . import admission, enforcement
from .allocation_files import LIBRARY_FILE, AllocationFiles
from .answer import Answer, Answers
from .library import CurrentLibrary
from .limit_devices import AtMost, limit_devices
from .records import KUBELET, Record, RecordStore
from .sizer import Sizer
from .substitution import on_gpus, substitute

log = logging.getLogger(__name__)


class OutsideUse(Protocol):
    """The containers that Kubernetes did not start."""

    def poll_slice(self, slice_id: str) -> bool:
        """Whether such a container holds a slice now."""

    def deny(self, slice_ids: tuple[str, ...], denied: bool) -> None:
        """Denies them slices that are allocated, or allows them again."""


class NoOutsideUse:
    """A node without slices for containers outside Kubernetes."""

    def poll_slice(self, slice_id: str) -> bool:
        return False

    def deny(self, slice_ids: tuple[str, ...], denied: bool) -> None:
        pass


class Allocator:
    """Thread-safe: one lock over records and files, so that a slice is never allocated and collected at once."""

    def __init__(
        self,
        paths: Paths,
        settings: Settings,
        pool: Pool,
        records: RecordStore,
        files: AllocationFiles,
        sizer: Sizer,
    ) -> None:
        self._paths = paths
        self.settings = settings
        self.pool = pool
        self.records = records
        self.lock = records.lock
        self._files = files
        self.sizer = sizer
        self._answers = Answers(paths, pool, files)
        self.hand_over = settings.hand_over(paths.host_root, can_cdi=False)
        # Keeps a slice from being used on two sides (static_slices.py).
        self.outside: OutsideUse = NoOutsideUse()
        # Whether the kubelet has called GetPreferredAllocation, which those before 1.19 do not know.
        self.kubelet_asks = False
        # Who enforces memory, and what a container gets for it.
        self.enforcement = enforcement.none(paths)
        # Ends what the driver enforces for an allocation.
        self.clear_limits: Callable[[str], None] = lambda _allocation: None
        self._library = CurrentLibrary()
        # UUID → flags in the limits of its slices, and of which settings and GPU they are.
        self._flags: dict[str, tuple[Settings, Gpu, dict[str, Any]]] = {}

    def configure(self, settings: Settings, driver: DriverFiles) -> None:
        """From now on allocations are made by these settings; those that exist stay as they are."""
        with self.lock:
            can_cdi = self._paths.cdi_dir is not None and driver.complete
            before, self.settings, self.sizer.settings = self.hand_over, settings, settings
            self.hand_over = settings.hand_over(self._paths.host_root, can_cdi)
            self.enforcement.configure(settings, driver, self.pool.gpus, self.hand_over)
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

    def grant(self, ids: list[str], kind: str, at_most: AtMost | None = None, **lease: Any) -> Answer:
        """Makes one allocation with its files. ``at_most``: less than its slices have. ``lease``: when a lease ends and
        whose it is, as Record has it.
        """
        with self.lock:
            pieces = self.pool.resolve(ids)
            given = ids
            if kind == KUBELET:
                given, pieces = self._given(ids, pieces)
            self.enforcement.refuse_unproved()
            if kind == KUBELET and not self.hand_over.by_cdi:
                self.enforcement.refuse_without_hook("a pod of this node")
            self._admit(pieces, kind)
            record = replace(self._record(kind, ids, given, pieces, at_most), **lease)
            self._persist(record)
            self._keep_limits(record, pieces)
            self._close_outside(record, pieces)
            log.info("allocation %s (%s): %s", record.id, kind, ", ".join(given))
            try:
                return self._answers.of(record, pieces, self.settings, self.hand_over)
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
        _generation, offers = self.pool.offers(pieces[0].resource)
        given = substitute(ids, offers, self.records.all(), spread, self.settings.packed)
        return given, pieces if given == ids else self.pool.resolve(given)

    def _admit(self, pieces: list[Piece], kind: str) -> None:
        if kind == KUBELET:
            admission.refuse_leased(pieces, self.records.lease_of)
        else:
            admission.refuse_held(pieces, self.records.all())
        admission.refuse_outside(pieces, self.outside.poll_slice)
        admission.refuse_several(pieces, self.settings.config)

    def _record(
        self, kind: str, ids: list[str], given: list[str], pieces: list[Piece], at_most: AtMost | None
    ) -> Record:
        """A record that is not written down yet. ``ids``: those of the request, ``given``: the slices for them."""
        devices = limit_devices(pieces, self.settings, len(self.pool.gpus))
        if at_most is not None:
            devices = [at_most.of(device) for device in devices]
        asked = () if given == ids else tuple(ids)
        record = Record(os.urandom(8).hex(), kind, tuple(given), asked=asked)
        if all(piece.mode != VCUDA for piece in pieces):
            return record
        limits = self._limits(record.id, devices)
        if self.settings.requested and kind == KUBELET:
            limits["deny"] = True  # its size is written when it starts, and not before
        elif self.settings.requested or admission.has_sized_neighbours(devices, self.records.all()):
            admission.refuse_oversold(devices, self.pool.gpu, self.settings.config, self.sizer.held(ids))
        return replace(record, limits=limits, library=str(self.library()))

    def keep(self, record: Record, pieces: list[Piece]) -> None:
        """Makes the files of a record that the caller has admitted, and writes it down. The caller holds the lock."""
        self._persist(record)
        self._close_outside(record, pieces)

    def _persist(self, record: Record) -> None:
        """Makes the files and writes the record down, or neither."""
        if record.limits:
            self._make_files(record, new=True)
        try:
            self.records.put(record)
        except BaseException:
            self._remove_files(record.id)
            raise

    def _close_outside(self, record: Record, pieces: list[Piece]) -> None:
        """Denies the slices to containers outside Kubernetes. Asked again after that: one may have begun while the
        files were made, before it was denied.
        """
        self.outside.deny(record.slice_ids, True)
        try:
            admission.refuse_outside(pieces, self.outside.poll_slice)
        except NotNow:
            self.forget(record.id)
            raise

    def asked_for_preference(self) -> None:
        """The kubelet of now asks, so its choice holds."""
        if self.settings.legacy_preferred and not self.kubelet_asks:
            log.warning("legacyPreferred has no effect: this kubelet asks for a preference itself")
        self.kubelet_asks = True

    def _limits(self, allocation: str, devices: list[dict[str, Any]]) -> dict[str, Any]:
        gpus = [self.pool.gpu(device["uuid"]) for device in devices]
        devices = self.enforcement.with_cards(devices)
        return {"allocation": allocation, "devices": devices, **self._flags_of(gpus)}

    def _keep_limits(self, record: Record, pieces: list[Piece]) -> None:
        """What the driver alone enforces, where no library limits the container."""
        if record.limits or not self.enforcement.by_driver:
            return
        offered = [piece.uuid for piece in self.pool.slices]
        replicas = {piece.uuid: offered.count(piece.uuid) for piece in pieces}
        limits = self.enforcement.limits_of(record.id, pieces, replicas)
        try:
            if limits:
                self._files.keep_record(record)
                self._files.keep_limits(record.id, limits)
        except OSError as fault:
            self.forget(record.id)
            raise NotNow(f"allocation {record.id}: its limits cannot be kept in {self._files.root}: {fault}") from fault

    def _flags_of(self, gpus: list[Gpu]) -> dict[str, Any]:
        """The same for every slice of a GPU until settings or GPU change, and costly to work out."""
        if len(gpus) > 1:
            return self.settings.limit_flags(gpus)
        (gpu,) = gpus
        known = self._flags.get(gpu.uuid)
        if known is None or known[0] is not self.settings or known[1] is not gpu:
            known = self._flags[gpu.uuid] = self.settings, gpu, self.settings.limit_flags(gpus)
        return known[2]

    def library(self) -> Path:
        """The version folder that ``current`` names now. Raises Refused where there is no library."""
        return self._library.folder(self.settings.library_root)

    def _make_files(self, record: Record, new: bool = False) -> None:
        try:
            self._files.make(record, new)
        except OSError as fault:
            self._remove_files(record.id)
            raise NotNow(f"allocation {record.id}: its files cannot be made in {self._files.root}: {fault}") from fault

    def prestart(self, ids: list[str]) -> None:
        """Makes the files again before a start: /run is empty after a reboot, and a restarted container starts at zero.

        Several records may hold the same slices (an init container and a container of one pod); which of them starts is
        not known, and only one of them runs at a time.
        """
        with self.lock:
            self.pool.refuse_unhealthy(ids)
            # A container that runs keeps what it was given, also where the node offers other slices by now.
            records = self.records.with_ids(ids)
            if not records:
                if all(piece.mode != VCUDA for piece in self.pool.resolve(ids)):
                    return
                records = self._rebuild(ids)
            if not records:
                raise Refused(
                    f"slices {', '.join(ids)}: neither {self._paths.records} nor the kubelet's checkpoint knows an "
                    "allocation of them; delete the pod so that it is admitted again"
                )
        for record in records:  # asks the API server, so without the lock
            if record.limits.get("deny"):
                self.sizer.size(record)
            elif record.limits:
                self.sizer.mounts.check(record)
        with self.lock:
            self.pool.refuse_unhealthy(ids)
            records = self.records.with_ids(ids)
            if not records:
                raise NotNow(f"slices {', '.join(ids)}: their allocation ended while its size was asked for")
            for record in records:
                if record.limits:
                    self.make_again(record)

    def make_again(self, record: Record) -> None:
        """The files of an allocation before its container starts. Raises Refused, NotNow."""
        if not (Path(record.library) / LIBRARY_FILE).is_file():
            raise Refused(
                f"allocation {record.id}: {record.library}/{LIBRARY_FILE} is gone, and the container mounts "
                "that version; delete the pod so that it is admitted again"
            )
        self._make_files(record)

    def _rebuild(self, ids: list[str]) -> list[Record]:
        """Records that were lost, from the answers of Allocate that the kubelet keeps."""
        found = checkpoint.read(self._paths.checkpoint)
        rebuilt = []
        for entry in found.entries if found else ():
            if entry.allocation and entry.slice_ids == frozenset(ids):
                offers = self.pool.offers()[1]
                given = on_gpus(entry.uuids, ids, offers, self.records.all())
                devices = limit_devices(self.pool.resolve(given), self.settings, len(self.pool.gpus))
                limits = self._limits(entry.allocation, devices)
                library = entry.library or str(self.library())
                asked = () if given == ids else tuple(ids)
                if self.settings.requested:
                    limits["deny"] = True
                record = Record(entry.allocation, KUBELET, tuple(given), limits, library, asked=asked)
                self.records.put(record)
                rebuilt.append(record)
        return rebuilt

    def forget(self, allocation: str) -> None:
        """Ends an allocation: its files and its record."""
        with self.lock:
            self.clear_limits(allocation)
            self._remove_files(allocation)
            record = self.records.get(allocation)
            self.records.drop(allocation)
            self.sizer.mounts.forget(allocation)
            if record is not None:
                self.outside.deny(record.slice_ids, False)

    def _remove_files(self, allocation: str) -> None:
        try:
            self._files.remove(allocation)
        except OSError as fault:
            log.warning("allocation %s: its files remain: %s", allocation, fault)
