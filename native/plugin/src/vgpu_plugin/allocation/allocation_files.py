# SPDX-License-Identifier: Apache-2.0
"""The folder of an allocation: /run/vgpu/allocations/<id>/{limits, ld.so.preload, gpu-<uuid>, rw/ledger, rw/tenant}.

vgpu-arbiter finds the folders here and writes the gpu pages in place; it creates nothing.

``rw`` is a tmpfs of 1 MiB, so that a tenant who fills its writable files fills nothing else.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from .._shared.abi import files as abi_files
from ..inject import confinement
from ..inject.mounts import Mounter
from ..node.paths import (
    CONTAINER_GPU_PAGE,
    CONTAINER_LEDGER,
    CONTAINER_LIBRARY,
    CONTAINER_LIMITS,
    CONTAINER_PRELOAD,
    CONTAINER_TENANT,
)
from .records import Record

RW_SIZE = 1 << 20
LIBRARY_FILE = "libvgpu.so"
# Folders of slices for containers outside Kubernetes (static_slices.py); an allocation's name is hexadecimal.
STATIC = "slice-"
# What makes an open file one that confined containers may use.
Label = Callable[[int], None]


class AllocationFiles:
    def __init__(self, root: Path, mounter: Mounter, label: Label | None = None) -> None:
        self._root = root
        self._mounter = mounter
        self._label = label or confinement.labeller()

    def folder(self, allocation: str) -> Path:
        return self._root / allocation

    def make(self, record: Record) -> None:
        """Makes every file again; safe to repeat. Only while no container of it runs. Raises OSError."""
        # As text: a dozen Paths would take a third of the time of an Allocate.
        root = str(self._root)
        folder = f"{root}/{record.id}"
        rw = f"{folder}/rw"
        # None but root reaches the files by this path; containers get bind mounts. So the ledger can be writable
        # for every user that a container may run as.
        fresh = self._folder_is_new(root, folder)
        if _made(rw) or not self._mounter.is_mount(Path(rw)):
            self._mounter.mount_tmpfs(Path(rw), RW_SIZE)
        uuids = [device["uuid"] for device in record.limits["devices"]]
        # The last container may have filled the tmpfs through its files; there must be room for new ones next to them.
        for name in () if fresh else ("ledger", "tenant"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{rw}/{name}")
        # No process has a file of a new folder yet, so each is written where it belongs. A reader that comes before all
        # are there, the arbiter or the watcher, reads the limits first: they come last, and all at once.
        write, label = _write if fresh else _replace, self._label
        write(f"{folder}/ld.so.preload", (CONTAINER_LIBRARY + "\n").encode(), 0o444, label)
        for uuid in uuids:
            write(f"{folder}/{_gpu_page(uuid)}", abi_files.pack_gpu_page(uuid, record.id), 0o444, label)
        write(f"{rw}/ledger", abi_files.ledger_head(uuids, record.id), 0o666, label, abi_files.LEDGER_FILE_SIZE)
        write(f"{rw}/tenant", abi_files.pack_tenant_page(uuids, record.id), 0o666, label)
        _replace(f"{folder}/limits", abi_files.pack_limits(record.limits), 0o444, label)

    @staticmethod
    def _folder_is_new(root: str, folder: str) -> bool:
        if not _made(root, parents=True):
            os.chmod(root, 0o700)
        return _made(folder)

    def mounts(self, record: Record) -> list[tuple[str, str, bool]]:
        """(container path, host path, read-only) of what the container gets; contract 1 of the design."""
        folder = f"{self._root}/{record.id}"
        # The version's own folder: a bind mount of `current` would follow the next switch at a container restart.
        return [
            (CONTAINER_LIBRARY, f"{record.library}/{LIBRARY_FILE}", True),
            (CONTAINER_PRELOAD, f"{folder}/ld.so.preload", True),
            (CONTAINER_LIMITS, f"{folder}/limits", True),
            (CONTAINER_LEDGER, f"{folder}/rw/ledger", False),
            (CONTAINER_TENANT, f"{folder}/rw/tenant", False),
            *(
                (CONTAINER_GPU_PAGE + device["uuid"], f"{folder}/{_gpu_page(device['uuid'])}", True)
                for device in record.limits["devices"]
            ),
        ]

    def remove(self, allocation: str) -> None:
        """Ends the tmpfs and removes the folder; nothing there is no fault."""
        folder = self.folder(allocation)
        if folder.is_dir():
            self._mounter.unmount(folder / "rw")
            shutil.rmtree(folder)

    def is_whole(self, record: Record) -> bool:
        """Whether every file is there, limits can be read, and the ledger is its own."""
        folder = f"{self._root}/{record.id}"
        try:
            with open(f"{folder}/limits", "rb") as stream:
                abi_files.parse_limits(stream.read())
            uuids = [device["uuid"] for device in record.limits["devices"]]
            ours = abi_files.is_ledger_of(f"{folder}/rw/ledger", uuids, record.id)
        except (OSError, abi_files.LayoutError):
            return False
        return ours and all(os.path.exists(host) for _inside, host, _read_only in self.mounts(record))

    def present(self) -> list[str]:
        """The allocations that have a folder."""
        return [one for one in self._folders() if not one.startswith(STATIC)]

    def static(self) -> list[str]:
        """The folders of slices for containers outside Kubernetes."""
        return [one for one in self._folders() if one.startswith(STATIC)]

    def _folders(self) -> list[str]:
        # scandir has the kind of each entry from the folder itself; the watcher asks every two seconds.
        try:
            with os.scandir(self._root) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    @staticmethod
    def static_name(slice_id: str) -> str:
        """Without the colons of a slice id, which separate fields in the options of container tools."""
        return STATIC + slice_id.replace("::", "-")


def _gpu_page(uuid: str) -> str:
    return f"gpu-{uuid}"


def _made(folder: str, parents: bool = False) -> bool:
    """Makes a folder; False where it was there. The mode is 0700 from its first moment."""
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        return False
    except FileNotFoundError:
        if not parents:
            raise
        os.makedirs(folder, 0o700)
    return True


def _replace(path: str, data: bytes, mode: int, label: Label | None, size: int | None = None) -> None:
    """A new file under the name: a container that still has the old one mapped keeps its own. ``size``: of the file,
    all behind ``data`` being zero.
    """
    fresh = path + ".new"
    try:
        _write(fresh, data, mode, label, size)
    except FileExistsError:  # of a program that was killed, or of a tenant
        os.unlink(fresh)
        _write(fresh, data, mode, label, size)
    os.replace(fresh, path)


def _write(path: str, data: bytes, mode: int, label: Label | None, size: int | None = None) -> None:
    """A file that is not there yet. Raises FileExistsError where it is."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        if size is not None:
            os.ftruncate(descriptor, size)
        os.fchmod(descriptor, mode)
        if label is not None:
            label(descriptor)
    finally:
        os.close(descriptor)
