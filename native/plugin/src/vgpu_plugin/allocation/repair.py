# SPDX-License-Identifier: Apache-2.0
"""Makes again what somebody removed or spoilt under the running program: its folders, the file of all records, and the
files of allocations. A container that runs keeps what it has mounted; it needs them when it starts again.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

from .._shared.abi import files as abi_files
from ..errors import Fatal
from ..node.claim import make_folders
from ..node.paths import Paths
from .allocation_files import AllocationFiles
from .records import Record, RecordStore

log = logging.getLogger(__name__)


class Repair:
    def __init__(self, paths: Paths, records: RecordStore, files: AllocationFiles) -> None:
        self._paths = paths
        self._records = records
        self._files = files
        self._fault = ""
        # Of allocations whose ledger cannot be read and is in use: what a person should know.
        self._spoilt: dict[str, str] = {}

    def poll(self) -> None:
        """Cheap while nothing is missing. What cannot be made is in ``notes``, and stops nothing else."""
        fault, before = "", self._spoilt
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
        return f"what is missing in {where} cannot be made again: {error}; is there room, and may it be written?"

    def notes(self) -> list[str]:
        """What a person should know."""
        return [*([self._fault] if self._fault else []), *self._spoilt.values()]

    def _mend(self, record: Record) -> None:
        if not record.limits:
            if not self._files.has_copy(record):
                self._files.keep_record(record)
            return
        if self._files.lacks(record):
            self._files.mend(record)
            log.warning(
                "allocation %s: files of it were gone from %s; they are made again", record.id, self._files.root
            )
        self._mend_ledger(record)

    def _mend_ledger(self, record: Record) -> None:
        """With a ledger that cannot be read no program of the container gets memory, also after it was started again.
        It is emptied once no process has a slot in it. Raises OSError.
        """
        path = f"{self._files.root}/{record.id}/rw/ledger"
        uuids = [device["uuid"] for device in record.limits["devices"]]
        reason = "it is not the ledger of this allocation"
        try:
            if abi_files.is_ledger_of(path, uuids, record.id):
                return
        except BlockingIOError:
            return  # a process of the container holds a lease on it
        except abi_files.LayoutError as fault:
            reason = str(fault)
        if not abi_files.ledger_in_use(path):
            abi_files.rewrite_ledger(path, uuids, record.id)
            log.warning("allocation %s: its ledger was spoilt (%s); it is written again", record.id, reason)
            return
        whose = f" ({record.holder})" if record.holder else ""
        self._spoilt[record.id] = (
            f"the ledger of allocation {record.id}{whose} was overwritten ({reason}): its programs get no more memory; "
            "start the container again, and within 10 s of its end the ledger is written again"
        )
