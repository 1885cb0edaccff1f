# SPDX-License-Identifier: Apache-2.0
"""Leases: free slices (parts of GPUs) that are withheld from the kubelet and given to a check (such as the isolation
check), a program or a container on this host.

A lease ends after a fixed time, at most an hour, so that a killed check does not keep its slice for ever. A lease for a
docker or podman container lasts as long as the container exists, running or not, also over reboots: once the engine has
listed the container, the lease has no time limit, and it ends when the engine no longer lists the container.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import BadRequest, NoFreeSlice, NotNow, PluginError, Taken, Unknown, counted
from ..node import checkpoint
from ..node.clock import Clock
from ..offer.pool import Pool
from ..offer.preference import ordinal
from .allocator import Allocator
from .answer import Answer
from .engine_lists import ENGINES, EngineLists
from .limit_devices import AtMost
from .records import CONTAINER, LEASE, LEASES, Record
from .sizing import MIB, Bounds

DEFAULT_TTL_S = 300
MAX_TTL_S = 3600
# Maximum wait until the kubelet has withdrawn a slice. A kubelet that responds takes milliseconds, and this time is
# enough for a busy host.
CONFIRM_S = 20.0
# A lease ends after this number of polls in a row in which its engine did not list the container.
LOOKS = 2

log = logging.getLogger(__name__)

ALL = AtMost()


@dataclass(frozen=True)
class Terms:
    """The request for a lease: who wants it, and which size. ``engine`` is docker or podman if one of them runs the
    container. ``by_cdi`` is true if the container gets its GPU by CDI.
    """

    kind: str = LEASE
    holder: str = ""
    engine: str = ""
    gpus: int = 1
    at_most: AtMost = ALL
    by_cdi: bool = False

    def refuse_bad(self, of_one_gpu: bool) -> None:
        """Raises BadRequest if the terms contradict each other or a number is out of range."""
        if self.kind not in LEASES or (self.kind == CONTAINER) != (self.engine in ENGINES):
            raise BadRequest(
                f'a lease of kind "{self.kind}" and engine "{self.engine}"; expected one of {", ".join(LEASES)}, and '
                f"{' or '.join(ENGINES)} only for {CONTAINER}"
            )
        if self.gpus < 1 or (of_one_gpu and self.gpus > 1):
            raise BadRequest(f"slices of {self.gpus} GPUs are requested; expected 1 or more, and 1 if a GPU is named")
        if self.at_most.memory_bytes < 0 or not 0 <= self.at_most.sm_percent <= 100:
            raise BadRequest(f"{self.at_most} is requested; expected bytes, and percent from 1 to 100")


class Leases:
    def __init__(
        self,
        allocator: Allocator,
        pool: Pool,
        checkpoint_file: Path,
        registered: Callable[[], bool],
        clock: Clock | None = None,
        engines: EngineLists | None = None,
    ) -> None:
        self._allocator = allocator
        self._pool = pool
        self._checkpoint_file = checkpoint_file
        self._registered = registered
        self._clock = clock or Clock()
        self._engines = engines or EngineLists()
        self._one_at_a_time = threading.Lock()
        # Lease → number of polls in a row in which docker or podman did not list its container.
        self._missing: dict[str, int] = {}

    def restore(self) -> None:
        """Withholds the slices of valid leases from the kubelet again, and ends the other leases. A lease is valid
        until it expires or the host reboots. The lease of a container that an engine has listed stays valid, and its
        files are created again after a reboot. Called after a restart of the plugin.
        """
        for record in self._leases():
            if self._over(record):
                self._allocator.forget(record.id)
            else:
                self._withhold(record.slice_ids)
                if record.engine and record.boot_id != self._clock.boot_id():
                    self._begin_again(record)

    def _begin_again(self, record: Record) -> None:
        """Creates the files of a container's lease again after a reboot. /run is empty then, and the engine may start
        the container at any time.
        """
        try:
            if record.limits:
                self._allocator.make_again(record)
            self._allocator.records.put(replace(record, boot_id=self._clock.boot_id()))
        except PluginError as fault:
            log.error("the container of lease %s cannot start: %s", record.id, fault)

    def lease(self, uuid: str = "", ttl_s: int = 0, terms: Terms | None = None) -> Answer:
        """Leases free slices on different GPUs, or one slice of the GPU ``uuid``. Raises NoFreeSlice if there are too
        few.
        """
        ttl_s, terms = ttl_s or DEFAULT_TTL_S, terms or Terms()
        if not 0 < ttl_s <= MAX_TTL_S:
            raise BadRequest(f"a lease of {ttl_s} s is requested; expected 1 to {MAX_TTL_S}")
        known = [gpu.uuid for gpu in self._pool.gpus]
        if uuid and uuid not in known:
            raise Unknown(f"this node has no GPU {uuid}; it has {', '.join(known) or 'none'}")
        terms.refuse_bad(bool(uuid))
        if terms.kind != LEASE and not terms.by_cdi:
            what = "this container" if terms.kind == CONTAINER else "a program outside containers"
            self._allocator.enforcement.refuse_without_hook(what)
        with self._one_at_a_time:
            chosen: list[str] = []
            try:
                for slice_id in self._free(uuid, terms.at_most):
                    if any(self._gpu_of(slice_id) == self._gpu_of(one) for one in chosen):
                        continue
                    self._withhold([slice_id])
                    chosen.append(slice_id)
                    if not self._withdrawn(slice_id):
                        chosen.remove(slice_id)
                    if len(chosen) < terms.gpus:
                        continue
                    try:
                        return self._grant(chosen, ttl_s, terms)
                    except Taken:
                        self._give_back(chosen)
                        chosen = []
            except BaseException:
                self._give_back(chosen)
                raise
            self._give_back(chosen)
        raise NoFreeSlice(self._why_none(uuid, terms))

    def _grant(self, ids: list[str], ttl_s: int, terms: Terms) -> Answer:
        expires, boot_id = self._clock.now() + ttl_s, self._clock.boot_id()
        whose = {"holder": terms.holder, "engine": terms.engine}
        # A lease has no promised memory, so no process of another container is killed to make room for it. Only free
        # burst memory (memory above the promises of other containers) is taken back.
        lender, waits = self._allocator.sizer.lender, Record(ids[0], terms.kind, tuple(ids))
        lender.give_back(waits, self._sizes(ids, terms.at_most), promised=False)
        try:
            return self._allocator.grant(ids, terms.kind, terms.at_most, expires=expires, boot_id=boot_id, **whose)
        finally:
            lender.done(waits.id)

    def _sizes(self, ids: Iterable[str], at_most: AtMost) -> dict[str, Bounds]:
        """Returns GPU UUID → the memory that a lease of these slices gets."""
        out = {}
        for piece in filter(None, map(self._pool.piece, ids)):
            mib = min(piece.memory_mib, -(-at_most.memory_bytes // MIB) or piece.memory_mib)
            out[piece.uuid] = Bounds(mib, mib)
        return out

    def _gpu_of(self, slice_id: str) -> str:
        piece = self._pool.piece(slice_id)
        return piece.uuid if piece is not None else slice_id

    def _give_back(self, ids: Iterable[str]) -> None:
        for slice_id in ids:
            self._pool.give_back(slice_id)

    def _why_none(self, uuid: str, terms: Terms) -> str:
        offered = [one for one in self._pool.slices if not uuid or one.uuid == uuid]
        if offered and not any(terms.at_most.fits(one) for one in offered):
            most = max(offered, key=lambda one: one.memory_mib)
            return (
                f"no slice{' of ' + uuid if uuid else ''} is large enough: the largest has {most.memory_mib} MiB and "
                f"{most.sm_percent} % of the SMs; request less, or let fewer containers share a GPU (vgpu_split_count)"
            )
        text = (
            f"no free slice{' of ' + uuid if uuid else ''}: found {counted(len(offered), 'slice')}, each in use, "
            "leased or unhealthy"
        )
        if terms.gpus > 1:
            count = len(self._pool.gpus)
            text = f"{terms.gpus} GPUs with a free slice are requested; too few of this node's {count} have one"
        return f"{text}; see: vgpuctl status"

    def _free(self, uuid: str, at_most: AtMost) -> list[str]:
        """Returns free, healthy slices that are large enough, in the order in which they should be leased. The slices
        that the kubelet would take first come last, so a lease and the kubelet seldom choose the same slice.
        """
        used = self.in_use() | self._named()
        free = [
            offer.slice.id
            for offer in self._pool.offers()[1]
            if offer.healthy and offer.slice.id not in used and (not uuid or offer.slice.uuid == uuid)
            if at_most.fits(offer.slice)
        ]
        return sorted(free, key=ordinal, reverse=True)

    def in_use(self) -> frozenset[str]:
        """Returns the slices that containers or leases hold, according to the plugin's records and to the kubelet's
        checkpoint.
        """
        found = checkpoint.read(self._checkpoint_file)
        records = self._allocator.records.all()
        ours = frozenset(one for record in records for one in record.slice_ids)
        # Some containers hold other slices than the kubelet named. Their entries in the checkpoint are ignored, because
        # the records name the real slices.
        other = {record.id for record in records if record.asked}
        kubelet = [
            one
            for entry in (found.entries if found else ())
            if entry.allocation not in other
            for one in entry.slice_ids
        ]
        return ours.union(kubelet)

    def _named(self) -> frozenset[str]:
        """Returns the slice ids that the kubelet has allocated, according to its checkpoint. The containers may hold
        other slices (substitution.py).
        """
        found = checkpoint.read(self._checkpoint_file)
        return found.ids_in_use if found else frozenset()

    def _withdrawn(self, slice_id: str) -> bool:
        """Waits until the kubelet no longer offers a slice to pods. Returns False if a pod got the slice in the
        meantime.

        Without this wait the kubelet could allocate the slice before it learns that the slice is withheld.
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
        """Ends a lease and offers its slices to the kubelet again. Raises Unknown."""
        with self._allocator.lock:
            record = self._allocator.records.get(allocation)
            if record is None or record.kind not in LEASES:
                held = ", ".join(one.id for one in self._leases()) or "none"
                raise Unknown(f"there is no lease {allocation}; leases now: {held}")
            self._end(record)

    def follow(self) -> None:
        """Asks docker and podman once which containers with a lease exist, and ends the leases whose container is gone.
        The engines are slow, so the lock is not held while they are asked.
        """
        before = [one for one in self._leases() if one.engine]
        seen = self._engines.leases(one.engine for one in before)
        with self._allocator.lock:
            for record in before:
                if record.engine not in seen or self._allocator.records.get(record.id) != record:
                    continue
                if record.id in seen[record.engine]:
                    self._missing.pop(record.id, None)
                    now = replace(record, expires=0.0, holder=f"{record.engine} {seen[record.engine][record.id]}")
                    if now != record:
                        self._allocator.records.put(now)
                elif not record.expires:
                    # One poll without the container is not enough, because docker compose removes a container before it
                    # creates its replacement.
                    self._missing[record.id] = self._missing.get(record.id, 0) + 1
                    if self._missing[record.id] >= LOOKS:
                        log.info("lease %s ends, because %s no longer has its container", record.id, record.engine)
                        self._end(record)

    def expire(self) -> None:
        with self._allocator.lock:
            for record in self._leases():
                if self._over(record):
                    log.warning("lease %s ends now, because its time is over", record.id)
                    self._end(record)

    def seconds_left(self, record: Record) -> int:
        return max(0, int(record.expires - self._clock.now()))

    def _over(self, record: Record) -> bool:
        if record.engine and not record.expires:
            return False  # The engine has listed its container, so the lease has no time limit.
        return record.boot_id != self._clock.boot_id() or self._clock.now() >= record.expires

    def _end(self, record: Record) -> None:
        self._missing.pop(record.id, None)
        self._allocator.forget(record.id)
        self._give_back(record.slice_ids)

    def _withhold(self, ids: tuple[str, ...] | list[str]) -> None:
        for slice_id in ids:
            self._pool.withhold(slice_id, "leased on this host")

    def _leases(self) -> list[Record]:
        return [one for one in self._allocator.records.all() if one.kind in LEASES]
