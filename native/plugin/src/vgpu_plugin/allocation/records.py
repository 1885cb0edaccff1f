# SPDX-License-Identifier: Apache-2.0
"""Allocation records, saved in /var/lib/vgpu/allocations.json over restarts and reboots."""

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
# Kinds of leases: a check or a manual lease; a program that vgpuctl runs; a container of docker or podman.
LEASE, EXEC, CONTAINER = "lease", "exec", "container"
# Allocations unknown to the kubelet, which must not be offered their slices meanwhile.
LEASES = (LEASE, EXEC, CONTAINER)
# The allocation of one request of a claim (Dynamic Resource Allocation).
CLAIM = "claim"
# Constants of renameat2(2).
AT_FDCWD, RENAME_EXCHANGE = -100, 2

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Record:
    """One container's allocation. ``limits`` is the input of abi.files.pack_limits, so that the files can be created
    again.
    """

    id: str
    kind: str
    slice_ids: tuple[str, ...]
    limits: dict[str, Any] = field(default_factory=dict)
    # Folder of the library version that the container mounts; empty for a GPU that is not shared.
    library: str = ""
    # Leases only: expiry in seconds since the boot that boot_id names.
    expires: float = 0.0
    boot_id: str = ""
    # The ids that the kubelet knows, if it named other slices (substitution.py); empty: slice_ids.
    asked: tuple[str, ...] = ()
    # UUID → promised percent of the SMs, for a size that a pod requested; without entries of 0 %.
    cores: dict[str, int] = field(default_factory=dict)
    # Leases only: the holder, as text for people.
    holder: str = ""
    # Leases of containers only: docker or podman, whose list shows whether the container still exists.
    engine: str = ""
    # Claims only: the uid of the claim.
    claim: str = ""
    # Claims only: the name of the request.
    request: str = ""
    # Claims only: the number of the share's folder in a container, unique on the node.
    number: int = 0

    @classmethod
    def of(cls, words: dict[str, Any]) -> Record:
        """Creates a record from its JSON object. Raises KeyError, TypeError, AttributeError."""
        return cls(**dict(words, slice_ids=tuple(words["slice_ids"]), asked=tuple(words.get("asked", ()))))

    @property
    def kubelet_ids(self) -> tuple[str, ...]:
        return self.asked or self.slice_ids


class RecordStore:
    """All records, in memory and in one file. The caller holds ``lock``, which also covers the files of allocations.

    The file is replaced as a whole but not synced: a lost last entry is rebuilt from the kubelet's checkpoint, and a
    sync would add ten milliseconds to every Allocate. It is also not replaced by rename(2), because ext4 then writes
    the new file to disk at once: two files are exchanged instead, and the older one is overwritten at the next save.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lock = threading.RLock()
        self._records: dict[str, Record] = {}
        # The JSON text of each record, encoded once, because the whole file is written with every allocation.
        self._words: dict[str, str] = {}
        # Indexes for every Allocate, which would otherwise search hundreds of records.
        self._leased: dict[str, str] = {}
        self._substituted: frozenset[str] = frozenset()
        self._name, self._fresh = str(path), str(path.with_suffix(".new"))
        self.warnings: list[str] = []
        # Called with each saved record.
        self.on_put: Callable[[Record], None] = lambda _record: None
        # Whether the last load found no readable file.
        self.lost = False

    def load(self) -> None:
        """Reads the file. An unreadable file is renamed; recovery.py and the kubelet's checkpoint rebuild
        the records.
        """
        try:
            data = json.loads(self._path.read_text())
            if data.get("version") != FORMAT:
                raise ValueError(f"version is {data.get('version')!r}, expected {FORMAT}")
            self._records = {one["id"]: Record.of(one) for one in data["allocations"]}
            self._words = {one.id: json.dumps(vars(one)) for one in self._records.values()}
            for one in self._records.values():
                frozenset(one.kubelet_ids)  # fills the cache that with_ids uses
                self._remember(one)
        except FileNotFoundError:
            self.lost = True
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as fault:
            # All or nothing: records of a partly read file would be saved again.
            self._records, self._words, self._leased, self._substituted = {}, {}, {}, frozenset()
            self.lost = True
            aside = self._path.with_suffix(".broken")
            try:
                os.replace(self._path, aside)
                done = f"it was renamed to {aside}"
            except OSError as second:
                done = f"it could not be renamed to {aside}: {second}"
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
        """Writes the file again if it was deleted. Raises OSError."""
        if self._words and not os.path.exists(self._name):
            log.warning("%s was deleted; it is written again", self._path)
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
        """Returns the lease that holds a slice; None if it is not leased."""
        return self._leased.get(slice_id)

    @property
    def substituted(self) -> bool:
        """Whether any container holds other slices than the kubelet named."""
        return bool(self._substituted)

    def with_ids(self, ids: Iterable[str]) -> list[Record]:
        """Returns the records that the kubelet knows by exactly these ids; an init container and a container of a pod
        may share them.
        """
        given = frozenset(ids)
        return [one for one in self._records.values() if frozenset(one.kubelet_ids) == given]

    def put(self, record: Record) -> None:
        """Saves the record, then stores it in memory: an allocation must survive a restart. Raises NotNow, and then
        stores nothing.
        """
        try:
            self._save({**self._words, record.id: json.dumps(vars(record))})
        except OSError as fault:
            raise NotNow(
                f"allocation {record.id} cannot be saved in {self._path}: {fault}; free space there"
            ) from fault
        if (before := self._records.get(record.id)) is not None:
            self._forget(before)
        self._records = {**self._records, record.id: record}
        self._remember(record)
        self.on_put(record)

    def drop(self, allocation: str) -> None:
        """Deletes a record; never fails, because a full disk must not block a slice. A record that reappears after a
        restart is ended again.
        """
        record = self._records.pop(allocation, None)
        if record is None:
            return
        del self._words[allocation]
        self._forget(record)
        try:
            self._save(self._words)
        except OSError as fault:
            log.warning("allocation %s has ended, but could not be removed from %s: %s", allocation, self._path, fault)


def _overwrite(path: str, data: bytes) -> None:
    """Overwrites a file without truncating it first, so that its disk blocks are reused."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.ftruncate(descriptor, len(data))
    finally:
        os.close(descriptor)


def _exchanged(one: str, other: str) -> bool:
    """Exchanges two files in one step. Returns False if one is missing, or the file system or libc cannot exchange
    files.
    """
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
