# SPDX-License-Identifier: Apache-2.0
"""Allocation records: what was given out, kept in /var/lib/vgpu/allocations.json over restarts and reboots."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import logging
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import NotNow

FORMAT = 1
KUBELET = "kubelet"
# Of a check, or taken by hand; of a program that vgpuctl runs; of a container of docker or podman.
LEASE, EXEC, CONTAINER = "lease", "exec", "container"
# What no kubelet knows: it is not offered the slices meanwhile.
LEASES = (LEASE, EXEC, CONTAINER)
# Of one request of a claim (Dynamic Resource Allocation).
CLAIM = "claim"
# Of renameat2(2).
AT_FDCWD, RENAME_EXCHANGE = -100, 2

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Record:
    """One container's allocation. ``limits`` is what abi.files.pack_limits takes, so that files can be made again."""

    id: str
    kind: str
    slice_ids: tuple[str, ...]
    limits: dict[str, Any] = field(default_factory=dict)
    # Folder of the library version that the container mounts; empty for a GPU that is not shared.
    library: str = ""
    # Of a lease: when it ends, in seconds of the boot that boot_id names.
    expires: float = 0.0
    boot_id: str = ""
    # The ids by which the kubelet knows it, where it was given other slices (substitution.py); empty: slice_ids.
    asked: tuple[str, ...] = ()
    # Percent of the SMs that are promised, by UUID, of a size that a pod requested; 0 is left out.
    cores: dict[str, int] = field(default_factory=dict)
    # Of a lease: who has it, for people; of a container docker or podman, whose list says whether it is still there.
    holder: str = ""
    engine: str = ""
    # Of a claim: its uid, the request, and the number of the share's folder in a container, which no other claim of the
    # node has.
    claim: str = ""
    request: str = ""
    number: int = 0

    @classmethod
    def of(cls, words: dict[str, Any]) -> Record:
        """As JSON keeps it. Raises KeyError, TypeError, AttributeError."""
        return cls(**dict(words, slice_ids=tuple(words["slice_ids"]), asked=tuple(words.get("asked", ()))))

    @property
    def kubelet_ids(self) -> tuple[str, ...]:
        return self.asked or self.slice_ids


class RecordStore:
    """All records, in memory and in one file. The caller holds ``lock``, which covers the files of allocations too.

    The file is replaced as a whole but not synced: a lost last entry is rebuilt from the kubelet's checkpoint, and a
    sync would cost every Allocate ten milliseconds. Nor is it replaced by a rename, upon which ext4 begins to write the
    new file out: the two files change places, and the one before is overwritten the next time.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lock = threading.RLock()
        self._records: dict[str, Record] = {}
        # Each record is put into words once: the whole file is written with every allocation.
        self._words: dict[str, str] = {}
        # What every Allocate looks up, among hundreds.
        self._leased: dict[str, str] = {}
        self._substituted: frozenset[str] = frozenset()
        self._name, self._fresh = str(path), str(path.with_suffix(".new"))
        self.warnings: list[str] = []
        # Called with each record that was written down.
        self.on_put: Callable[[Record], None] = lambda _record: None
        # Whether the last load found no file, or one that cannot be read.
        self.lost = False

    def load(self) -> None:
        """Reads the file. One that cannot be read is put aside; recovery.py and the kubelet's checkpoint rebuild it."""
        try:
            data = json.loads(self._path.read_text())
            if data.get("version") != FORMAT:
                raise ValueError(f"version is {data.get('version')!r}, expected {FORMAT}")
            self._records = {one["id"]: Record.of(one) for one in data["allocations"]}
            self._words = {one.id: json.dumps(vars(one)) for one in self._records.values()}
            for one in self._records.values():
                frozenset(one.kubelet_ids)  # as with_ids will
                self._remember(one)
        except FileNotFoundError:
            self.lost = True
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as fault:
            # All or nothing: what stayed of a file that is put aside would be written down again.
            self._records, self._words, self._leased, self._substituted = {}, {}, {}, frozenset()
            self.lost = True
            aside = self._path.with_suffix(".broken")
            try:
                os.replace(self._path, aside)
                done = f"it was put aside as {aside}"
            except OSError as second:
                done = f"it could not be put aside as {aside}: {second}"
            self.warnings.append(f"{self._path} could not be read ({fault}); {done}")
            log.warning("%s", self.warnings[-1])

    def _save(self, words: dict[str, str]) -> None:
        text = ",\n".join(words.values())
        try:
            data = f'{{"version": {FORMAT}, "allocations": [\n{text}\n]}}\n'.encode()
            try:
                _overwrite(self._fresh, data)
            except FileNotFoundError:  # the folder is not there
                os.makedirs(os.path.dirname(self._fresh), exist_ok=True)
                _overwrite(self._fresh, data)
            if not _exchanged(self._fresh, self._name):
                os.replace(self._fresh, self._name)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(self._fresh)
            raise
        self._words = words

    def renew(self) -> None:
        """Writes the file again where it is gone. Raises OSError."""
        if self._words and not os.path.exists(self._name):
            log.warning("%s was gone; it is written again", self._path)
            self._save(self._words)

    def all(self) -> list[Record]:
        return list(self._records.values())

    def get(self, allocation: str) -> Record | None:
        return self._records.get(allocation)

    def _remember(self, record: Record) -> None:
        if record.asked:
            self._substituted |= {record.id}
        if record.kind in LEASES:
            self._leased.update(dict.fromkeys(record.slice_ids, record.id))

    def _forget(self, record: Record) -> None:
        self._substituted -= {record.id}
        for slice_id in record.slice_ids:
            if self._leased.get(slice_id) == record.id:
                del self._leased[slice_id]

    def lease_of(self, slice_id: str) -> str | None:
        """The lease that has a slice; None where none has."""
        return self._leased.get(slice_id)

    @property
    def substituted(self) -> bool:
        """Whether the kubelet knows any by other ids than of its slices."""
        return bool(self._substituted)

    def with_ids(self, ids: Iterable[str]) -> list[Record]:
        """Those that the kubelet knows by exactly these ids; an init container and a container of a pod share them."""
        given = frozenset(ids)
        return [one for one in self._records.values() if frozenset(one.kubelet_ids) == given]

    def put(self, record: Record) -> None:
        """Written down first: an allocation must outlive a restart. Raises NotNow, and nothing is kept."""
        try:
            self._save({**self._words, record.id: json.dumps(vars(record))})
        except OSError as fault:
            raise NotNow(
                f"allocation {record.id} cannot be written down in {self._path}: {fault}; make room there"
            ) from fault
        if (before := self._records.get(record.id)) is not None:
            self._forget(before)
        self._records = {**self._records, record.id: record}
        self._remember(record)
        self.on_put(record)

    def drop(self, allocation: str) -> None:
        """Never fails: a full disk must not keep a slice. A record that comes back with a restart is ended again."""
        record = self._records.pop(allocation, None)
        if record is None:
            return
        del self._words[allocation]
        self._forget(record)
        try:
            self._save(self._words)
        except OSError as fault:
            log.warning("allocation %s has ended and %s still lists it: %s", allocation, self._path, fault)


def _overwrite(path: str, data: bytes) -> None:
    """Without giving its blocks back, which would have to be found again."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.ftruncate(descriptor, len(data))
    finally:
        os.close(descriptor)


def _exchanged(one: str, other: str) -> bool:
    """Lets two files change places in one step; False where one is not there, or the file system or libc cannot."""
    exchange = _renameat2()
    if exchange is None:
        return False
    return bool(exchange(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0)


@functools.lru_cache(maxsize=1)
def _renameat2() -> Callable[..., int] | None:
    try:
        found: Callable[..., int] = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return None
    return found
