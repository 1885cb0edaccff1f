# SPDX-License-Identifier: Apache-2.0
"""Slices for containers that Kubernetes does not start: one folder of files for each slice, and the CDI files that
name them, so that ``podman run --device vgpu.fleet/slice=<uuid>::<n>`` gets a limited GPU.

All containers with one slice share its ledger, so that together they never hold more than the slice. A slice is used
on one side only: while a container outside Kubernetes holds it, the kubelet is told that it is unhealthy; while the
kubelet has given it out, its limits here say deny.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from . import cdi, driver_files
from ._shared import layouts
from ._shared.sharing import Piece
from ._shared.slices import MIB
from .allocation_files import AllocationFiles
from .allocator import Allocator
from .errors import PluginError
from .gpus import Gpu
from .paths import Paths
from .pool import Pool
from .records import Record
from .settings import Settings

# Each slice has a mount of its own; more than this many would slow every mount on the host.
MOST_SLICES = 256
OUTSIDE = "used by a container outside Kubernetes"

log = logging.getLogger(__name__)


class StaticSlices:
    def __init__(
        self,
        paths: Paths,
        settings: Settings,
        pool: Pool,
        allocator: Allocator,
        files: AllocationFiles,
        driver: driver_files.DriverFiles,
    ) -> None:
        self._paths = paths
        self._settings = settings
        self._pool = pool
        self._allocator = allocator
        self._files = files
        self._driver = driver
        self._told = ""

    def configure(self, settings: Settings, driver: driver_files.DriverFiles) -> None:
        with self._allocator.lock:
            self._settings, self._driver = settings, driver
        self.refresh()

    def refresh(self) -> None:
        """Brings folders and CDI files in line with pool, library and driver. Faults are told, and end nothing."""
        with self._allocator.lock:
            try:
                self._refresh()
                fault = ""
            except (OSError, PluginError, layouts.LayoutError) as error:
                fault = f"slices cannot be offered by CDI: {error}"
        if fault and fault != self._told:
            log.warning("%s", fault)
        self._told = fault

    def _refresh(self) -> None:
        folder = self._paths.cdi_dir
        if folder is None:
            return
        if not any(name == "libcuda.so.1" for name, _host in self._driver.libraries):
            cdi.remove(folder)
            self._told = ""
            return
        common = cdi.common_edits(self._driver, self._settings.dev_root)
        gpus = self._pool.gpus
        dev_root = self._settings.dev_root
        migs = cdi.mig_devices(gpus, self._paths.host_root / "proc", dev_root)
        named = cdi.gpu_devices(gpus, dev_root, False) + migs
        cdi.write(folder, cdi.specification(cdi.GPU_KIND, common, named))
        others = (folder, *self._paths.cdi_dirs_of_others)
        if cdi.provided_elsewhere(cdi.NVIDIA_KIND, others):
            (folder / cdi.file_name(cdi.NVIDIA_KIND)).unlink(missing_ok=True)
        else:
            named = cdi.gpu_devices(gpus, dev_root, True) + migs
            cdi.write(folder, cdi.specification(cdi.NVIDIA_KIND, common, named))
        offered = self._offered()
        wanted = {self._files.static_name(piece.id) for piece in offered}
        for name in self._files.static():
            if name not in wanted and not self._in_use(name):
                self._files.remove(name)
        if not offered:
            (folder / cdi.file_name(cdi.SLICE_KIND)).unlink(missing_ok=True)
            return
        library = str(self._allocator.library())
        held = self._held()
        devices = [(piece.id, self._make(piece, library, piece.id in held)) for piece in offered]
        cdi.write(folder, cdi.specification(cdi.SLICE_KIND, common, devices))

    def _offered(self) -> list[Piece]:
        pieces = [one for one in self._pool.slices if self._pool.limited(one.id)]
        if len(pieces) > MOST_SLICES:
            log.debug("%d slices are more than %d; none is offered by CDI", len(pieces), MOST_SLICES)
            return []
        return pieces

    def _make(self, piece: Piece, library: str, denied: bool) -> dict[str, Any]:
        """The folder of one slice, where it is not whole yet; its edits."""
        gpu = self._pool.gpu(piece.uuid)
        record = Record(self._files.static_name(piece.id), "slice", (piece.id,), self._limits(piece, gpu), library)
        wanted = {**record.limits, "deny": denied}
        # A container that runs keeps its ledger, also where it spoilt it: by a new one nobody would know that it runs.
        if self._files.is_whole(record) or self._in_use(record.id):
            path = self._files.folder(record.id) / "limits"
            if not layouts.says(path.read_bytes(), wanted):
                layouts.rewrite_limits(str(path), wanted)
        else:
            self._files.make(Record(record.id, record.kind, record.slice_ids, wanted, library))
        mounts = [cdi.mount(inside, host, ro) for inside, host, ro in self._files.mounts(record)]
        return {"deviceNodes": cdi.gpu_nodes(gpu, self._settings.dev_root), "mounts": mounts}

    def _limits(self, piece: Piece, gpu: Gpu) -> dict[str, Any]:
        device = {"uuid": piece.uuid, "memory_bytes": piece.memory_mib * MIB, "sm_percent": piece.sm_percent}
        return {
            "allocation": self._files.static_name(piece.id),
            "devices": [device],
            **self._settings.limit_flags([gpu]),
        }

    def _held(self) -> set[str]:
        return {one for record in self._allocator.records.all() for one in record.slice_ids}

    def _in_use(self, name: str) -> bool:
        """Whether a process holds a slot of the slice's ledger: the kernel's answer, not the tenant's."""
        try:
            descriptor = os.open(self._files.folder(name) / "rw" / "ledger", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            return layouts.any_slot_is_alive(descriptor)
        finally:
            os.close(descriptor)

    def in_use(self) -> frozenset[str]:
        """The slices that containers outside Kubernetes hold now."""
        return frozenset(one.id for one in self._offered() if self._in_use(self._files.static_name(one.id)))

    def look(self) -> None:
        """Which slices are used outside Kubernetes now; the kubelet is told of the others alone."""
        with self._allocator.lock:
            for piece in self._offered():
                self.look_at(piece.id)

    def look_at(self, slice_id: str) -> bool:
        busy = self._in_use(self._files.static_name(slice_id))
        self._pool.set_outside(slice_id, OUTSIDE if busy else "")
        return busy

    def deny(self, slice_ids: tuple[str, ...] | list[str], denied: bool) -> None:
        """The kubelet or a lease has taken slices, or gives them back. The caller holds the allocator's lock."""
        if self._paths.cdi_dir is None:
            return
        held = self._held()
        for slice_id in slice_ids:
            path = self._files.folder(self._files.static_name(slice_id)) / "limits"
            try:
                found = layouts.parse_limits(path.read_bytes())
                wanted = denied or slice_id in held
                if found["deny"] != wanted:
                    layouts.rewrite_limits(str(path), layouts.as_packed(found, deny=wanted))
            except FileNotFoundError:
                continue  # this slice is not offered by CDI
            except (OSError, layouts.LayoutError) as fault:
                log.warning("%s cannot be changed: %s", path, fault)

    def remove(self, folder: Path) -> None:
        cdi.remove(folder)
        for name in self._files.static():
            self._files.remove(name)
