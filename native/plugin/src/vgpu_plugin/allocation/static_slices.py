# SPDX-License-Identifier: Apache-2.0
"""Slices (parts of GPUs) for containers outside Kubernetes. Each slice has one folder of files. The CDI
(Container Device Interface) files name the slices, so that ``podman run --device vgpu.fleet/slice=<uuid>::<n>`` gives a
container a limited GPU.

All containers with the same slice share its ledger (the account of used memory), so together they never hold more than
the slice.

A slice is used either by Kubernetes or by containers outside it. While a container outside Kubernetes uses it, the
plugin reports it to the kubelet as unhealthy. While the kubelet has allocated it, the limits file in the slice's folder
denies every memory allocation.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .._shared.abi import files as abi_files
from .._shared.config.sharing import Piece
from .._shared.config.slices import MIB
from ..errors import PluginError
from ..inject import cdi, driver_files
from ..node.gpus import Gpu
from ..node.paths import Paths
from ..offer.pool import Pool
from ..offer.settings import Settings
from .allocation_files import AllocationFiles
from .allocator import Allocator
from .records import Record

# Maximum number of slices. Each slice has a mount of its own, and more mounts would slow down every mount on the host.
MOST_SLICES = 256
OUTSIDE = "used by a container outside Kubernetes"
# Every sixth call of ``refresh_if_changed`` refreshes all files, even if no change is visible.
WHOLE_EVERY = 6
# After one of these errors a slice is not offered. The other slices still are.
FAULTS = (OSError, PluginError, abi_files.LayoutError)
# Maximum number of slices whose errors get a line of their own in the status.
MOST_NOTES = 8

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
        # Returns the folders whose files were deleted and created again while containers used them. These containers
        # still use the deleted files, so the current files do not show their usage.
        self.stale: Callable[[], frozenset[str]] = frozenset
        # The reasons why slices cannot be offered now. They are kept so that each is logged only once.
        self._faults: list[str] = []
        # The result of ``_signs_now`` at the last refresh, and the number of calls of ``refresh_if_changed`` since
        # then.
        self._signs: tuple[object, ...] = ()
        self._calls = 0
        # Cache, so that a refresh need not parse unchanged limits files: name of a slice's folder → the bytes of its
        # limits file, and the limits from which they were made. If a file has other limits than desired, it has no
        # entry.
        self._written: dict[str, tuple[bytes, dict[str, Any]]] = {}

    def configure(self, settings: Settings, driver: driver_files.DriverFiles) -> None:
        with self._allocator.lock:
            self._settings, self._driver = settings, driver
        self.refresh()

    def refresh_if_changed(self) -> None:
        """Calls ``refresh`` if something relevant has changed, and at every sixth call anyway. ``refresh`` reads every
        file of every slice, and on most nodes nothing changes between two calls.
        """
        with self._allocator.lock:
            self._calls += 1
            if self._calls >= WHOLE_EVERY or self._signs != self._signs_now():
                self.refresh()

    def _signs_now(self) -> tuple[object, ...]:
        """Returns values that show whether a refresh is needed: the split of the GPUs, the held slices, the library,
        and the identities of files and folders. They are cheap to read.
        """
        return (*self._causes_now(), *self._files_now())

    def _causes_now(self) -> tuple[object, ...]:
        """Returns the values of ``_signs_now`` that a refresh only reads and does not change."""
        if self._paths.cdi_dir is None:
            return ()
        try:
            library = str(self._allocator.library())
        except PluginError as fault:
            library = str(fault)
        others = (_identity(str(one)) for one in self._paths.cdi_dirs_of_others)
        return (_Same(self._pool.shape()), frozenset(self._held()), self.stale(), library, *others)

    def _files_now(self) -> tuple[object, ...]:
        """Returns the identities of the files that ``refresh`` writes."""
        if self._paths.cdi_dir is None:
            return ()
        kinds = (cdi.GPU_KIND, cdi.NVIDIA_KIND, cdi.SLICE_KIND)
        seen = [str(self._paths.cdi_dir), *(f"{self._paths.cdi_dir}/{cdi.file_name(kind)}" for kind in kinds)]
        for piece in self._offered():
            folder = f"{self._paths.allocations}/{self._files.static_name(piece.id)}"
            # A container that uses the slice writes its ledger. A refresh then checks whether the tenant has damaged
            # the ledger.
            seen += [folder, f"{folder}/limits", f"{folder}/rw/ledger"]
        return tuple(map(_identity, seen))

    def refresh(self) -> None:
        """Updates the slices' folders and the CDI files after a change of the node's slices, the library or the driver.
        Errors are logged and listed in ``notes``; none is raised.
        """
        with self._allocator.lock:
            # These values are read before the refresh. So a change during the refresh, such as another library version,
            # is noticed at the next call.
            causes, before = self._causes_now(), self._faults
            try:
                self._faults = self._refresh()
            except FAULTS as error:
                self._faults = [f"no slice can be offered by CDI: {error}"]
            self._calls, self._signs = 0, (*causes, *self._files_now())
        for fault in self._faults:
            if fault not in before:
                log.warning("%s", fault)

    def notes(self) -> list[str]:
        """Returns messages about the slices that cannot be offered now."""
        faults = self._faults
        more = [f"{len(faults) - MOST_NOTES} more slices cannot be offered by CDI"] if len(faults) > MOST_NOTES else []
        return faults[:MOST_NOTES] + more

    def _refresh(self) -> list[str]:
        """Refreshes folders and CDI files. Returns an error message for each slice that cannot be offered."""
        folder = self._paths.cdi_dir
        if folder is None:
            return []
        if not self._driver.complete:
            cdi.remove(folder)
            return []
        common = cdi.common_edits(self._driver, self._settings.dev_root)
        gpus = self._pool.gpus
        dev_root = self._settings.dev_root
        migs = cdi.mig_devices(gpus, self._paths.host_root / "proc", dev_root)
        hooks = self._allocator.enforcement.hooks()
        named = cdi.with_hooks(cdi.gpu_devices(gpus, dev_root, False), hooks) + migs
        cdi.write(folder, cdi.specification(cdi.GPU_KIND, common, named))
        others = (folder, *self._paths.cdi_dirs_of_others)
        if cdi.provided_elsewhere(cdi.NVIDIA_KIND, others):
            (folder / cdi.file_name(cdi.NVIDIA_KIND)).unlink(missing_ok=True)
        else:
            named = cdi.gpu_devices(gpus, dev_root, True) + migs
            cdi.write(folder, cdi.specification(cdi.NVIDIA_KIND, common, named))
        offered = self._offered()
        desired = {self._files.static_name(piece.id) for piece in offered}
        for name in self._files.static():
            if name not in desired and not self._in_use(name):
                self._files.remove(name)
        if not offered:
            (folder / cdi.file_name(cdi.SLICE_KIND)).unlink(missing_ok=True)
            return []
        library = str(self._allocator.library())
        held = self._held()
        by_uuid = {gpu.uuid: gpu for gpu in gpus}
        flags = {uuid: self._settings.limit_flags([gpu]) for uuid, gpu in by_uuid.items()}
        self._written = {name: one for name, one in self._written.items() if name in desired}
        devices, faults = [], []
        for piece in offered:
            try:
                self._allocator.enforcement.refuse_unproved()
                edits = self._make(piece, by_uuid[piece.uuid], flags[piece.uuid], library, piece.id in held)
            except FAULTS as error:
                where = self._paths.allocations
                faults.append(f"slice {piece.id} cannot be offered by CDI with its files in {where}: {error}")
            else:
                devices.append((piece.id, edits))
        if devices:
            cdi.write(folder, cdi.specification(cdi.SLICE_KIND, common, cdi.with_hooks(devices, hooks)))
        else:
            (folder / cdi.file_name(cdi.SLICE_KIND)).unlink(missing_ok=True)
        return faults

    def _offered(self) -> list[Piece]:
        pieces = [one for one in self._pool.slices if self._pool.limited(one.id)]
        if self._settings.claims:
            # On a node with claims (Dynamic Resource Allocation), the scheduler allocates whole GPUs to claims. So here
            # only slices that containers already use are still offered.
            pieces = [one for one in pieces if self._in_use(self._files.static_name(one.id))]
        if len(pieces) > MOST_SLICES:
            log.debug("%d slices exceed the maximum of %d; none is offered by CDI", len(pieces), MOST_SLICES)
            return []
        return pieces

    def _make(self, piece: Piece, gpu: Gpu, flags: dict[str, Any], library: str, denied: bool) -> dict[str, Any]:
        """Creates the folder of one slice if files are missing, and returns the slice's CDI edits. ``flags`` are the
        flags of the GPU's limits file.
        """
        record = Record(self._files.static_name(piece.id), "slice", (piece.id,), self._limits(piece, flags), library)
        desired = {**record.limits, "deny": denied}
        # A folder of an older version lacks some files. They are added first, and the other files stay, because a
        # container may have them mounted. If that fails, the folder is missing or damaged, and is created again below.
        if not self._files.has_share(record):
            with contextlib.suppress(OSError):
                self._files.make_share(record)
        # A ledger is kept while a container runs, even if it is damaged, because with a new ledger the slice would look
        # unused.
        if self._files.is_whole(record) or abi_files.ledger_in_use(self._ledger(record.id)):
            path = self._files.folder(record.id) / "limits"
            found = path.read_bytes()
            if self._written.get(record.id) != (found, desired):
                if abi_files.says(found, desired):
                    self._written[record.id] = found, desired
                else:
                    abi_files.rewrite_limits(str(path), desired)
        else:
            self._files.make(Record(record.id, record.kind, record.slice_ids, desired, library))
        mounts = [cdi.mount(inside, host, ro) for inside, host, ro in self._files.expected_mounts(record)]
        return {"deviceNodes": cdi.gpu_nodes(gpu, self._settings.dev_root), "mounts": mounts}

    def _limits(self, piece: Piece, flags: dict[str, Any]) -> dict[str, Any]:
        device = {"uuid": piece.uuid, "memory_bytes": piece.memory_mib * MIB, "sm_percent": piece.sm_percent}
        return {
            "allocation": self._files.static_name(piece.id),
            "devices": self._allocator.enforcement.with_cards([device]),
            **flags,
        }

    def _held(self) -> set[str]:
        """Returns the slices that containers outside Kubernetes must not start to use now, because the kubelet or a
        lease (a reservation for a program on this host) holds them.
        """
        stale = self.stale()
        removed = {one.id for one in self._offered() if self._files.static_name(one.id) in stale} if stale else set()
        return removed.union(one for record in self._allocator.records.all() for one in record.slice_ids)

    def _in_use(self, name: str) -> bool:
        """Returns whether a container outside Kubernetes uses the slice."""
        return name in self.stale() or abi_files.ledger_in_use(self._ledger(name))

    def _ledger(self, name: str) -> str:
        return f"{self._paths.allocations}/{name}/rw/ledger"

    def in_use(self) -> frozenset[str]:
        """Returns the slices that containers outside Kubernetes use now."""
        return frozenset(one.id for one in self._offered() if self._in_use(self._files.static_name(one.id)))

    def poll(self) -> None:
        """Notes in the pool (the list of this node's slices) which slices are in use outside Kubernetes, so that only
        the others are offered to the kubelet.
        """
        with self._allocator.lock:
            for piece in self._offered():
                self.poll_slice(piece.id)

    def poll_slice(self, slice_id: str) -> bool:
        busy = self._in_use(self._files.static_name(slice_id))
        self._pool.set_outside(slice_id, OUTSIDE if busy else "")
        return busy

    def deny(self, slice_ids: tuple[str, ...] | list[str], denied: bool) -> None:
        """If ``denied`` is true, forbids containers outside Kubernetes to use these slices, because the kubelet or a
        lease has allocated them. Otherwise permits the use again, because the slices were freed. The caller holds the
        allocator's lock.
        """
        if self._paths.cdi_dir is None:
            return
        held = self._held()
        for slice_id in slice_ids:
            path = self._files.folder(self._files.static_name(slice_id)) / "limits"
            try:
                found = abi_files.parse_limits(path.read_bytes())
                desired = denied or slice_id in held
                if found["deny"] != desired:
                    abi_files.rewrite_limits(str(path), abi_files.as_packed(found, deny=desired))
            except FileNotFoundError:
                continue  # The slice has no files, because it is not offered by CDI.
            except (OSError, abi_files.LayoutError) as fault:
                log.warning("%s cannot be changed: %s", path, fault)

    def remove(self, folder: Path) -> None:
        cdi.remove(folder)
        for name in self._files.static():
            self._files.remove(name)


class _Same:
    """Compares two objects by identity. It keeps its object alive, so that the address is not reused.

    The comparison detects a change of slices or GPUs: the pool then creates a new object for its slices, even if the
    new object is equal to the former.
    """

    def __init__(self, thing: object) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.thing is other.thing

    __hash__ = object.__hash__


def _identity(path: str) -> tuple[int, int, int]:
    """Returns inode, modification time and size of a file. Together they show whether the file was changed or replaced.
    If the file does not exist, returns zeros.
    """
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0, 0
    return found.st_ino, found.st_mtime_ns, found.st_size
