# SPDX-License-Identifier: Apache-2.0
"""Ends allocations that the kubelet no longer knows, and removes folders that no record explains."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from . import checkpoint
from .allocation_files import AllocationFiles
from .allocator import Allocator
from .podresources import Holder
from .records import KUBELET

# Between the answer of Allocate and the kubelet's checkpoint lies the admission of the rest of the pod.
GRACE_S = 60.0

log = logging.getLogger(__name__)


class Collector:
    """An allocation is ended when it was missing in every look for GRACE_S seconds of this program's life.

    Without a readable checkpoint nothing is ended: a kubelet that is down still has running containers.
    """

    def __init__(
        self,
        allocator: Allocator,
        files: AllocationFiles,
        checkpoint_file: Path,
        holders: Callable[[], dict[str, Holder] | None] = lambda: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._allocator = allocator
        self._files = files
        self._checkpoint_file = checkpoint_file
        self._holders = holders
        self._monotonic = monotonic
        self._missing_since: dict[str, float] = {}

    def collect(self) -> list[str]:
        """One look; returns the allocations that it ended."""
        with self._allocator.lock:
            found = checkpoint.read(self._checkpoint_file)
            if found is None:
                return []
            now = self._monotonic()
            missing = {
                record.id
                for record in self._allocator.records.all()
                if record.kind == KUBELET and not found.holds(record.id, frozenset(record.kubelet_ids))
            }
            if missing:
                missing -= self._known_to_pod_resources(missing)
            missing |= set(self._unexplained(found))
            self._missing_since = {one: self._missing_since.get(one, now) for one in missing}
            ended = [one for one, since in self._missing_since.items() if now - since >= GRACE_S]
            for allocation in ended:
                log.info("allocation %s: the kubelet no longer knows it; it ends", allocation)
                self._allocator.forget(allocation)
                del self._missing_since[allocation]
            return ended

    def _known_to_pod_resources(self, allocations: set[str]) -> set[str]:
        """Of allocations that the checkpoint lacks, those whose slices a container holds by the kubelet's own word."""
        holders = self._holders() or {}
        records = [record for record in self._allocator.records.all() if record.id in allocations]
        return {record.id for record in records if any(one in holders for one in record.kubelet_ids)}

    def _unexplained(self, found: checkpoint.Checkpoint) -> list[str]:
        """Folders that neither a record nor the kubelet names; a lost record is rebuilt at the next start."""
        named = {entry.allocation for entry in found.entries}
        known = {record.id for record in self._allocator.records.all()}
        return [one for one in self._files.present() if one not in known and one not in named]
