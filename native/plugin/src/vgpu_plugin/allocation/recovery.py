# SPDX-License-Identifier: Apache-2.0
"""Brings records back from their copies in /run/vgpu where the file of all records was lost.

A copy is read only where that file is gone or cannot be read: one without a record is else what an allocation left that
has ended.
"""

from __future__ import annotations

import logging

from ..errors import NotNow
from .allocation_files import AllocationFiles
from .records import RecordStore

log = logging.getLogger(__name__)


def recover(records: RecordStore, files: AllocationFiles) -> None:
    """Once at the start, after ``load``. From then on each record has its copy, those of a former version too."""
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
            log.error("allocation %s is not recovered: %s", record.id, fault)
    if found:
        count = "1 allocation was" if len(found) == 1 else f"{len(found)} allocations were"
        records.warnings.append(f"{count} recovered from {files.root}, for no record of them was left")
        log.warning("%s", records.warnings[-1])
