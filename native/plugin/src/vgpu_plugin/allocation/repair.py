# SPDX-License-Identifier: Apache-2.0
"""Restores files that were deleted or damaged while the plugin runs: the plugin's folders, the file of all records, and
the files of allocations. An allocation is the slices of GPUs that one container has, and a record is its saved data. A
running container keeps the files that it has mounted. It gets the restored files when it starts again.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path

from .._shared.abi import files as abi_files
from ..errors import Fatal
from ..node.claim import make_folders
from ..node.paths import Paths
from .allocation_files import AllocationFiles
from .records import Record, RecordStore

log = logging.getLogger(__name__)

# Bytes and files that must be free in /run and on the disk: what one allocation may need, plus a margin.
LEAST_BYTES, LEAST_FILES = 1 << 20, 64


def shortage(path: Path) -> str:
    """Checks the file system of ``path``. If it has too little free space, returns the free space as text, otherwise an
    empty string. The text is also empty if the free space is unknown.
    """
    try:
        found = os.statvfs(path)
    except OSError:
        return ""  # A missing folder is an error that the class Repair reports.
    left = found.f_bavail * found.f_frsize
    if left < LEAST_BYTES:
        return f"{left >> 10} KiB"
    # A file system without a limit on the number of files reports a total of 0 files.
    return f"room for {found.f_favail} files" if found.f_files and found.f_favail < LEAST_FILES else ""


class Repair:
    def __init__(
        self,
        paths: Paths,
        records: RecordStore,
        files: AllocationFiles,
        shortage_of: Callable[[Path], str] = shortage,
    ) -> None:
        self._paths = paths
        self._shortage_of = shortage_of
        # Folder → its free space, for folders that have too little.
        self._short: dict[Path, str] = {}
        self._records = records
        self._files = files
        self._fault = ""
        # Allocation → warning, for allocations whose ledger (the record of used GPU memory) is damaged while a process
        # uses it.
        self._spoilt: dict[str, str] = {}

    def poll(self) -> None:
        """Restores missing files. The call is cheap if no file is missing. Errors are listed in ``notes``, and do not
        prevent the other repairs.
        """
        fault, before = "", self._spoilt
        self._look_for_room()
        with self._records.lock:
            self._spoilt = {}
            mends = [functools.partial(self._mend, record) for record in self._records.all()]
            folders = functools.partial(make_folders, self._paths)
            tasks: list[Callable[[], None]] = [folders, self._files.prepare, self._records.renew, *mends]
            for task in tasks:
                try:
                    task()
                except (Fatal, OSError) as error:
                    fault = fault or self._sentence(error)
        if fault and fault != self._fault:
            log.error("%s", fault)
        self._fault = fault
        for allocation, note in self._spoilt.items():
            if allocation not in before:
                log.warning("%s", note)

    def _sentence(self, error: Exception) -> str:
        where = f"{self._paths.run_dir} or {self._paths.state_dir}"
        return f"missing files in {where} cannot be created again: {error}; check its free space and permissions"

    def _look_for_room(self) -> None:
        """Logs a warning for a full disk, so that it is noticed before a container fails to start."""
        folders = (self._paths.run_dir, self._paths.state_dir)
        before, self._short = self._short, {one: left for one in folders if (left := self._shortage_of(one))}
        for folder in self._short.keys() - before.keys():
            log.warning("%s", self._full(folder))

    def _full(self, folder: Path) -> str:
        return f"{folder} is full ({self._short[folder]} left): no container can start in a slice; free space there"

    def notes(self) -> list[str]:
        """Returns warnings for the node's administrator."""
        full = [self._full(folder) for folder in self._short]
        return [*full, *([self._fault] if self._fault else []), *self._spoilt.values()]

    def _mend(self, record: Record) -> None:
        if not record.limits:
            if not self._files.has_copy(record):
                self._files.keep_record(record)
            return
        if self._files.lacks(record):
            self._files.mend(record)
            log.warning(
                "allocation %s: some of its files were missing in %s; they are created again",
                record.id,
                self._files.root,
            )
        self._mend_ledger(record)

    def _mend_ledger(self, record: Record) -> None:
        """Replaces a damaged ledger with an empty one as soon as no process uses it. Until then the container's
        programs cannot allocate memory, even after a restart of the container. Raises OSError.
        """
        path = f"{self._files.root}/{record.id}/rw/ledger"
        uuids = [device["uuid"] for device in record.limits["devices"]]
        reason = "it is not the ledger of this allocation"
        try:
            if abi_files.is_ledger_of(path, uuids, record.id):
                return
        except BlockingIOError:
            return  # A process of the container holds a file lease (fcntl) on the ledger.
        except abi_files.LayoutError as fault:
            reason = str(fault)
        if not abi_files.ledger_in_use(path):
            abi_files.rewrite_ledger(path, uuids, record.id)
            log.warning("allocation %s: its ledger was damaged (%s); it is written again", record.id, reason)
            return
        whose = f" ({record.holder})" if record.holder else ""
        self._spoilt[record.id] = (
            f"the ledger of allocation {record.id}{whose} was overwritten ({reason}): its programs get no more memory; "
            "stop the container, wait 10 s until the ledger is written again, and start the container"
        )
