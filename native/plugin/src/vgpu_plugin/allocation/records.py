# SPDX-License-Identifier: Apache-2.0
"""The records of all allocations. A record is the saved data of the slices (parts of GPUs) that one container holds.
All records are saved in /var/lib/vgpu/allocations.json, so that they survive restarts and reboots.
"""

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
# Kinds of leases. A lease reserves slices on this host: for a check or by hand, for a program that vgpuctl exec runs,
# or for a container of docker or podman.
LEASE, EXEC, CONTAINER = "lease", "exec", "container"
# Kinds of allocations that the kubelet does not know. Their slices must be withheld from the kubelet.
LEASES = (LEASE, EXEC, CONTAINER)
# Kind of the allocation for one request of a claim (Dynamic Resource Allocation).
CLAIM = "claim"
# Constants of renameat2(2).
AT_FDCWD, RENAME_EXCHANGE = -100, 2

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Record:
    """The allocation of one container. ``limits`` is the input of abi.files.pack_limits, so that the limits file can be
    written again from the record.
    """

    id: str
    kind: str
    slice_ids: tuple[str, ...]
    limits: dict[str, Any] = field(default_factory=dict)
    # Folder of the library version that the container mounts; empty if its GPU is not shared by the library.
    library: str = ""
    # For leases only: the time at which the lease expires, in seconds since the boot whose id is boot_id.
    expires: float = 0.0
    boot_id: str = ""
    # The slice ids that the kubelet named, if the container holds other slices (substitution.py). Otherwise empty.
    asked: tuple[str, ...] = ()
    # GPU UUID → promised percent of the SMs, for a pod that requested a size. GPUs with 0 % have no entry.
    cores: dict[str, int] = field(default_factory=dict)
    # For leases only: a text for people that says who holds the lease.
    holder: str = ""
    # For leases of containers only: docker or podman. The list of containers that this engine prints shows whether the
    # container still exists.
    engine: str = ""
    # For claims only: the uid of the claim.
    claim: str = ""
    # For claims only: the name of the request.
    request: str = ""
    # For claims only: a number that is unique on the node. The folder of the share in a container has this number as
    # its name.
    number: int = 0

    @classmethod
    def of(cls, words: dict[str, Any]) -> Record:
        """Returns the record that a JSON object describes. Raises KeyError, TypeError, AttributeError."""
        return cls(**dict(words, slice_ids=tuple(words["slice_ids"]), asked=tuple(words.get("asked", ()))))

    @property
    def kubelet_ids(self) -> tuple[str, ...]:
        return self.asked or self.slice_ids


class RecordStore:
    """Holds all records, in memory and in one file. The caller of a method holds ``lock``, which also protects the
    files of allocations.

    Every save writes the whole file. The file is not synced to disk: a sync would add ten milliseconds to every
    Allocate, and a lost last record is rebuilt from the kubelet's checkpoint.

    A save does not use rename(2), because ext4 would then write the new file to disk at once. Instead it writes a
    second file and exchanges the two. The next save overwrites the older file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lock = threading.RLock()
        self._records: dict[str, Record] = {}
        # Record id → the record's JSON text. The texts are cached, because the whole file is written with every
        # allocation.
        self._words: dict[str, str] = {}
        # Two indexes for Allocate, which would otherwise have to search hundreds of records. The first maps each leased
        # slice to its lease. The second has the records whose container holds other slices than the kubelet named.
        self._leased: dict[str, str] = {}
        self._substituted: frozenset[str] = frozenset()
        self._name, self._fresh = str(path), str(path.with_suffix(".new"))
        self.warnings: list[str] = []
        # Function that is called with each saved record.
        self.on_put: Callable[[Record], None] = lambda _record: None
        # True if the last load found no file, or could not read it.
        self.lost = False

    def load(self) -> None:
        """Reads the file. If the file cannot be read, it is renamed. The records are then rebuilt by recovery.py and
        from the kubelet's checkpoint.
        """
        try:
            data = json.loads(self._path.read_text())
            if data.get("version") != FORMAT:
                raise ValueError(f"version is {data.get('version')!r}, expected {FORMAT}")
            self._records = {one["id"]: Record.of(one) for one in data["allocations"]}
            self._words = {one.id: json.dumps(vars(one)) for one in self._records.values()}
            for one in self._records.values():
                frozenset(one.kubelet_ids)  # This fills the cache of kubelet_ids, which with_ids uses.
                self._remember(one)
        except FileNotFoundError:
            self.lost = True
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as fault:
            # If one record cannot be read, all are dropped. Otherwise the next save would write a file that lacks the
            # unreadable ones.
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
            except FileNotFoundError:  # The folder of the file does not exist yet.
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
        """Returns the id of the lease that holds a slice, or None if the slice is not leased."""
        return self._leased.get(slice_id)

    @property
    def substituted(self) -> bool:
        """True if any container holds other slices than the kubelet named."""
        return bool(self._substituted)

    def with_ids(self, ids: Iterable[str]) -> list[Record]:
        """Returns the records for which the kubelet named exactly these ids. There may be several records, because an
        init container and a container of one pod may share slices.
        """
        given = frozenset(ids)
        return [one for one in self._records.values() if frozenset(one.kubelet_ids) == given]

    def put(self, record: Record) -> None:
        """Saves the record in the file and then in memory. The file comes first, because an allocation must survive a
        restart. If the file cannot be written, raises NotNow and changes nothing.
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
        """Deletes a record. It never fails, because a full disk must not keep a slice allocated. If the record stays in
        the file, it reappears after a restart, and the allocation is then ended again.
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
    """Exchanges two files in one step. Returns False if one is missing, or if the file system or the C library cannot
    exchange files.
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
