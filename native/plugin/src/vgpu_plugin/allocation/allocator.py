# SPDX-License-Identifier: Apache-2.0
"""Answers the kubelet's calls Allocate and PreStartContainer. It turns the ids of slices (parts of GPUs) into the
files, mounts and environment of a container. Such an allocation is saved as a record (records.py).

admission.py decides which requests are refused, sizer.py which size a pod gets, and answer.py what the container sees.
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
    """Interface to the slices that containers outside Kubernetes use, for example containers of podman
    (static_slices.py)."""

    def poll_slice(self, slice_id: str) -> bool:
        """Returns whether a container outside Kubernetes uses the slice now."""

    def deny(self, slice_ids: tuple[str, ...], denied: bool) -> None:
        """If ``denied`` is true, forbids containers outside Kubernetes to use these slices, because they were
        allocated. Otherwise permits the use again.
        """


class NoOutsideUse:
    """Takes the place of OutsideUse on a node that offers no slices to containers outside Kubernetes."""

    def poll_slice(self, slice_id: str) -> bool:
        return False

    def deny(self, slice_ids: tuple[str, ...], denied: bool) -> None:
        pass


class Allocator:
    """Creates and ends allocations. It is thread-safe: one lock covers records and files, so that a slice is never
    allocated in one thread while its allocation is ended in another.
    """

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
        # Prevents containers inside and outside Kubernetes from using the same slice at the same time
        # (static_slices.py).
        self.outside: OutsideUse = NoOutsideUse()
        # True once the kubelet has called GetPreferredAllocation. A kubelet before 1.19 does not have that call.
        self.kubelet_asks = False
        # Decides whether the library or the driver enforces memory limits, and which CDI hooks a container gets.
        self.enforcement = enforcement.none(paths)
        # Clears the driver's limits of an allocation. It does nothing on a node where the driver enforces no limits.
        self.clear_limits: Callable[[str], None] = lambda _allocation: None
        self._library = CurrentLibrary()
        # Cache of the flags for limits files: UUID → the settings and the GPU from which the flags were computed, and
        # the flags.
        self._flags: dict[str, tuple[Settings, Gpu, dict[str, Any]]] = {}

    def configure(self, settings: Settings, driver: DriverFiles) -> None:
        """Uses these settings for new allocations; existing allocations stay unchanged."""
        with self.lock:
            can_cdi = self._paths.cdi_dir is not None and driver.complete
            before, self.settings, self.sizer.settings = self.hand_over, settings, settings
            self.hand_over = settings.hand_over(self._paths.host_root, can_cdi)
            self.enforcement.configure(settings, driver, self.pool.gpus, self.hand_over)
            if self.hand_over != before:
                log.info(
                    "containers get their GPUs by %s (%s)", ", ".join(self.hand_over.strategies), self.hand_over.reason
                )

    def allocate(self, requests: Iterable[Iterable[str]]) -> list[Answer]:
        """Returns one response for each container. If one allocation fails, all allocations of this call are ended."""
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
        """Creates one allocation with its files. ``at_most`` is an upper bound for memory and SMs of each slice. If the
        slices are leased (reserved for a program on this host), ``lease`` has the lease's expiry and holder, as fields
        of Record.
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
        """Returns the slices to allocate for the ids that the kubelet chose. Normally they are the slices with these
        ids. A kubelet before 1.19 cannot spread its pods over the GPUs, so its pods may get other slices
        (substitution.py).
        """
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
        """Returns a new record, and does not save it. ``ids`` are the ids that the kubelet requested, and ``given`` the
        slices that were allocated for them.
        """
        devices = limit_devices(pieces, self.settings, len(self.pool.gpus))
        if at_most is not None:
            devices = [at_most.of(device) for device in devices]
        asked = () if given == ids else tuple(ids)
        record = Record(os.urandom(8).hex(), kind, tuple(given), asked=asked)
        if all(piece.mode != VCUDA for piece in pieces):
            return record
        limits = self._limits(record.id, devices)
        if self.settings.requested and kind == KUBELET:
            # The container's size is decided only when it starts. Until then every memory allocation is denied.
            limits["deny"] = True
        elif self.settings.requested or admission.has_sized_neighbours(devices, self.records.all()):
            admission.refuse_oversold(devices, self.pool.gpu, self.settings.config, self.sizer.held(record))
        return replace(record, limits=limits, library=str(self.library()))

    def keep(self, record: Record, pieces: list[Piece]) -> None:
        """Creates the files of an admitted record and saves the record. The caller holds the lock."""
        self._persist(record)
        self._close_outside(record, pieces)

    def _persist(self, record: Record) -> None:
        """Creates the files of a record and saves the record. If the record cannot be saved, the files are removed
        again.
        """
        if record.limits:
            self._make_files(record, new=True)
        try:
            self.records.put(record)
        except BaseException:
            self._remove_files(record.id)
            raise

    def _close_outside(self, record: Record, pieces: list[Piece]) -> None:
        """Denies the slices to containers outside Kubernetes, then checks again whether one uses them, because such a
        container may have started while the files were created.
        """
        self.outside.deny(record.slice_ids, True)
        try:
            admission.refuse_outside(pieces, self.outside.poll_slice)
        except NotNow:
            self.forget(record.id)
            raise

    def asked_for_preference(self) -> None:
        """Notes that the current kubelet asks the plugin for a preferred allocation. From then on the kubelet gets
        exactly the slices that it names.
        """
        if self.settings.legacy_preferred and not self.kubelet_asks:
            log.warning("legacyPreferred has no effect, because this kubelet calls GetPreferredAllocation")
        self.kubelet_asks = True

    def _limits(self, allocation: str, devices: list[dict[str, Any]]) -> dict[str, Any]:
        gpus = [self.pool.gpu(device["uuid"]) for device in devices]
        devices = self.enforcement.with_cards(devices)
        return {"allocation": allocation, "devices": devices, **self._flags_of(gpus)}

    def _keep_limits(self, record: Record, pieces: list[Piece]) -> None:
        """Writes the limits of a container that only the driver limits, because the library does not share its GPUs."""
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
            raise NotNow(
                f"allocation {record.id}: its limits cannot be written into {self._files.root}: {fault}"
            ) from fault

    def _flags_of(self, gpus: list[Gpu]) -> dict[str, Any]:
        """Returns the flags of the limits file. They are cached, because their computation is slow and their values are
        the same for all slices of a GPU until the settings or the GPU change.
        """
        if len(gpus) > 1:
            return self.settings.limit_flags(gpus)
        (gpu,) = gpus
        known = self._flags.get(gpu.uuid)
        if known is None or known[0] is not self.settings or known[1] is not gpu:
            known = self._flags[gpu.uuid] = self.settings, gpu, self.settings.limit_flags(gpus)
        return known[2]

    def library(self) -> Path:
        """Returns the folder of the library version to which the link ``current`` points now. Raises Refused if no
        library is installed.
        """
        return self._library.folder(self.settings.library_root)

    def _make_files(self, record: Record, new: bool = False) -> None:
        try:
            self._files.make(record, new)
        except OSError as fault:
            self._remove_files(record.id)
            raise NotNow(
                f"allocation {record.id}: its files cannot be created in {self._files.root}: {fault}"
            ) from fault

    def prestart(self, ids: list[str]) -> None:
        """Creates the files of an allocation again before its container starts. There are two reasons: after a reboot
        /run is empty, and a restarted container starts with zero usage.

        Several records may hold the same slices, for example those of an init container and of a container of one pod.
        Only one of these containers runs at a time, and the call does not tell which one starts, so the files of all
        are created.
        """
        with self.lock:
            self.pool.refuse_unhealthy(ids)
            # The records are searched, and not the slices that the node offers now, because a container keeps its
            # slices even if the node now offers others.
            records = self.records.with_ids(ids)
            if not records:
                if all(piece.mode != VCUDA for piece in self.pool.resolve(ids)):
                    return
                records = self._rebuild(ids)
            if not records:
                raise Refused(
                    f"slices {', '.join(ids)}: neither {self._paths.records} nor the kubelet's checkpoint contains "
                    "an allocation of these slices; delete the pod so that it is admitted again"
                )
        for record in records:  # The lock is not held here, because requests to the API server are slow.
            if record.limits.get("deny"):
                self.sizer.size(record)
            elif record.limits:
                self.sizer.mounts.check(record)
        with self.lock:
            self.pool.refuse_unhealthy(ids)
            records = self.records.with_ids(ids)
            if not records:
                raise NotNow(
                    f"slices {', '.join(ids)}: their allocation ended while its size was read from the API server"
                )
            for record in records:
                if record.limits:
                    self.make_again(record)

    def make_again(self, record: Record) -> None:
        """Creates the files of one allocation again before its container starts. Raises Refused, NotNow."""
        if not (Path(record.library) / LIBRARY_FILE).is_file():
            raise Refused(
                f"allocation {record.id}: {record.library}/{LIBRARY_FILE} is gone, and the container mounts "
                "that version; delete the pod so that it is admitted again"
            )
        self._make_files(record)

    def _rebuild(self, ids: list[str]) -> list[Record]:
        """Rebuilds lost records from the Allocate responses in the kubelet's checkpoint (its file of allocations)."""
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
        """Ends an allocation: removes its files and its record."""
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
