# SPDX-License-Identifier: Apache-2.0
"""Makes again what somebody removed under the running program: its folders, the file of all records, and the files of
allocations. A container that runs keeps what it has mounted; it needs them when it starts again.
"""

from __future__ import annotations

import logging

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

    def poll(self) -> None:
        """Cheap while nothing is missing. Raises Fatal, OSError; what else can be made is made first."""
        make_folders(self._paths)
        self._files.prepare()
        with self._records.lock:
            self._records.renew()
            faults = [fault for record in self._records.all() if (fault := self._mend(record))]
        if faults:
            raise faults[0]

    def _mend(self, record: Record) -> OSError | None:
        if not record.limits or not self._files.lacks(record):
            return None
        try:
            self._files.mend(record)
        except OSError as fault:
            return fault
        log.warning("allocation %s: files of it were gone from %s; they are made again", record.id, self._files.root)
        return None
