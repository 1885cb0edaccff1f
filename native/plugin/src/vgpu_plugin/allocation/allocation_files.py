# SPDX-License-Identifier: Apache-2.0
"""The folder of an allocation: /run/vgpu/allocations/<id>/

    record                     a copy of the allocation's record, used if the file of all records is lost (recovery.py);
                               an unlimited allocation (whole GPUs) has only the file <id>.record and no folder
    limits, gpu-<uuid>         read by the arbiter, the watcher and vgpuctl; a live change is made in place
    rw/ledger, rw/tenant       files that the container writes; mounted into it
    ro/                        mounted into the container as a whole, read-only: hard links to limits and gpu-<uuid>,
                               ld.so.preload, and the empty mount points of ledger and tenant
    root                       a link to /run/vgpu/root, which all containers of the node mount read-only; its two empty
                               folders are the mount points of ro and of the library. An older version made a folder
                               here. The link of a claim points to /run/vgpu/claims, which has a mount point for each
                               number: a container may have several claims, and one path can have only one mount
    ld.so.preload              for containers that were admitted when single files were mounted (``old_mounts``)

A container gets folders, not files: a mount point cannot be renamed from inside, but the folder of a mounted file can.

vgpu-arbiter finds the folders here and writes the gpu pages in place; it creates nothing.

An engine that starts a container before the files exist (docker after a boot) creates a directory in place of each
file. Every write here removes such a directory.

``rw`` is a tmpfs of 1 MiB, so that a tenant who fills its writable files fills no other file system. It is not below
``ro``, because runtimes bind a folder together with the mounts below it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from .._shared.abi import files as abi_files
from ..inject import confinement
from ..inject.mounts import Mounter
from ..node.paths import (
    CONTAINER_ALLOCATION,
    CONTAINER_LEDGER,
    CONTAINER_LIBRARY,
    CONTAINER_LIBRARY_FOLDER,
    CONTAINER_PRELOAD,
    CONTAINER_ROOT,
    CONTAINER_SHARE,
    CONTAINER_TENANT,
    OLD_GPU_PAGE,
    OLD_LEDGER,
    OLD_LIBRARY,
    OLD_LIMITS,
    OLD_TENANT,
)
from .records import Record

RW_SIZE = 1 << 20
# The copy of a record is <id>/record in an allocation's folder, or <id>.record without a folder.
IN_FOLDER, ALONE = "/record", ".record"
# The limits file of an allocation without a folder, which only the driver enforces: <id>.limits.
LIMITS = ".limits"
LIBRARY_FILE = "libvgpu.so"
# Files of ``rw``, and mount points in ``ro``.
WRITABLE = ("ledger", "tenant")
# The folder of mount points that all containers of the node share, next to the folder of all allocations.
ROOT = "root"
# Target of the link ``root`` in each allocation.
TO_ROOT = f"../../{ROOT}"
# The folder of mount points for claims, the preload file for all claims, and the number of mount points.
CLAIMS, CLAIMS_PRELOAD, MOST_CLAIMS = "claims", "claims.ld.so.preload", 256
# Empty folders in ``root``: the mount points of the library and of ``ro``.
PLACES = tuple(one.rpartition("/")[2] for one in (CONTAINER_LIBRARY_FOLDER, CONTAINER_SHARE))
# Name prefix of the folders of slices for containers outside Kubernetes (static_slices.py); the name of any other
# allocation is hexadecimal.
STATIC = "slice-"
# Sets the SELinux label of an open file, so that confined containers may use it.
Label = Callable[[int], None]


class AllocationFiles:
    def __init__(self, root: Path, mounter: Mounter, label: Label | None = None) -> None:
        self.root = self._root = root
        self._mounter = mounter
        self._label = label or confinement.labeller()

    def folder(self, allocation: str) -> Path:
        return self._root / allocation

    def prepare(self) -> None:
        """Creates the root folder of the node and the folder of all allocations. A correct root stays, because
        containers have it mounted. A root with other content, another owner or closed permissions is replaced. Raises
        OSError.
        """
        folder = str(self._root)
        os.makedirs(folder, 0o700, exist_ok=True)
        if stat.S_IMODE(os.lstat(folder).st_mode) != 0o700:
            os.chmod(folder, 0o700)
        root = self._node_root()
        places = [f"{root}/{name}" for name in PLACES]
        if _is_place(root, PLACES) and all(map(_is_place, places)):
            return
        _removed(root)
        for one in (root, *places):
            self._open_folder(one)

    def _prepare_claims(self) -> None:
        """Creates the folders and the preload file that all containers with claims share. Raises OSError."""
        root = f"{self._root.parent}/{CLAIMS}"
        self._open_folder(root)
        for name in (PLACES[0], *map(str, range(MOST_CLAIMS))):
            self._open_folder(f"{root}/{name}")
        preload, text = f"{self._root.parent}/{CLAIMS_PRELOAD}", _preload(CONTAINER_LIBRARY)
        if not _says(preload, text):
            _replace(preload, text, 0o444, self._label)

    def _has_claims(self) -> bool:
        root = f"{self._root.parent}/{CLAIMS}"
        last = f"{root}/{MOST_CLAIMS - 1}"
        return _has_places(root) and os.path.isdir(last) and os.path.isfile(f"{self._root.parent}/{CLAIMS_PRELOAD}")

    def _node_root(self) -> str:
        return f"{self._root.parent}/{ROOT}"

    def leave(self) -> None:
        """Removes the root folders of the node, after the last allocation has ended. Raises OSError."""
        _removed(self._node_root())
        _removed(f"{self._root.parent}/{CLAIMS}")
        _removed(f"{self._root.parent}/{CLAIMS_PRELOAD}")

    def make(self, record: Record, new: bool = False) -> None:
        """Creates every file of an allocation again; may be repeated, but only while no container of the allocation
        runs. ``new``: the kubelet has not yet received this allocation, so no container has the mounts of an older
        version. Raises OSError.
        """
        # Strings instead of Path objects: a dozen Paths would take a third of the time of an Allocate.
        root = str(self._root)
        folder = f"{root}/{record.id}"
        rw = f"{folder}/rw"
        # Only root reaches the files by this path; containers get bind mounts. So the ledger can be writable for every
        # user that a container may run as.
        try:
            fresh = _made(folder)
        except FileNotFoundError:  # the folder of all allocations is missing, for example because /run was emptied
            self.prepare()
            fresh = _made(folder)
        if _made(rw) or not self._mounter.is_mount(Path(rw)):
            self._mounter.mount_tmpfs(Path(rw), RW_SIZE)
        uuids = [device["uuid"] for device in record.limits["devices"]]
        if not fresh:
            # The previous container may have filled the tmpfs through its files, so the old files are removed to make
            # room.
            for name in WRITABLE:
                _removed(f"{rw}/{name}")
            _removed(f"{folder}/ro")
        # No process has opened a file of a new folder, so the files are written in place. The arbiter and the watcher
        # read the limits first, so the limits are written last and in one step.
        write, label = _write if fresh else _replace, self._label
        if not new:
            if not record.id.startswith(STATIC):
                self.keep_record(record)
            write(f"{folder}/ld.so.preload", _preload(OLD_LIBRARY), 0o444, label)
        for uuid in uuids:
            write(f"{folder}/{_gpu_page(uuid)}", abi_files.pack_gpu_page(uuid, record.id), 0o444, label)
        write(f"{rw}/ledger", abi_files.ledger_head(uuids, record.id), 0o666, label, abi_files.LEDGER_FILE_SIZE)
        write(f"{rw}/tenant", abi_files.pack_tenant_page(uuids, record.id), 0o666, label)
        _replace(f"{folder}/limits", abi_files.pack_limits(record.limits), 0o444, label)
        self.make_share(record)

    def lacks(self, record: Record) -> bool:
        """Whether a file is missing. Cheap: reads no file."""
        folder = f"{self._root}/{record.id}"
        names = (*_shared(record), *(f"ro/{name}" for name in (*_shared(record), *WRITABLE)))
        files = (*names, *(f"rw/{name}" for name in WRITABLE), "ro/ld.so.preload")
        there = all(os.path.isfile(f"{folder}/{name}") for name in files) and os.path.isdir(f"{folder}/root")
        return not (there and (not record.claim or self._has_claims()))

    def mend(self, record: Record) -> None:
        """Creates the missing files again. Existing files stay, because a container may have them mounted. Raises
        OSError.
        """
        folder, label = f"{self._root}/{record.id}", self._label
        if not os.path.isfile(f"{folder}/rw/ledger"):
            # Without its ledger the allocation has no state worth keeping.
            self.make(record)
            return
        uuids = [device["uuid"] for device in record.limits["devices"]]
        texts = {_gpu_page(uuid): abi_files.pack_gpu_page(uuid, record.id) for uuid in uuids}
        texts["limits"] = abi_files.pack_limits(record.limits)
        for name, data in texts.items():
            if not os.path.isfile(f"{folder}/{name}"):
                _replace(f"{folder}/{name}", data, 0o444, label)
        if not os.path.isfile(f"{folder}/rw/tenant"):
            _replace(f"{folder}/rw/tenant", abi_files.pack_tenant_page(uuids, record.id), 0o666, label)
        self.make_share(record)

    def make_share(self, record: Record) -> None:
        """Creates the missing files of ``ro`` and ``root``, for example in a folder of an older version; works also
        while a container runs. Raises OSError.
        """
        folder = f"{self._root}/{record.id}"
        share, label = f"{folder}/ro", self._label
        if record.claim:
            self._prepare_claims()
        self._lead_to_root(f"{folder}/root", f"../../{CLAIMS}" if record.claim else TO_ROOT)
        fresh = self._open_folder(share)
        for name in _shared(record):
            _linked(f"{folder}/{name}", f"{share}/{name}")
        for name in WRITABLE:
            if fresh:
                _empty(f"{share}/{name}", label)
            elif not os.path.isfile(f"{share}/{name}"):
                _removed(f"{share}/{name}")
                _empty(f"{share}/{name}", label)
        preload, text = f"{share}/ld.so.preload", _preload(CONTAINER_LIBRARY)
        if fresh:
            _write(preload, text, 0o444, label)
        # A complete preload file stays, because a container may have it mounted. A killed program may have left a
        # truncated file.
        elif not _says(preload, text):
            _replace(preload, text, 0o444, label)

    def _open_folder(self, path: str) -> bool:
        """Creates a folder that every user of a container may enter. Returns False if it existed."""
        made = _made(path)
        os.chmod(path, 0o755)
        if self._label is not None:
            _label_folder(path, self._label)
        return made

    @staticmethod
    def _lead_to_root(path: str, root: str) -> None:
        """Links the allocation to its root folder, so that the watcher and an older version find a container's mounts.
        A complete folder of an older version stays, because a container may have it mounted.
        """
        try:
            os.symlink(root, path)
        except FileExistsError:
            if not _has_places(path):
                _removed(path)
                os.symlink(root, path)

    def keep_record(self, record: Record) -> None:
        """Writes the copy of a record into the folder of its allocation, or as a file of its own if nothing limits the
        allocation. Errors are ignored: the copy is only a backup, and its reader skips a truncated file.
        """
        path, words = f"{self._root}/{record.id}{IN_FOLDER if record.limits else ALONE}", _words(record)
        with contextlib.suppress(OSError):
            try:
                _write(path, words, 0o600, None)
            except FileExistsError:
                _replace(path, words, 0o600, None)

    def keep_limits(self, allocation: str, limits: Mapping[str, Any]) -> None:
        """Writes the limits that only the driver enforces, for an allocation without a folder. The container finds them
        by the record that it mounts. Raises OSError.
        """
        _replace(f"{self._root}/{allocation}{LIMITS}", abi_files.pack_limits(limits), 0o400, None)

    def lone_mount(self, record: Record) -> list[tuple[str, str, bool]]:
        """Returns the mount that lets the hook find the allocation of a container without a folder; empty if the
        allocation has no limits.
        """
        path = f"{self._root}/{record.id}"
        there = not record.limits and os.path.isfile(path + LIMITS)
        return [(CONTAINER_ALLOCATION, path + ALONE, True)] if there else []

    def record(self, allocation: str) -> Record | None:
        """Returns the copy of a record, with the current limits; None if the copy cannot be read."""
        folder = f"{self._root}/{allocation}"
        try:
            with open(folder + (IN_FOLDER if os.path.isdir(folder) else ALONE), "rb") as stream:
                found = Record.of(json.loads(stream.read()))
            if found.id != allocation:
                return None
            with contextlib.suppress(OSError, abi_files.LayoutError), open(f"{folder}/limits", "rb") as stream:
                data = stream.read()
                if not abi_files.says(data, found.limits):
                    found = replace(found, limits=abi_files.as_packed(abi_files.parse_limits(data)))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return found

    def expected_mounts(self, record: Record) -> list[tuple[str, str, bool]]:
        """Returns (container path, host path, read-only) of each mount of the container, each folder before the mounts
        inside it; contract 1 of the design.
        """
        folder = f"{self._root}/{record.id}"
        if record.claim:
            share = f"{CONTAINER_ROOT}/{record.number}"
            return [
                (CONTAINER_ROOT, f"{folder}/root", True),
                (CONTAINER_LIBRARY_FOLDER, record.library, True),
                (share, f"{folder}/ro", True),
                (f"{share}/ledger", f"{folder}/rw/ledger", False),
                (f"{share}/tenant", f"{folder}/rw/tenant", False),
                (CONTAINER_PRELOAD, f"{self._root.parent}/{CLAIMS_PRELOAD}", True),
            ]
        # The mount names the version's own folder: a bind mount of `current` would change the version when the
        # container restarts.
        return [
            (CONTAINER_ROOT, f"{folder}/root", True),
            (CONTAINER_LIBRARY_FOLDER, record.library, True),
            (CONTAINER_SHARE, f"{folder}/ro", True),
            (CONTAINER_LEDGER, f"{folder}/rw/ledger", False),
            (CONTAINER_TENANT, f"{folder}/rw/tenant", False),
            (CONTAINER_PRELOAD, f"{folder}/ro/ld.so.preload", True),
        ]

    def old_mounts(self, record: Record) -> list[tuple[str, str, bool]]:
        """Like ``expected_mounts``, for a container that was admitted when single files were mounted."""
        folder = f"{self._root}/{record.id}"
        return [
            (OLD_LIBRARY, f"{record.library}/{LIBRARY_FILE}", True),
            (CONTAINER_PRELOAD, f"{folder}/ld.so.preload", True),
            (OLD_LIMITS, f"{folder}/limits", True),
            (OLD_LEDGER, f"{folder}/rw/ledger", False),
            (OLD_TENANT, f"{folder}/rw/tenant", False),
            *(
                (OLD_GPU_PAGE + device["uuid"], f"{folder}/{_gpu_page(device['uuid'])}", True)
                for device in record.limits["devices"]
            ),
        ]

    def has_copy(self, record: Record) -> bool:
        """Whether the copy of an unlimited allocation's record exists."""
        return os.path.isfile(f"{self._root}/{record.id}{ALONE}")

    def remove(self, allocation: str) -> None:
        """Unmounts the tmpfs and removes the folder, or the copy of the record. A missing allocation is no error."""
        for ending in (ALONE, LIMITS):
            _removed(f"{self._root}/{allocation}{ending}")
        folder = self.folder(allocation)
        if folder.is_dir():
            self._mounter.unmount(folder / "rw")
            shutil.rmtree(folder)

    def is_whole(self, record: Record) -> bool:
        """Whether every file exists, the limits can be read, and the ledger belongs to this allocation."""
        folder = f"{self._root}/{record.id}"
        try:
            with open(f"{folder}/limits", "rb") as stream:
                abi_files.parse_limits(stream.read())
            uuids = [device["uuid"] for device in record.limits["devices"]]
            ours = abi_files.is_ledger_of(f"{folder}/rw/ledger", uuids, record.id)
        except (OSError, abi_files.LayoutError):
            return False
        there = os.path.isfile(f"{folder}/rw/tenant") and os.path.isdir(record.library)
        return ours and there and self.has_share(record)

    def has_share(self, record: Record) -> bool:
        """Whether ``ro`` and ``root`` are complete: the hard links to the folder's files, and a mount point for each
        mount of the container.
        """
        folder = f"{self._root}/{record.id}"
        return (
            all(_same_file(f"{folder}/{name}", f"{folder}/ro/{name}") for name in _shared(record))
            and all(os.path.isfile(f"{folder}/ro/{name}") for name in WRITABLE)
            and _has_places(f"{folder}/root")
            and _says(f"{folder}/ro/ld.so.preload", _preload(CONTAINER_LIBRARY))
        )

    def present(self) -> list[str]:
        """Returns the allocations that have a folder, or only the copy of a record."""
        return [one for one in self._names() if not one.startswith(STATIC)]

    def static(self) -> list[str]:
        """Returns the names of the folders of slices for containers outside Kubernetes."""
        return [one for one in self._names() if one.startswith(STATIC)]

    def _names(self) -> list[str]:
        # scandir returns the kind of each entry without a stat call; the watcher calls this function every two seconds.
        try:
            with os.scandir(self._root) as entries:
                names = [entry.name for entry in entries if entry.is_dir() or entry.name.endswith(ALONE)]
            return sorted(name.removesuffix(ALONE) for name in names)
        except (FileNotFoundError, NotADirectoryError):
            return []

    @staticmethod
    def static_name(slice_id: str) -> str:
        """Returns the folder name of a slice, without colons: colons separate fields in the options of
        container tools.
        """
        return STATIC + slice_id.replace("::", "-")

    @staticmethod
    def static_id(name: str, uuid: str) -> str:
        """Returns the id of the slice of GPU ``uuid`` whose folder is ``name``."""
        return f"{uuid}::{name[len(STATIC) + len(uuid) + 1 :]}"


def _words(record: Record) -> bytes:
    return json.dumps(vars(record)).encode()


def _gpu_page(uuid: str) -> str:
    return f"gpu-{uuid}"


def _shared(record: Record) -> list[str]:
    """Returns the names of the files that ``ro`` has as hard links."""
    return ["limits", *(_gpu_page(device["uuid"]) for device in record.limits["devices"])]


def _preload(library: str) -> bytes:
    return f"{library}\n".encode()


def _has_places(root: str) -> bool:
    return all(os.path.isdir(f"{root}/{name}") for name in PLACES)


def _is_place(path: str, content: Iterable[str] = ()) -> bool:
    """Whether a path is a folder of this program's user that every user may enter, with exactly ``content``."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    return (
        stat.S_ISDIR(found.st_mode)
        and (found.st_uid, stat.S_IMODE(found.st_mode)) == (os.geteuid(), 0o755)
        and set(os.listdir(path)) == set(content)
    )


def _removed(path: str) -> None:
    """Removes a folder with its content, a file or a link. A missing path is no error."""
    try:
        os.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    except IsADirectoryError:
        shutil.rmtree(path)


def _linked(target: str, name: str) -> None:
    """Creates the hard link ``name`` to a file, and replaces any other file of that name."""
    try:
        os.link(target, name)
    except FileExistsError:
        if not _same_file(target, name):
            _removed(name)
            os.link(target, name)


def _empty(path: str, label: Label | None) -> None:
    """Creates an empty file as a mount point; the mount hides its mode. Raises FileExistsError."""
    if label is None:
        os.mknod(path, stat.S_IFREG | 0o444)
    else:
        _write(path, b"", 0o444, label)


def _same_file(one: str, other: str) -> bool:
    try:
        return os.path.samestat(os.lstat(one), os.lstat(other))
    except FileNotFoundError:
        return False


def _says(path: str, data: bytes) -> bool:
    try:
        with open(path, "rb") as stream:
            return stream.read() == data
    except (FileNotFoundError, IsADirectoryError):
        return False


def _label_folder(folder: str, label: Label) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        label(descriptor)
    finally:
        os.close(descriptor)


def _made(folder: str) -> bool:
    """Creates a folder with mode 0700 from its first moment. Returns False if the folder existed."""
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        return False
    return True


def _replace(path: str, data: bytes, mode: int, label: Label | None, size: int | None = None) -> None:
    """Replaces the file with a new one: a container that still has the old file mapped keeps that. ``size``: size of
    the file; the bytes after ``data`` are zero.
    """
    fresh = path + ".new"
    try:
        _write(fresh, data, mode, label, size)
    except FileExistsError:  # left by a killed program, or created by a tenant
        _removed(fresh)
        _write(fresh, data, mode, label, size)
    try:
        os.replace(fresh, path)
    except IsADirectoryError:  # an engine created this folder when it started a container before the files existed
        _removed(path)
        os.replace(fresh, path)


def _write(path: str, data: bytes, mode: int, label: Label | None, size: int | None = None) -> None:
    """Writes a new file. Raises FileExistsError if the file exists."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        if size is not None:
            os.ftruncate(descriptor, size)
        # Set the mode afterwards, because os.open would clear the bits of the process's umask.
        if mode != 0o600:
            os.fchmod(descriptor, mode)
        if label is not None:
            label(descriptor)
    finally:
        os.close(descriptor)
