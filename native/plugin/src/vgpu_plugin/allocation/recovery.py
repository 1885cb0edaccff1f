# SPDX-License-Identifier: Apache-2.0
"""Recovers the records of allocations if the file of all records was lost. An allocation is the slices of GPUs that one
container has, and a record is its saved data. The source is the copies of the records in /run/vgpu.

The copies are read only if the file is missing or unreadable. If the file is intact, a copy without a record in the
file belongs to an ended allocation.
"""

from __future__ import annotations

import logging

from ..errors import NotNow
from .allocation_files import AllocationFiles
from .records import RecordStore

log = logging.getLogger(__name__)


def recover(records: RecordStore, files: AllocationFiles) -> None:
    """Recovers lost records, and makes sure that each record has a copy from now on, because an older version saved
    records without copies. Called once when the plugin starts, after the records were loaded.
    """
    records.on_put = files.keep_record
    with records.lock:
        if records.lost:
            _from_copies(records, files)
        for record in records.all():
            files.keep_record(record)


def _from_copies(records: RecordStore, files: AllocationFiles) -> None:
    found = [record for name in files.present() if (record := files.record(name)) is not None]
    for record in found:
        try:
            records.put(record)
        except NotNow as fault:
            log.error("allocation %s could not be recovered: %s", record.id, fault)
    if found:
        count = "1 allocation was" if len(found) == 1 else f"{len(found)} allocations were"
        records.warnings.append(f"{count} recovered from {files.root}, because the file of all records was lost")
        log.warning("%s", records.warnings[-1])
