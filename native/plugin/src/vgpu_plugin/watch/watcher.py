# SPDX-License-Identifier: Apache-2.0
"""The watcher. It finds processes that use a GPU beyond the limits of their container because they bypass our library.
Every two seconds it reads from the driver which processes use each shared GPU. It compares their usage with the limits
in the node's records, and with the containers' ledgers, the files in which our library counts GPU memory.

A finding is reported after two polls in a row, so a process that starts or ends between two readings is not reported.
If the policy says so, a reported process is killed, but only for what the same poll found, and only in a container of
the kubelet, docker or podman. A process of the host, of a slice that a check leased, or of an allocation without a
record is never killed.
"""

from __future__ import annotations

import functools
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from ..allocation.allocation_files import AllocationFiles
from ..allocation.records import CLAIM, CONTAINER, KUBELET, LEASE, Record
from ..node.gpus import GpuError, GpuSource
from . import rule
from .accounts import Accounts
from .accounts import device_of as limits_on
from .container_mounts import ContainerMounts
from .container_shares import ContainerShares
from .end import Ender
from .finding import NONE, STATIC_KIND, UNKNOWN, Finding, OldMounts, Programs, State
from .processes import Placed, Process, Processes, device_of, host_is_seen
from .rule import INTERVAL_S, Account, Suspicion

REPORT, END = "report", "end"
# Kinds of allocations whose processes may be killed. The kind "unknown" (an allocation without a record) is not among
# them, because it may be a lease (slices that an administrator took with vgpuctl) whose record was deleted before its
# files. The processes of a lease are not a tenant's, so they are never killed.
ENDED = frozenset((KUBELET, CLAIM, CONTAINER, STATIC_KIND))
# A finding is reported after LOOKS polls in a row. Within one poll, a suspicion is checked again at once up to TRIES
# times.
LOOKS, TRIES = 2, 3
TRY_S = 0.004
# Minimum seconds between two reports of the same finding in log and events. The metrics count every finding.
TELL_S = 60.0
MOST_PAST, MOST_PROCESSES = 64, 16
# Beginning of the name of NVIDIA's MPS server. The server runs on the host, but the memory that it holds belongs to its
# clients, so it is not reported as a host program.
MPS_SERVER = "nvidia-cuda-mps"
REMOVED = (
    "the container of allocation {} has files that were removed from the node: its limit is compared only with the "
    "driver's data; start it again"
)

log = logging.getLogger(__name__)
# (allocation, UUID, reason) → (kind of the allocation, what this poll found).
Found = dict[tuple[str, str, str], tuple[str, Suspicion]]


class NodeView(Protocol):
    """The node's data that the watcher reads at each poll."""

    def uuids(self) -> list[str]:
        """Returns the UUIDs of the GPUs that libvgpu shares now."""

    def records(self) -> Mapping[str, Record]:
        """Returns the node's record of each allocation."""

    def library(self) -> str:
        """Returns the folder of the library version for new containers; empty if there is none."""

    def pods(self) -> Mapping[str, frozenset[str]]:
        """Returns uid of a pod → allocations of its containers."""

    def policy(self) -> str:
        """Returns what happens to processes beyond their limits: REPORT or END."""


@dataclass(frozen=True)
class Kernel:
    """Interfaces to the kernel. ``ender`` kills processes; if it is None, the watcher creates an Ender for
    ``processes``. ``device`` returns major:minor of a folder's mount. ``wall`` returns seconds since 1970,
    ``arbiter_ns`` the time on the clock of the arbiter (the node's program that divides GPU time).
    """

    processes: Processes = field(default_factory=Processes)
    ender: Ender | None = None
    clock: Callable[[], float] = time.monotonic
    device: Callable[[Path], str] = device_of
    wall: Callable[[], float] = time.time
    arbiter_ns: Callable[[], int] = time.monotonic_ns


@dataclass
class Look:
    """The data of one poll. ``shown``: (allocation, UUID) → bytes that the driver reports; ``unplaced``,
    ``unaccounted`` and ``host`` are as in finding.State; ``gone``: UUID → pids that had ended.
    """

    found: Found = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    # UUIDs of the GPUs whose processes the driver did not report in this poll.
    blind: set[str] = field(default_factory=set)
    # Allocation with processes on a GPU → its record.
    records: dict[str, Record] = field(default_factory=dict)
    shown: dict[tuple[str, str], int] = field(default_factory=dict)
    programs: dict[tuple[str, str], Programs] = field(default_factory=dict)
    unplaced: dict[str, int] = field(default_factory=dict)
    unaccounted: dict[str, int] = field(default_factory=dict)
    host: dict[str, Programs] = field(default_factory=dict)
    # Allocations whose container still uses files that were removed on the node.
    removed: set[str] = field(default_factory=set)
    gone: dict[str, set[int]] = field(default_factory=dict)

    def add(self, allocation: str, kind: str, uuid: str, suspicions: list[Suspicion]) -> None:
        for one in suspicions:
            self.found[allocation, uuid, one.reason] = kind, one


class Watch:
    """Polls the GPUs. ``tell`` is called with each finding to report, at most once a minute for the same one."""

    def __init__(
        self,
        source: GpuSource,
        files: AllocationFiles,
        node: NodeView,
        tell: Callable[[Finding], None] = lambda _finding: None,
        kernel: Kernel | None = None,
        interval_s: float = INTERVAL_S,
    ) -> None:
        kernel = kernel or Kernel()
        self._source, self._files, self._node, self._tell = source, files, node, tell
        self._clock, self._device = kernel.clock, kernel.device
        self._interval_s = interval_s
        self._processes = kernel.processes
        self._ender = kernel.ender or Ender(self._processes.process)
        self._accounts = Accounts(files, node.library)
        self._mounts = ContainerMounts(files, self._processes)
        self._shares = ContainerShares(source, self._accounts, kernel.clock, kernel.wall, kernel.arbiter_ns)
        # Allocation → all allocations of the same container, for the GPU that is polled now.
        self._together: dict[str, frozenset[str]] = {}
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, str, str], Finding] = {}
        self._past: deque[Finding] = deque(maxlen=MOST_PAST)
        self._reported: dict[tuple[str, str, str], float] = {}
        self._totals: dict[tuple[str, str], int] = {}
        self._looks = 0
        self._fault = ""
        self._last = Look()
        # Allocation whose container has the mounts of an older version → its entry for the report.
        self._old: dict[str, OldMounts] = {}

    def stop(self) -> None:
        self._stopping.set()

    def alive(self) -> frozenset[str]:
        """Returns the allocations that had processes on a GPU at the last poll."""
        with self._lock:
            return frozenset(allocation for allocation, _uuid in self._last.shown)

    def stale(self) -> frozenset[str]:
        """Returns the allocations whose processes used files that were removed on the node, at the last poll. The files
        that are at these paths now say nothing about such processes.
        """
        with self._lock:
            return frozenset(self._last.removed)

    def run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            try:
                self.look()
            except Exception as fault:
                # The thread must not end, because the watcher would then report its last state for ever.
                log.exception("the watcher failed; it tries again in %.0f s", self._interval_s)
                with self._lock:
                    self._fault = f"{type(fault).__name__}: {fault}"

    def state(self) -> State:
        with self._lock:
            return State(
                policy=self._node.policy(),
                interval_s=self._interval_s,
                looks=self._looks,
                fault=self._fault,
                findings=tuple(one for one in self._seen.values() if one.named),
                past=tuple(self._past),
                totals=dict(self._totals),
                ended=dict(self._ender.sent),
                old_mounts=tuple(self._old.values()),
                unplaced=dict(self._last.unplaced),
                shown=dict(self._last.shown),
                unaccounted=dict(self._last.unaccounted),
                host=dict(self._last.host),
                programs=dict(self._last.programs),
            )

    def surely_holds(self, record: Record, uuid: str) -> int:
        """Returns the bytes that an allocation certainly holds: those that the driver reported at the last poll, minus
        the tolerance.
        """
        with self._lock:
            shown = self._last.shown.get((record.id, uuid), 0)
            seen = self._last.programs.get((record.id, uuid), ())
        counted = bool(record.limits.get("count_context", True))
        return max(0, shown - sum(rule.tolerance(used, counted) for _process, used in seen))

    def look(self) -> None:
        """Polls every shared GPU once."""
        look = Look()
        # The ledgers' mounts are read only if a process is on a GPU, because most polls of an idle node find no
        # process.
        devices: dict[str, str] | None = None
        records = self._node.records()
        for uuid in self._node.uuids():
            try:
                listed = self._source.processes(uuid)
                if not listed:
                    self._shares.forget(uuid)
                    look.unplaced[uuid] = look.unaccounted[uuid] = 0
                    look.host[uuid] = ()
                    continue
                if devices is None:
                    devices = self._devices()
                    self._mounts.begin_look()
                self._look_at(look, uuid, listed, devices, records)
            except GpuError as fault:
                self._shares.forget(uuid)
                look.faults.append(f"{uuid}: {fault}")
                look.blind.add(uuid)
        if devices is not None:
            self._mounts.end_look()
            self._processes.end_look()
        self._take(look, records)

    def _devices(self) -> dict[str, str]:
        """Returns major:minor of the mount that holds each allocation's ledger → allocation."""
        out = {}
        for allocation in [*self._files.present(), *self._files.static()]:
            if device := self._device(self._files.folder(allocation) / "rw"):
                out[device] = allocation
        return out

    def _look_at(
        self,
        look: Look,
        uuid: str,
        listed: Mapping[int, int | None],
        devices: Mapping[str, str],
        records: Mapping[str, Record],
    ) -> None:
        placed = self._processes.place(listed, devices, self._node.pods)
        self._together = rule.together(placed.owners)
        look.removed |= placed.removed
        look.unaccounted[uuid] = 0
        for allocation in sorted({one for mine in placed.owners.values() for one in mine}):
            record = look.records.get(allocation) or self._accounts.record(allocation, records)
            if record is None:
                continue
            look.records[allocation] = record
            pids = [pid for pid, mine in placed.owners.items() if allocation in mine]
            look.shown[allocation, uuid] = sum(listed[pid] or 0 for pid in pids)
            if record.kind == UNKNOWN:
                look.unaccounted[uuid] += look.shown[allocation, uuid]
            if allocation in look.removed:
                look.faults.append(REMOVED.format(allocation))
                look.add(allocation, record.kind, uuid, self._by_limit(uuid, record, pids, listed))
                continue
            look.add(allocation, record.kind, uuid, self._memory(uuid, record, pids, listed))
            seen = self._seen_of(allocation, placed, listed)
            look.programs[allocation, uuid] = tuple(sorted(seen, key=lambda one: -one[1]))[:MOST_PROCESSES]
            claims = [one for one in records.values() if one.claim] if record.claim else []
            foreign, old = self._mounts.judge(record, [one for one, _used in seen], claims)
            look.add(allocation, record.kind, uuid, foreign)
            if old:
                self._old[allocation] = OldMounts(allocation, record.kind)
            elif old is not None:
                self._old.pop(allocation, None)
        hosts = [one for one in self._programs(placed.host, listed) if not one[0].name.startswith(MPS_SERVER)]
        look.host[uuid] = tuple(sorted(hosts, key=lambda one: -one[1]))
        self._nobodys(look, uuid, placed, listed)
        for allocation, took in self._shares.look(uuid, placed.owners, look.records).items():
            if took.too_much:
                more = Suspicion(rule.MORE_TIME, self._seen_of(allocation, placed, listed), detail=took.text())
                look.add(allocation, look.records[allocation].kind, uuid, [more] if more.processes else [])

    def _seen_of(
        self, allocation: str, placed: Placed, listed: Mapping[int, int | None]
    ) -> tuple[tuple[Process, int], ...]:
        """Returns the live processes of a container, with the bytes that each uses."""
        return self._programs([pid for pid, mine in placed.owners.items() if allocation in mine], listed)

    def _programs(self, pids: Iterable[int], listed: Mapping[int, int | None]) -> Programs:
        return tuple((one, listed[pid] or 0) for pid in pids if (one := self._processes.process(pid)) is not None)

    def _nobodys(self, look: Look, uuid: str, placed: Placed, listed: Mapping[int, int | None]) -> None:
        """Finds processes on a GPU that belong to no known container. A process that has just ended may look the same
        in one poll, so an ended process is reported only if two polls in a row find it on the GPU.
        """
        look.gone[uuid] = placed.gone
        pids = sorted(placed.strangers | (placed.gone & self._last.gone.get(uuid, set())))
        if pids and host_is_seen(self._processes.proc):
            # This program cannot see the host's processes, so it cannot know their containers. It reports that as a
            # fault.
            pids = []
        look.unplaced[uuid] = len(pids)
        look.unaccounted[uuid] += sum(listed[pid] or 0 for pid in pids)
        if not pids:
            return
        seen = [(self._processes.process(pid) or Process(pid, 0, "?", (0, 0)), listed[pid] or 0) for pid in pids]
        group = self._processes.group(pids[0])
        detail = f"its control group is {group}" if group else "it has no control group of its own, or has ended"
        look.add(NONE, UNKNOWN, uuid, [Suspicion(rule.UNPLACED, tuple(seen), detail=detail)])

    def _by_limit(
        self, uuid: str, record: Record, pids: list[int], listed: Mapping[int, int | None]
    ) -> list[Suspicion]:
        """Compares the usage only with the limit, because the container does not use the ledger that is on the node
        now.
        """
        return [one for one in self._judge(uuid, record, pids, listed) if one.limited]

    def _memory(self, uuid: str, record: Record, pids: list[int], listed: Mapping[int, int | None]) -> list[Suspicion]:
        suspicions = self._judge(uuid, record, pids, listed)
        for _again in range(TRIES):
            if not suspicions:
                break
            # Check again, because memory may have been freed between the reading from the driver and that from the
            # ledger. The pause is random, so that a program that allocates and frees regularly is not met at the same
            # point each time.
            time.sleep(TRY_S * (0.5 + random.random()))
            before = self._account(record, uuid)
            again = self._source.processes(uuid)
            reasons = {one.reason for one in suspicions}
            suspicions = [one for one in self._judge(uuid, record, pids, again, before) if one.reason in reasons]
        return suspicions

    def _judge(
        self,
        uuid: str,
        record: Record,
        pids: list[int],
        listed: Mapping[int, int | None],
        before: Account | None = None,
    ) -> list[Suspicion]:
        """Returns the suspicions about a container. ``before``: the container's counted memory, read before the
        driver's list ``listed``. For each process the larger of the two readings of the ledger counts.
        """
        seen = [
            (process, listed[pid])
            for pid in pids
            if pid in listed and (process := self._processes.process(pid)) is not None
        ]
        account = self._account(record, uuid)
        if account is None or not seen:
            return []
        if before is not None:
            keys = {*account.slots, *before.slots}
            most = {key: max(account.slots.get(key, 0), before.slots.get(key, 0)) for key in keys}
            account = replace(account, slots=most, exported=max(account.exported, before.exported))
        return rule.judge(seen, account)

    def _account(self, record: Record, uuid: str) -> Account | None:
        """Returns the sum of limits and usage over all allocations that the container has on the GPU; None if one of
        the allocations sets no limit.
        """
        mine = self._accounts.account(record, uuid)
        accounts = [mine]
        for one in sorted(self._together.get(record.id, frozenset()) - {record.id}):
            other = self._accounts.record(one, self._node.records())
            if other is not None and limits_on(other, uuid) is not None:
                accounts.append(self._accounts.account(other, uuid))
        known = [one for one in accounts if one is not None]
        return None if len(known) < len(accounts) else known[0] if len(known) == 1 else rule.sum_of(known)

    def _take(self, look: Look, records: Mapping[str, Record]) -> None:
        """Counts in how many polls in a row each suspicion was found, reports findings and kills processes. For a GPU
        that did not respond, the findings of the last poll stay.
        """
        now = self._clock()
        fresh = []
        with self._lock:
            self._looks += 1
            self._fault = "; ".join(look.faults)
            for uuid in look.blind:
                look.unplaced[uuid] = self._last.unplaced.get(uuid, 0)
                look.unaccounted[uuid] = self._last.unaccounted.get(uuid, 0)
                look.host[uuid] = self._last.host.get(uuid, ())
                look.shown.update({key: used for key, used in self._last.shown.items() if key[1] == uuid})
                look.programs.update({key: one for key, one in self._last.programs.items() if key[1] == uuid})
            self._last = look
            present = {*records, *self._files.static()} if self._old else set()
            self._old = {allocation: one for allocation, one in self._old.items() if allocation in present}
            seen = {key: one for key, one in self._seen.items() if one.uuid in look.blind}
            for key, (kind, suspicion) in look.found.items():
                before = self._seen.get(key)
                processes = suspicion.processes[:MOST_PROCESSES]
                if before is None:
                    before = Finding(key[0], kind, key[1], suspicion, 0, now)
                shown = replace(suspicion, processes=processes)
                one = replace(before, kind=kind, suspicion=shown, looks=before.looks + 1)
                if one.looks >= LOOKS and not one.named:
                    one = replace(one, named=now)
                    self._totals[one.suspicion.reason, kind] = self._totals.get((one.suspicion.reason, kind), 0) + 1
                    fresh.append(one)
                seen[key] = one
            over = [one for key, one in self._seen.items() if one.named and key not in seen]
            self._past.extend(replace(one, over=now) for one in over)
            self._seen = seen
            self._reported = {key: then for key, then in self._reported.items() if now - then < TELL_S}
        for one in fresh:
            if one.key not in self._reported:
                self._reported[one.key] = now
                (log.info if one.kind == LEASE else log.warning)("watcher: %s", one.text())
                self._tell(one)
        if self._node.policy() == END:
            self._end(now, look)
        else:
            self._ender.forget()

    def _end(self, now: float, look: Look) -> None:
        """Kills the processes of this poll's findings: they get SIGTERM, then SIGKILL. A process that the container
        starts in place of a killed one gets no grace period of its own. A finding about a GPU that did not respond may
        be outdated, so no process is killed for it.
        """
        for key, (_kind, suspicion) in look.found.items():
            one = self._seen[key]
            if not one.named or one.kind not in ENDED:
                continue
            counted = bool(look.records[one.allocation].limits.get("count_context", True))
            for process in rule.to_end(suspicion, counted):
                sent = self._ender.end(process, now, functools.partial(self._still, finding=one), one.ending)
                if sent:
                    log.warning("watcher: sent %s to process %d (%s): %s", sent, process.pid, process.name, one.text())
                    one = replace(one, action=sent, ending=now if one.ending is None else one.ending)
            with self._lock:
                self._seen[key] = one

    def _still(self, process: Process, finding: Finding) -> bool:
        """Returns whether the process is still in the finding's container. Called while the pid cannot be reused."""
        devices = self._devices()
        owners = self._processes.of([process.pid], devices, self._node.pods)
        return finding.allocation in owners.get(process.pid, frozenset())
