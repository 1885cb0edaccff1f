# SPDX-License-Identifier: Apache-2.0
"""Compares the mounts at our paths in a container, read from /proc/<pid>/mountinfo, with what the node mounted there.
Only ``read`` reads a file; the other functions work on their arguments.

A mount is ours if it shows the same folder of the same file system as the node's own path, and no other mount covers
it. The kernel's device numbers are equal in every mount namespace, so the node's mounts can be compared with a
container's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from ..node.paths import (
    CONTAINER_LEDGER,
    CONTAINER_LIBRARY_FOLDER,
    CONTAINER_PRELOAD,
    CONTAINER_SHARE,
    OLD_LEDGER,
    OLD_LIBRARY,
    OLD_LIMITS,
)

# Folders and files at or below which a container may only have our mounts. OLD_GUARDED is for a container that an older
# version of this program started.
GUARDED = (os.path.dirname(CONTAINER_SHARE), CONTAINER_PRELOAD)
OLD_GUARDED = (*map(os.path.dirname, (OLD_LIMITS, OLD_LEDGER, OLD_LIBRARY)), CONTAINER_PRELOAD)
# The kernel appends this to the name of a mounted file that was removed or replaced.
DELETED = "//deleted"
ESCAPE = re.compile(rb"\\([0-7]{3})")
# MOST_MORE: maximum number of mounts at or below our paths in addition to the expected ones. LONGEST: maximum bytes of
# the list of mounts. A tenant's user namespace may have 100 000 mounts, which would block the watcher, the thread that
# reads them. We mount at most six folders or files and one for each GPU, so a container that exceeds a maximum is
# reported for that alone.
MOST_MORE, LONGEST = 32, 4 << 20
# Results for paths shorter than this are cached, so that many mounts stacked at one path are followed only once.
SHORT = 64


class Mount(NamedTuple):
    """One line of mountinfo. ``root``: the folder or file of the file system ``device`` (major:minor) that is visible
    at ``point``.
    """

    ident: int
    parent: int
    device: str
    root: str
    point: str


class Place(NamedTuple):
    """An expected mount at ``point`` of a container. ``version``: whether the folder of any version of the library is
    accepted. If ``device`` is empty, any mount is accepted, because this program cannot see the node's own path.
    """

    point: str
    device: str
    root: str
    version: bool = False

    def is_shown_by(self, mount: Mount) -> bool:
        if not self.device:
            return True
        root = mount.root.removesuffix(DELETED)
        if self.version:
            # A running container may have an older version of the library than new containers. A tenant's folder cannot
            # be next to it, because only the node creates folders there.
            return mount.device == self.device and _version_free(root) == _version_free(self.root)
        return (mount.device, root) == (self.device, self.root)


def _version_free(path: str) -> tuple[str, str]:
    folder, name = os.path.split(path)
    if name == os.path.basename(OLD_LIBRARY):
        return os.path.dirname(folder), name
    return folder, ""


@dataclass(frozen=True)
class Table:
    """The mounts of a process. ``cut``: whether the list was longer than the allowed maximum and was truncated.
    ``size``: bytes read.
    """

    rows: tuple[Mount, ...] = ()
    cut: bool = False
    size: int = 0

    @cached_property
    def _above(self) -> dict[tuple[int, str], Mount]:
        """Returns (number of a mount, path) → the mount that covers that mount at this path. The number 0 stands for
        every mount that is not in this list, for example one above the root of a chroot.
        """
        known = {row.ident for row in self.rows}
        return {
            (row.parent if row.parent in known and row.parent != row.ident else 0, row.point): row for row in self.rows
        }

    @cached_property
    def _seen(self) -> dict[str, Mount | None]:
        """Returns the cache of ``seen_at``: short path → the mount that is visible there."""
        return {}

    def seen_at(self, path: str) -> Mount | None:
        """Returns the mount in which a path lies: the topmost mount at the path or at the nearest folder above it."""
        found: Mount | None = None
        for folder in _prefixes(path):
            if folder in self._seen:
                found = self._seen[folder]
                continue
            while (upper := self._above.get((found.ident if found else 0, folder))) is not None:
                found = upper
            if len(folder) < SHORT:
                self._seen[folder] = found
        return found

    def within(self, folders: Iterable[str]) -> list[Mount]:
        """Returns the mounts at or below these folders, including mounts that others cover."""
        tops = tuple(folders)
        return [row for row in self.rows if any(row.point == top or row.point.startswith(f"{top}/") for top in tops)]


def _prefixes(path: str) -> list[str]:
    parts = path.strip("/").split("/") if path.strip("/") else []
    return ["/", *("/" + "/".join(parts[: n + 1]) for n in range(len(parts)))]


def parse(data: bytes, most: int = 0) -> Table:
    """Parses mountinfo; skips invalid lines. ``most``: as in ``read``."""
    rows = []
    for line in data.split(b"\n"):
        words = line.split(b" ", 5)
        if len(words) < 6 or not (words[0].isdigit() and words[1].isdigit()):
            continue
        root, point = (_plain(one) for one in words[3:5])
        rows.append(Mount(int(words[0]), int(words[1]), os.fsdecode(words[2]), root, point))
    return Table(tuple(rows), cut=0 < most < len(data), size=len(data))


def _plain(word: bytes) -> str:
    r"""Decodes spaces, tabs, line ends and backslashes, which are written as \040 and so on."""
    return os.fsdecode(ESCAPE.sub(lambda one: bytes([int(one[1], 8) & 0xFF]), word) if b"\\" in word else word)


def read(path: Path | str, most: int = 0) -> bytes:
    """Reads the whole file, or slightly more than ``most`` bytes; the kernel returns it page by page.
    Raises OSError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        out, size = [], 0
        while (not most or size <= most) and (part := os.read(descriptor, 1 << 16)):
            out.append(part)
            size += len(part)
        return b"".join(out)
    finally:
        os.close(descriptor)


def place_of(node: Table, point: str, host_path: str, own_root: bool = True) -> Place:
    """Returns the mount that a container should have at ``point`` for a path of the node. ``host_path`` must contain no
    link. ``own_root``: whether this program's root is the node's root.
    """
    mount = node.seen_at(host_path)
    version = point in (CONTAINER_LIBRARY_FOLDER, OLD_LIBRARY)
    if mount is None or (mount.point == "/" and not own_root):
        return Place(point, "", "", version)
    below = host_path[len(mount.point.rstrip("/")) :]
    return Place(point, mount.device, (mount.root.rstrip("/") + below) or "/", version)


def has_old_mounts(table: Table, ledger: Place) -> bool:
    """Returns whether a container has its ledger (the file in which the library counts memory) only at the path of
    older versions. A mount counts even if another one covers it.
    """
    points = ledger_points(table, ledger)
    return OLD_LEDGER in points and CONTAINER_LEDGER not in points


def ledger_points(table: Table, ledger: Place) -> set[str]:
    """Returns all paths at which a process has the ledger of its allocation mounted. A mount counts even if another one
    covers it.
    """
    return {row.point for row in table.rows if ledger.device and ledger.is_shown_by(row)}


def foreign(
    table: Table,
    places: Sequence[Place],
    guarded: Sequence[str],
    complete: bool,
    others: Mapping[str, Place] | None = None,
) -> list[str]:
    """Returns a description of each foreign mount: one that hides ours, or lies at or below our paths. ``complete``:
    whether missing mounts are reported too. ``others``: path → a further mount of ours that the container may have,
    because it uses several claims.
    """
    others = others or {}
    within = table.within(guarded)
    if table.cut:
        return [f"the list of its mounts is longer than {LONGEST} bytes, expected a few hundred lines"]
    if len(within) > len(places) + len(others) + MOST_MORE:
        return [f"{len(within)} mounts lie at or below {' and '.join(guarded)}, expected {len(places)}"]
    found = []
    wrong = set()
    for one in places:
        mount = table.seen_at(one.point)
        if mount is not None and mount.point == one.point and one.is_shown_by(mount):
            continue
        # A foreign mount at one of our parent folders hides our mount. If the nearest mount is further up, it is the
        # container's own root, and our mount is only missing.
        if mount is not None and any(mount.point == top or mount.point.startswith(f"{top}/") for top in guarded):
            if mount.point not in wrong:
                wrong.add(mount.point)
                found.append(
                    f"at {mount.point} the container has {mount.root} of file system {mount.device}, "
                    f"expected {one.root} of {one.device} at {one.point}"
                )
        elif complete:
            found.append(f"at {one.point} our mount is missing, expected {one.root} of {one.device}")
    expected = {one.point for one in places}
    for mount in within:
        if table.seen_at(mount.point) != mount:
            continue
        if mount.point in others and others[mount.point].is_shown_by(mount):
            continue
        # A mount at a parent folder of our mounts hides nothing while our mounts are visible.
        if mount.point in expected | wrong or any(point.startswith(f"{mount.point}/") for point in expected):
            continue
        found.append(f"at {mount.point} the container has {mount.root} of file system {mount.device}, expected nothing")
    return found
