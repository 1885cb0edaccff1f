# SPDX-License-Identifier: Apache-2.0
"""Creates and removes the files of allocations. An allocation is the set of GPU slices that one container has. Its
folder is /run/vgpu/allocations/<id>/. There ``limits`` has the limits, ``rw`` is writable for the container and has the
ledger (the account of the GPU memory that it uses), ``ro`` is mounted read-only, and ``root`` leads to a folder that
all containers of the node mount. In detail:

    record: a copy of the allocation's record, which is used if the file of all records is lost (recovery.py). An
        allocation without limits (whole GPUs) has no folder but only the file <id>.record.
    limits: the limits that the library in the container enforces. If they change while the container runs, the file is
        changed in place.
    gpu-<uuid>: for each GPU one page, in which vgpu-arbiter (it divides a GPU's time between containers) writes whether
        the container may launch kernels now. The watcher, which finds programs that bypass their limits, and vgpuctl
        read these pages and the limits.
    rw/ledger, rw/tenant: the files that the container writes. The ledger records the GPU memory that it uses.
    ro/: a folder that is mounted into the container read-only. It has hard links to limits and gpu-<uuid>, the file
        ld.so.preload, and empty files as mount points for ledger and tenant.
    root: a link to /run/vgpu/root, which all containers of the node mount read-only. The two empty folders in it are
        the mount points of ro and of the library. An older version created a folder instead of the link. For a claim
        the link points to /run/vgpu/claims, which has a mount point for each share number, because a container may
        have several claims and one path can have only one mount.
    ld.so.preload: for containers of an older version, which mounted single files (``old_mounts``).

Folders are mounted and not single files, because a container could rename the folder that contains a mounted file. It
cannot rename a mount point.

vgpu-arbiter only writes existing files gpu-<uuid>, in place. It creates no files.

A container engine may start a container before its files exist, for example docker after a boot. The engine then
creates a directory in place of each file. So every write (safe_files.py) removes such a directory first.

``rw`` is a tmpfs of 1 MiB. So a tenant (a container's user) who fills its files fills no other file system. ``rw`` is
not below ``ro``, because container runtimes bind a folder together with the mounts below it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
from collections.abc import Mapping
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
from . import safe_files
from .records import Record
from .safe_files import Label

RW_SIZE = 1 << 20
# If an allocation has a folder, the copy of its record (all data about the allocation) is the file <id>/record.
# Otherwise it is the file <id>.record.
IN_FOLDER, ALONE = "/record", ".record"
# If an allocation has no folder, its limits file is <id>.limits. In that case only the driver enforces the limits.
LIMITS = ".limits"
LIBRARY_FILE = "libvgpu.so"
# The files in ``rw``, into which the container writes. For each of them ``ro`` has an empty file as mount point.
WRITABLE = ("ledger", "tenant")
# The folder of mount points that all containers of the node share. It is in the parent folder of the folder of all
# allocations.
ROOT = "root"
# The link ``root`` in each allocation points to this path.
TO_ROOT = f"../../{ROOT}"
# Three values for claims: the folder of mount points, the ld.so.preload file of all containers with claims, and the
# number of mount points.
CLAIMS, CLAIMS_PRELOAD, MOST_CLAIMS = "claims", "claims.ld.so.preload", 256
# Names of the two empty folders in ``root``. They are the mount points of the library and of ``ro``.
PLACES = tuple(one.rpartition("/")[2] for one in (CONTAINER_LIBRARY_FOLDER, CONTAINER_SHARE))
# Prefix of the folder names of slices for containers outside Kubernetes (static_slices.py). All other allocations have
# hexadecimal ids, which cannot begin with this prefix.
STATIC = "slice-"


class AllocationFiles:
    def __init__(self, root: Path, mounter: Mounter, label: Label | None = None) -> None:
        self.root = self._root = root
        self._mounter = mounter
        self._label = label or confinement.labeller()

    def folder(self, allocation: str) -> Path:
        return self._root / allocation

    def prepare(self) -> None:
        """Creates the folder of all allocations, and the folder ``root`` that all containers of the node mount. A
        correct ``root`` is left alone, because containers have it mounted. A ``root`` with other content, another owner
        or another mode is replaced. Raises OSError.
        """
        folder = str(self._root)
        os.makedirs(folder, 0o700, exist_ok=True)
        if stat.S_IMODE(os.lstat(folder).st_mode) != 0o700:
            os.chmod(folder, 0o700)
        root = self._node_root()
        places = [f"{root}/{name}" for name in PLACES]
        if safe_files.is_place(root, PLACES) and all(map(safe_files.is_place, places)):
            return
        safe_files.remove(root)
        for one in (root, *places):
            self._open_folder(one)

    def _prepare_claims(self) -> None:
        """Creates the folders and the preload file that all containers with claims share. Raises OSError."""
        root = f"{self._root.parent}/{CLAIMS}"
        self._open_folder(root)
        for name in (PLACES[0], *map(str, range(MOST_CLAIMS))):
            self._open_folder(f"{root}/{name}")
        preload, text = f"{self._root.parent}/{CLAIMS_PRELOAD}", _preload(CONTAINER_LIBRARY)
        if not safe_files.has_content(preload, text):
            safe_files.replace(preload, text, 0o444, self._label)

    def _has_claims(self) -> bool:
        root = f"{self._root.parent}/{CLAIMS}"
        last = f"{root}/{MOST_CLAIMS - 1}"
        return _has_places(root) and os.path.isdir(last) and os.path.isfile(f"{self._root.parent}/{CLAIMS_PRELOAD}")

    def _node_root(self) -> str:
        return f"{self._root.parent}/{ROOT}"

    def leave(self) -> None:
        """Removes the folders that all containers share. Called after the last allocation has ended. Raises OSError."""
        safe_files.remove(self._node_root())
        safe_files.remove(f"{self._root.parent}/{CLAIMS}")
        safe_files.remove(f"{self._root.parent}/{CLAIMS_PRELOAD}")

    def make(self, record: Record, new: bool = False) -> None:
        """Creates every file of an allocation again. It may be called repeatedly, but only while no container of the
        allocation runs. ``new`` means that the kubelet has not yet received this allocation. Then no container can have
        the mounts of an older version, so the files for such mounts are left out. Raises OSError.
        """
        # Paths are strings here instead of Path objects, because a dozen Path objects would take a third of the time of
        # an Allocate.
        root = str(self._root)
        folder = f"{root}/{record.id}"
        rw = f"{folder}/rw"
        # The mode of the ledger lets every user write it, because a container may run as any user. On the host only
        # root can reach it, because the folder is closed to others; a container reaches it through a bind mount.
        try:
            fresh = safe_files.make_folder(folder)
        except FileNotFoundError:  # The folder of all allocations is missing, for example because /run was emptied.
            self.prepare()
            fresh = safe_files.make_folder(folder)
        if safe_files.make_folder(rw) or not self._mounter.is_mount(Path(rw)):
            self._mounter.mount_tmpfs(Path(rw), RW_SIZE)
        uuids = [device["uuid"] for device in record.limits["devices"]]
        if not fresh:
            # The existing files are removed first, because the previous container may have filled the tmpfs through
            # them.
            for name in WRITABLE:
                safe_files.remove(f"{rw}/{name}")
            safe_files.remove(f"{folder}/ro")
        # In a new folder no process can have opened a file, so the files are written in place. In an existing folder
        # they are replaced. The limits file is written last and in one step, because the arbiter (which divides the
        # GPU's time) and the watcher (which finds programs that bypass their limits) read it first.
        write, label = safe_files.write if fresh else safe_files.replace, self._label
        if not new:
            if not record.id.startswith(STATIC):
                self.keep_record(record)
            write(f"{folder}/ld.so.preload", _preload(OLD_LIBRARY), 0o444, label)
        for uuid in uuids:
            write(f"{folder}/{_gpu_page(uuid)}", abi_files.pack_gpu_page(uuid, record.id), 0o444, label)
        write(f"{rw}/ledger", abi_files.ledger_head(uuids, record.id), 0o666, label, abi_files.LEDGER_FILE_SIZE)
        write(f"{rw}/tenant", abi_files.pack_tenant_page(uuids, record.id), 0o666, label)
        safe_files.replace(f"{folder}/limits", abi_files.pack_limits(record.limits), 0o444, label)
        self.make_share(record)

    def lacks(self, record: Record) -> bool:
        """Returns whether a file is missing. This check is cheap, because it reads no file."""
        folder = f"{self._root}/{record.id}"
        names = (*_shared(record), *(f"ro/{name}" for name in (*_shared(record), *WRITABLE)))
        files = (*names, *(f"rw/{name}" for name in WRITABLE), "ro/ld.so.preload")
        there = all(os.path.isfile(f"{folder}/{name}") for name in files) and os.path.isdir(f"{folder}/root")
        return not (there and (not record.claim or self._has_claims()))

    def mend(self, record: Record) -> None:
        """Creates the missing files of an allocation again. Existing files stay, because a container may have them
        mounted. Raises OSError.
        """
        folder, label = f"{self._root}/{record.id}", self._label
        if not os.path.isfile(f"{folder}/rw/ledger"):
            # The ledger (the container's account of used GPU memory) is missing, so no data of the folder is worth
            # keeping.
            self.make(record)
            return
        uuids = [device["uuid"] for device in record.limits["devices"]]
        texts = {_gpu_page(uuid): abi_files.pack_gpu_page(uuid, record.id) for uuid in uuids}
        texts["limits"] = abi_files.pack_limits(record.limits)
        for name, data in texts.items():
            if not os.path.isfile(f"{folder}/{name}"):
                safe_files.replace(f"{folder}/{name}", data, 0o444, label)
        if not os.path.isfile(f"{folder}/rw/tenant"):
            safe_files.replace(f"{folder}/rw/tenant", abi_files.pack_tenant_page(uuids, record.id), 0o666, label)
        self.make_share(record)

    def make_share(self, record: Record) -> None:
        """Creates the missing files of ``ro`` and the link ``root``. They are missing, for example, in a folder that an
        older version created. It may be called while a container runs. Raises OSError.
        """
        folder = f"{self._root}/{record.id}"
        share, label = f"{folder}/ro", self._label
        if record.claim:
            self._prepare_claims()
        self._lead_to_root(f"{folder}/root", f"../../{CLAIMS}" if record.claim else TO_ROOT)
        fresh = self._open_folder(share)
        for name in _shared(record):
            safe_files.link(f"{folder}/{name}", f"{share}/{name}")
        for name in WRITABLE:
            if fresh:
                safe_files.mount_point(f"{share}/{name}", label)
            elif not os.path.isfile(f"{share}/{name}"):
                safe_files.remove(f"{share}/{name}")
                safe_files.mount_point(f"{share}/{name}", label)
        preload, text = f"{share}/ld.so.preload", _preload(CONTAINER_LIBRARY)
        if fresh:
            safe_files.write(preload, text, 0o444, label)
        # A complete preload file is kept, because a container may have it mounted. Only a truncated file, left by a
        # killed program, is replaced.
        elif not safe_files.has_content(preload, text):
            safe_files.replace(preload, text, 0o444, label)

    def _open_folder(self, path: str) -> bool:
        """Creates a folder that every user of a container may enter. Returns False if the folder existed."""
        made = safe_files.make_folder(path)
        os.chmod(path, 0o755)
        if self._label is not None:
            safe_files.label_folder(path, self._label)
        return made

    @staticmethod
    def _lead_to_root(path: str, root: str) -> None:
        """Creates the link ``root`` of an allocation. Through this path the watcher and an older version find a
        container's mounts. If an older version created a complete folder at this path, the folder is kept, because a
        container may have it mounted.
        """
        try:
            os.symlink(root, path)
        except FileExistsError:
            if not _has_places(path):
                safe_files.remove(path)
                os.symlink(root, path)

    def keep_record(self, record: Record) -> None:
        """Writes the copy of a record into the allocation's folder. If the allocation has no limits, it has no folder,
        and the copy is a file of its own. Errors are ignored, because the copy is only a backup, and its reader skips a
        truncated file.
        """
        path, words = f"{self._root}/{record.id}{IN_FOLDER if record.limits else ALONE}", _words(record)
        with contextlib.suppress(OSError):
            try:
                safe_files.write(path, words, 0o600, None)
            except FileExistsError:
                safe_files.replace(path, words, 0o600, None)

    def keep_limits(self, allocation: str, limits: Mapping[str, Any]) -> None:
        """Writes the limits file of an allocation without a folder, whose limits only the driver enforces. The CDI hook
        that sets these limits finds the file through the record that the container mounts. Raises OSError.
        """
        safe_files.replace(f"{self._root}/{allocation}{LIMITS}", abi_files.pack_limits(limits), 0o400, None)

    def lone_mount(self, record: Record) -> list[tuple[str, str, bool]]:
        """Returns a list with the one mount for a container whose allocation has no folder. By this mount the CDI hook,
        which sets the driver's limits when a container starts, finds the allocation. The list is empty if the driver
        does not limit the allocation.
        """
        path = f"{self._root}/{record.id}"
        there = not record.limits and os.path.isfile(path + LIMITS)
        return [(CONTAINER_ALLOCATION, path + ALONE, True)] if there else []

    def record(self, allocation: str) -> Record | None:
        """Reads the copy of a record, and returns it with the limits of the current limits file. Returns None if the
        copy cannot be read.
        """
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
        """Returns (container path, host path, read-only) of each mount of the container. A folder comes before the
        mounts inside it. The library expects these container paths.
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
        # The library is mounted from the folder of its version. A mount of the link ``current`` could give the
        # container another version after a restart.
        return [
            (CONTAINER_ROOT, f"{folder}/root", True),
            (CONTAINER_LIBRARY_FOLDER, record.library, True),
            (CONTAINER_SHARE, f"{folder}/ro", True),
            (CONTAINER_LEDGER, f"{folder}/rw/ledger", False),
            (CONTAINER_TENANT, f"{folder}/rw/tenant", False),
            (CONTAINER_PRELOAD, f"{folder}/ro/ld.so.preload", True),
        ]

    def old_mounts(self, record: Record) -> list[tuple[str, str, bool]]:
        """Returns the mounts of a container that an older version admitted. That version mounted single files instead
        of folders.
        """
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
        """Returns whether an allocation without limits has the copy of its record."""
        return os.path.isfile(f"{self._root}/{record.id}{ALONE}")

    def remove(self, allocation: str) -> None:
        """Removes all files of an allocation: unmounts the tmpfs and removes the folder, or removes the copy of the
        record. A missing allocation is no error.
        """
        for ending in (ALONE, LIMITS):
            safe_files.remove(f"{self._root}/{allocation}{ending}")
        folder = self.folder(allocation)
        if folder.is_dir():
            self._mounter.unmount(folder / "rw")
            shutil.rmtree(folder)

    def is_whole(self, record: Record) -> bool:
        """Returns whether every file exists, the limits can be read, and the ledger belongs to this allocation."""
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
        """Returns whether ``ro`` and ``root`` are complete: they must have the hard links to the folder's files, and a
        mount point for each mount of the container.
        """
        folder = f"{self._root}/{record.id}"
        return (
            all(safe_files.same_file(f"{folder}/{name}", f"{folder}/ro/{name}") for name in _shared(record))
            and all(os.path.isfile(f"{folder}/ro/{name}") for name in WRITABLE)
            and _has_places(f"{folder}/root")
            and safe_files.has_content(f"{folder}/ro/ld.so.preload", _preload(CONTAINER_LIBRARY))
        )

    def present(self) -> list[str]:
        """Returns the ids of all allocations on the host: those with a folder, and those of which only the copy of the
        record exists."""
        return [one for one in self._names() if not one.startswith(STATIC)]

    def static(self) -> list[str]:
        """Returns the folder names of the slices for containers outside Kubernetes."""
        return [one for one in self._names() if one.startswith(STATIC)]

    def _names(self) -> list[str]:
        # scandir returns the kind of each entry without a stat call. That matters, because the watcher calls this
        # function every two seconds.
        try:
            with os.scandir(self._root) as entries:
                names = [entry.name for entry in entries if entry.is_dir() or entry.name.endswith(ALONE)]
            return sorted(name.removesuffix(ALONE) for name in names)
        except (FileNotFoundError, NotADirectoryError):
            return []

    @staticmethod
    def static_name(slice_id: str) -> str:
        """Returns the folder name of a slice, which is its id without colons, because colons separate fields in the
        options of container tools.
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
    """Returns the names of the files to which ``ro`` has hard links."""
    return ["limits", *(_gpu_page(device["uuid"]) for device in record.limits["devices"])]


def _preload(library: str) -> bytes:
    return f"{library}\n".encode()


def _has_places(root: str) -> bool:
    return all(os.path.isdir(f"{root}/{name}") for name in PLACES)
