# SPDX-License-Identifier: Apache-2.0
"""Makes again what somebody removed under the running program: its folders, the file of all records, and the files of
allocations. A container that runs keeps what it has mounted; it needs them when it starts again.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

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

    def poll(self) -> None:
        """Cheap while nothing is missing. What cannot be made is in ``notes``, and stops nothing else."""
        fault = ""
        with self._records.lock:
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

    def _sentence(self, error: Exception) -> str:
        where = f"{self._paths.run_dir} or {self._paths.state_dir}"
        return f"what is missing in {where} cannot be made again: {error}; is there room, and may it be written?"

    def notes(self) -> list[str]:
        """What a person should know."""
        return [self._fault] if self._fault else []

    def _mend(self, record: Record) -> None:
        if not record.limits or not self._files.lacks(record):
            return
        self._files.mend(record)
        log.warning("allocation %s: files of it were gone from %s; they are made again", record.id, self._files.root)
