# SPDX-License-Identifier: Apache-2.0
"""Ends allocations that the kubelet no longer knows, and removes the folders of allocations without a record. An
allocation is the slices of GPUs that one container has. The kubelet's checkpoint, the file in which it saves its
allocations, shows which of them it knows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ..node import checkpoint
from ..node.podresources import Holder
from .allocation_files import AllocationFiles
from .allocator import Allocator
from .records import KUBELET

# Time for which an allocation must be missing in the checkpoint before it is ended. It is this long because the kubelet
# writes its checkpoint only after it has admitted the whole pod.
GRACE_S = 60.0
# The first and the longest pause between two attempts to make the kubelet write its checkpoint. The pause is doubled
# after each attempt without effect.
FIRST_REQUEST_S, LAST_REQUEST_S = 10.0, 300.0

log = logging.getLogger(__name__)


class Collector:
    """Ends the allocations whose containers are gone. An allocation is ended if for GRACE_S seconds every poll found
    two facts: the kubelet's checkpoint does not list it, and none of its processes is on a GPU. Only time in which this
    program runs counts.

    Without a readable checkpoint no allocation is ended, because the containers of a stopped kubelet continue to run.
    """

    def __init__(
        self,
        allocator: Allocator,
        files: AllocationFiles,
        checkpoint_file: Path,
        holders: Callable[[], dict[str, Holder] | None] = lambda: None,
        monotonic: Callable[[], float] = time.monotonic,
        send_again: Callable[[], None] = lambda: None,
    ) -> None:
        """``send_again`` sends the list of slices to the kubelet again. The kubelet then writes its checkpoint."""
        self._allocator = allocator
        self._files = files
        self._checkpoint_file = checkpoint_file
        self._holders = holders
        self._monotonic = monotonic
        self._send_again = send_again
        # Returns the allocations that have processes on a GPU. Their slices are still in use, so these allocations are
        # not ended.
        self.alive: Callable[[], frozenset[str]] = frozenset
        self._missing_since: dict[str, float] = {}
        self._next_request, self._pause = 0.0, FIRST_REQUEST_S

    def collect(self) -> list[str]:
        """Polls once, and returns the allocations that it ended."""
        # The kubelet's PodResources service is asked before the checkpoint is read. So a container that the kubelet
        # admits in between is in the checkpoint and is not missed. The lock is not held during the request.
        holders = self._holders() if any(one.kind == KUBELET for one in self._allocator.records.all()) else None
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
            self._ask_for_the_checkpoint(missing, holders, now)
            # PodResources names only slices. If the checkpoint lists a slice under another allocation, a container with
            # that slice does not prove that this allocation still exists.
            in_use = found.ids_in_use
            unexplained = {one: who for one, who in (holders or {}).items() if one not in in_use}
            missing = {one for one in missing if not self._held(one, unexplained)}
            missing |= set(self._unexplained(found))
            missing -= self.alive()
            self._missing_since = {one: self._missing_since.get(one, now) for one in missing}
            ended = [one for one, since in self._missing_since.items() if now - since >= GRACE_S]
            for allocation in ended:
                log.info("allocation %s ends, because the kubelet no longer knows it", allocation)
                self._allocator.forget(allocation)
                del self._missing_since[allocation]
            return ended

    def _held(self, allocation: str, holders: Mapping[str, Holder]) -> bool:
        """Returns whether PodResources (the kubelet's service that lists the devices of containers) has a container
        with slices of the allocation."""
        record = self._allocator.records.get(allocation)
        return record is not None and any(one in holders for one in record.kubelet_ids)

    def _ask_for_the_checkpoint(self, missing: set[str], holders: Mapping[str, Holder] | None, now: float) -> None:
        """Makes the kubelet write its checkpoint if the checkpoint lists an allocation for which PodResources lists no
        container. This is needed because the kubelet removes a deleted pod from its checkpoint only when it admits
        another pod or receives a message from a plugin.

        Only the kubelet decides whether the pod is gone: a kubelet that has just started lists no pod in PodResources,
        and keeps all entries in its checkpoint.
        """
        stale = holders is not None and any(
            record.kind == KUBELET and record.id not in missing and not self._held(record.id, holders)
            for record in self._allocator.records.all()
        )
        if not stale:
            self._next_request, self._pause = now, FIRST_REQUEST_S
        elif now >= self._next_request:
            self._send_again()
            self._next_request, self._pause = now + self._pause, min(2 * self._pause, LAST_REQUEST_S)

    def _unexplained(self, found: checkpoint.Checkpoint) -> list[str]:
        """Returns the allocations that have a folder, but no record and no entry in the kubelet's checkpoint. An
        allocation with an entry is kept, because its record is rebuilt when its container starts.
        """
        named = {entry.allocation for entry in found.entries}
        known = {record.id for record in self._allocator.records.all()}
        return [one for one in self._files.present() if one not in known and one not in named]
