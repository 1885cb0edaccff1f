# SPDX-License-Identifier: Apache-2.0
"""Leases: one free slice, withheld from the kubelet for a check on this host.

A lease ends after its time, so that a killed check costs a slice for minutes and not for ever.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ..errors import BadRequest, NoFreeSlice, NotNow, Taken, Unknown
from ..node import checkpoint
from ..node.clock import Clock
from ..offer.pool import Pool
from ..offer.preference import ordinal
from .allocator import Allocator
from .answer import Answer
from .records import LEASE, Record

DEFAULT_TTL_S = 300
MAX_TTL_S = 3600
# A busy host; a kubelet that answers takes milliseconds.
CONFIRM_S = 20.0

log = logging.getLogger(__name__)


class Leases:
    def __init__(
        self,
        allocator: Allocator,
        pool: Pool,
        checkpoint_file: Path,
        registered: Callable[[], bool],
        clock: Clock | None = None,
    ) -> None:
        self._allocator = allocator
        self._pool = pool
        self._checkpoint_file = checkpoint_file
        self._registered = registered
        self._clock = clock or Clock()
        self._one_at_a_time = threading.Lock()

    def restore(self) -> None:
        """After a restart: a lease of this boot is kept withheld, one of another boot or one that is over is ended."""
        for record in self._leases():
            if self._over(record):
                self._allocator.forget(record.id)
            else:
                self._withhold(record.slice_ids)

    def lease(self, uuid: str = "", ttl_s: int = 0) -> Answer:
        """Leases one free slice, of the GPU ``uuid`` where that is given. Raises NoFreeSlice."""
        ttl_s = ttl_s or DEFAULT_TTL_S
        if not 0 < ttl_s <= MAX_TTL_S:
            raise BadRequest(f"a lease of {ttl_s} s is asked for; expected 1 to {MAX_TTL_S}")
        known = [gpu.uuid for gpu in self._pool.gpus]
        if uuid and uuid not in known:
            raise Unknown(f"this node has no GPU {uuid}; it has {', '.join(known) or 'none'}")
        with self._one_at_a_time:
            for slice_id in self._free(uuid):
                self._withhold([slice_id])
                try:
                    if not self._withdrawn(slice_id):
                        continue
                    return self._allocator.grant(
                        [slice_id], LEASE, expires=self._clock.now() + ttl_s, boot_id=self._clock.boot_id()
                    )
                except Taken:
                    self._pool.give_back(slice_id)
                except BaseException:
                    self._pool.give_back(slice_id)
                    raise
        offered = sum(not uuid or one.uuid == uuid for one in self._pool.slices)
        raise NoFreeSlice(
            f"no free slice{' of ' + uuid if uuid else ''}: all {offered} are in use, leased or unhealthy; "
            "see: vgpuctl status"
        )

    def _free(self, uuid: str) -> list[str]:
        """Free and healthy slices; last the ones that the kubelet would take first."""
        used = self.in_use() | self._named()
        free = [
            offer.slice.id
            for offer in self._pool.offers()[1]
            if offer.healthy and offer.slice.id not in used and (not uuid or offer.slice.uuid == uuid)
        ]
        return sorted(free, key=ordinal, reverse=True)

    def in_use(self) -> frozenset[str]:
        """Slices that a container or a lease holds, by our records and by the kubelet's checkpoint."""
        found = checkpoint.read(self._checkpoint_file)
        records = self._allocator.records.all()
        ours = frozenset(one for record in records for one in record.slice_ids)
        # Of a container that was given other slices than the kubelet named, those that it really has.
        other = {record.id for record in records if record.asked}
        kubelet = [
            one
            for entry in (found.entries if found else ())
            if entry.allocation not in other
            for one in entry.slice_ids
        ]
        return ours.union(kubelet)

    def _named(self) -> frozenset[str]:
        """Ids that the kubelet has given out, whatever slices they stand for."""
        found = checkpoint.read(self._checkpoint_file)
        return found.ids_in_use if found else frozenset()

    def _withdrawn(self, slice_id: str) -> bool:
        """Waits until the kubelet no longer offers a slice; False where a pod got it in the meantime.

        Without this the kubelet could hand out the slice in the moment between our mark and its update.
        """
        deadline = time.monotonic() + CONFIRM_S
        while self._registered():
            found = checkpoint.read(self._checkpoint_file)
            if found is not None and not found.advertised(slice_id):
                break
            if time.monotonic() > deadline:
                raise NotNow(
                    f"the kubelet did not withdraw slice {slice_id} within {CONFIRM_S:.0f} s (its checkpoint "
                    f"{self._checkpoint_file} still lists it); try again, or restart the kubelet"
                )
            time.sleep(0.02)
        if slice_id in self.in_use() | self._named():
            self._pool.give_back(slice_id)
            return False
        return True

    def release(self, allocation: str) -> None:
        """Ends a lease; the slice goes back to the kubelet. Raises Unknown."""
        with self._allocator.lock:
            record = self._allocator.records.get(allocation)
            if record is None or record.kind != LEASE:
                held = ", ".join(one.id for one in self._leases()) or "none"
                raise Unknown(f"there is no lease {allocation}; leases now: {held}")
            self._end(record)

    def expire(self) -> None:
        with self._allocator.lock:
            for record in self._leases():
                if self._over(record):
                    log.warning("lease %s was not released in time; it ends now", record.id)
                    self._end(record)

    def seconds_left(self, record: Record) -> int:
        return max(0, int(record.expires - self._clock.now()))

    def _over(self, record: Record) -> bool:
        return record.boot_id != self._clock.boot_id() or self._clock.now() >= record.expires

    def _end(self, record: Record) -> None:
        self._allocator.forget(record.id)
        for slice_id in record.slice_ids:
            self._pool.give_back(slice_id)

    def _withhold(self, ids: tuple[str, ...] | list[str]) -> None:
        for slice_id in ids:
            self._pool.withhold(slice_id, "leased to a check on this host")

    def _leases(self) -> list[Record]:
        return [one for one in self._allocator.records.all() if one.kind == LEASE]
