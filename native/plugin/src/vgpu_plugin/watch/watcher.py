# SPDX-License-Identifier: Apache-2.0
"""The watcher: compares, every two seconds, what the driver says of the processes on each shared GPU with the ledgers
of the containers that they belong to, and names what goes round the library.

Named is what was found in two looks, one after the other: a process that begins or ends between the two accounts is
not. By policy a named process is ended too: of a container of the kubelet or of a static slice, and on what was seen in
the same look; never one of the host's, of a check's lease, or of an allocation that nobody has a record of.
"""

from __future__ import annotations

import functools
import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from .._shared.abi import files as abi_files
from ..allocation.allocation_files import STATIC, AllocationFiles
from ..allocation.records import KUBELET, LEASE
from ..node.gpus import GpuError, GpuSource
from . import rule as watch_rule
from .end import Ender
from .processes import Process, Processes, device_of
from .rule import INTERVAL_S, Account, Suspicion

REPORT, END = "report", "end"
STATIC_KIND, UNKNOWN = "static", "unknown"
# Whose processes may be ended. A lease whose record went before its files is unknown, and no tenant's.
ENDED = frozenset((KUBELET, STATIC_KIND))
# A finding is named in so many looks in a row. Within one, a suspicion is looked at again at once, so often.
LOOKS, TRIES = 2, 3
TRY_S = 0.004
# One line and one event for the same finding within this time; the metrics count every one.
TELL_S = 60.0
MOST_PAST, MOST_PROCESSES = 64, 16

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finding:
    """What was found of one allocation on one GPU, for one reason. Times in seconds of the monotonic clock."""

    allocation: str
    kind: str
    uuid: str
    suspicion: Suspicion
    looks: int
    since: float
    named: float = 0.0
    action: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.allocation, self.uuid, self.suspicion.reason

    def text(self) -> str:
        one, used = self.suspicion.processes[0]
        more = len(self.suspicion.processes) - 1
        who = f"process {one.pid} ({one.name})" + (f" and {more} more" if more else "")
        if self.suspicion.reason == watch_rule.NO_SLOT:
            return (
                f"{who} holds {used >> 20} MiB of {self.uuid} without a live slot in the ledger of allocation "
                f"{self.allocation}: it goes round libvgpu.so"
            )
        accounted = f"{self.suspicion.accounted >> 20} MiB"
        if self.suspicion.limited:
            against = f"for allocation {self.allocation}, its limit is {accounted}"
        else:
            against = f"the ledger of allocation {self.allocation} {accounted}"
        return (
            f"{who}: the driver says {self.suspicion.found >> 20} MiB of {self.uuid}, {against}; up to "
            f"{self.suspicion.tolerated >> 20} MiB more are tolerated"
        )


@dataclass(frozen=True)
class State:
    """What the watcher says of itself. ``fault``: why the last look did not see all; ``totals`` by (reason, kind)."""

    policy: str
    interval_s: float
    looks: int
    fault: str
    findings: tuple[Finding, ...]
    past: tuple[Finding, ...]
    totals: Mapping[tuple[str, str], int]
    ended: Mapping[str, int]


class Watch:
    """``uuids``: the GPUs that are shared by libvgpu now; ``kinds``: allocation → kind of its record; ``pods``:
    uid of a pod → allocations of its containers; ``tell`` is called with each finding to tell, at most once a minute.
    """

    def __init__(
        self,
        source: GpuSource,
        files: AllocationFiles,
        uuids: Callable[[], list[str]],
        kinds: Callable[[], Mapping[str, str]],
        pods: Callable[[], Mapping[str, frozenset[str]]] = dict,
        policy: Callable[[], str] = lambda: REPORT,
        tell: Callable[[Finding], None] = lambda _finding: None,
        processes: Processes | None = None,
        ender: Ender | None = None,
        clock: Callable[[], float] = time.monotonic,
        device: Callable[[Path], str] = device_of,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._source, self._files, self._uuids, self._kinds, self._pods = source, files, uuids, kinds, pods
        self._policy, self._tell, self._clock, self._device = policy, tell, clock, device
        self._interval_s = interval_s
        self._processes = processes or Processes()
        self._ender = ender or Ender(self._processes.process)
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, str, str], Finding] = {}
        self._past: deque[Finding] = deque(maxlen=MOST_PAST)
        self._told: dict[tuple[str, str, str], float] = {}
        self._totals: dict[tuple[str, str], int] = {}
        self._looks = 0
        self._fault = ""

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            try:
                self.look()
            except Exception as fault:
                # A watcher that is gone would say for ever that all is well.
                log.exception("the watcher failed; it looks again in %.0f s", self._interval_s)
                with self._lock:
                    self._fault = f"{type(fault).__name__}: {fault}"

    def state(self) -> State:
        with self._lock:
            named = tuple(one for one in self._seen.values() if one.named)
            totals, ended = dict(self._totals), dict(self._ender.sent)
            return State(
                self._policy(), self._interval_s, self._looks, self._fault, named, tuple(self._past), totals, ended
            )

    def look(self) -> None:
        """One look at every shared GPU."""
        found: dict[tuple[str, str, str], tuple[str, Suspicion]] = {}
        faults = []
        blind = set()
        # Whose each ledger is, is asked where somebody is on a GPU: most looks at an idle node find nobody.
        devices: dict[str, str] | None = None
        kinds = self._kinds()
        for uuid in self._uuids():
            try:
                listed = self._source.processes(uuid)
                if not listed:
                    continue
                if devices is None:
                    devices = self._devices()
                for allocation, suspicion in self._look_at(uuid, listed, devices):
                    kind = STATIC_KIND if allocation.startswith(STATIC) else kinds.get(allocation, UNKNOWN)
                    found[allocation, uuid, suspicion.reason] = kind, suspicion
            except GpuError as fault:
                faults.append(f"{uuid}: {fault}")
                blind.add(uuid)
        self._take(found, blind, "; ".join(faults))

    def _devices(self) -> dict[str, str]:
        """The mount of each allocation's ledger, as /proc names it."""
        out = {}
        for allocation in [*self._files.present(), *self._files.static()]:
            if device := self._device(self._files.folder(allocation) / "rw"):
                out[device] = allocation
        return out

    def _look_at(
        self, uuid: str, listed: Mapping[int, int | None], devices: Mapping[str, str]
    ) -> list[tuple[str, Suspicion]]:
        if not devices:
            return []
        owners = self._processes.of(listed, devices, self._pods)
        out = []
        for allocation in sorted({one for mine in owners.values() for one in mine}):
            pids = [pid for pid, mine in owners.items() if allocation in mine]
            suspicions = self._judge(uuid, allocation, pids, listed)
            for _again in range(TRIES):
                if not suspicions:
                    break
                # What was freed between the two accounts is no theft. Not in step with a program's own rhythm.
                time.sleep(TRY_S * (0.5 + random.random()))
                before = self._account(uuid, allocation)
                again = self._source.processes(uuid)
                reasons = {one.reason for one in suspicions}
                suspicions = [
                    one for one in self._judge(uuid, allocation, pids, again, before) if one.reason in reasons
                ]
            out += [(allocation, one) for one in suspicions]
        return out

    def _judge(
        self,
        uuid: str,
        allocation: str,
        pids: list[int],
        listed: Mapping[int, int | None],
        before: Account | None = None,
    ) -> list[Suspicion]:
        """``before``: the account that was read before ``listed``; what either charges is charged."""
        seen = [
            (process, listed[pid])
            for pid in pids
            if pid in listed and (process := self._processes.process(pid)) is not None
        ]
        account = self._account(uuid, allocation)
        if account is None or not seen:
            return []
        if before is not None:
            keys = {*account.slots, *before.slots}
            most = {key: max(account.slots.get(key, 0), before.slots.get(key, 0)) for key in keys}
            account = replace(account, slots=most, lent=max(account.lent, before.lent))
        return watch_rule.judge(seen, account)

    def _account(self, uuid: str, allocation: str) -> Account | None:
        """The ledger of an allocation, one GPU. None: nothing is held against anybody there, for it is unlimited, may
        do without the library, or is not there (any more).
        """
        folder = self._files.folder(allocation)
        try:
            limits = abi_files.parse_limits((folder / "limits").read_bytes())
        except (OSError, abi_files.LayoutError):
            return None
        mine = next((one for one in limits["devices"] if one["uuid"] == uuid), None)
        if mine is None or mine["unlimited"] or limits["allow_disable_control"]:
            return None
        try:
            ledger = abi_files.read_ledger(str(folder / "rw" / "ledger"))
        except FileNotFoundError:
            return None
        except (OSError, abi_files.LayoutError):
            # Spoilt by the tenant, who alone writes it while the container runs: nobody in it is charged.
            return Account({}, mine["memory_bytes"], limits["count_context"])
        if uuid not in ledger["devices"]:
            return Account({}, mine["memory_bytes"], limits["count_context"])
        at = ledger["devices"].index(uuid)
        slots: dict[tuple[int, int], int] = {}
        for slot in ledger["slots"]:
            key = slot["pid_namespace"], slot["pid"]
            slots[key] = slots.get(key, 0) + slot["used"][at] + slot["context"][at]
        return Account(slots, mine["memory_bytes"], limits["count_context"], ledger["exported"][at])

    def _take(self, found: Mapping[tuple[str, str, str], tuple[str, Suspicion]], blind: set[str], fault: str) -> None:
        """Counts looks in a row, names, tells, ends. A GPU that was not seen stays as it was."""
        now = self._clock()
        fresh = []
        with self._lock:
            self._looks += 1
            self._fault = fault
            seen = {key: one for key, one in self._seen.items() if one.uuid in blind}
            for key, (kind, suspicion) in found.items():
                before = self._seen.get(key)
                looks, since, named = (before.looks + 1, before.since, before.named) if before else (1, now, 0.0)
                processes = suspicion.processes[:MOST_PROCESSES]
                one = Finding(key[0], kind, key[1], replace(suspicion, processes=processes), looks, since, named)
                if looks >= LOOKS and not named:
                    one = replace(one, named=now)
                    self._totals[one.suspicion.reason, kind] = self._totals.get((one.suspicion.reason, kind), 0) + 1
                    fresh.append(one)
                seen[key] = replace(one, action=before.action if before else "")
            self._past.extend(one for key, one in self._seen.items() if one.named and key not in seen)
            self._seen = seen
            self._told = {key: then for key, then in self._told.items() if now - then < TELL_S}
        for one in fresh:
            if one.key not in self._told:
                self._told[one.key] = now
                (log.info if one.kind == LEASE else log.warning)("watcher: %s", one.text())
                self._tell(one)
        if self._policy() == END:
            self._end(now, found)
        else:
            self._ender.forget()

    def _end(self, now: float, found: Iterable[tuple[str, str, str]]) -> None:
        """The worst process of each finding of this look is told to end, then made to. What is kept of a GPU that was
        not seen may be over, so nobody is ended for it.
        """
        for key in found:
            one = self._seen[key]
            if not one.named or one.kind not in ENDED:
                continue
            # Memory of a container as a whole: the process that is furthest beyond its charge answers for it.
            wanted = (
                one.suspicion.processes if one.suspicion.reason == watch_rule.NO_SLOT else one.suspicion.processes[:1]
            )
            for process, _used in wanted:
                sent = self._ender.end(process, now, functools.partial(self._still, finding=one))
                if sent:
                    log.warning("watcher: sent %s to process %d (%s): %s", sent, process.pid, process.name, one.text())
                    with self._lock:
                        self._seen[key] = replace(self._seen[key], action=sent)

    def _still(self, process: Process, finding: Finding) -> bool:
        """Whether a process is still in that container, asked once its number can mean no other."""
        devices = self._devices()
        owners = self._processes.of([process.pid], devices, self._pods)
        return finding.allocation in owners.get(process.pid, frozenset())


def host_is_seen(proc: Path = Path("/proc")) -> str:
    """Why processes of containers cannot be seen from here; empty where they can."""
    try:
        if os.environ.get("KUBERNETES_SERVICE_HOST") and os.readlink(proc / "1/ns/mnt") == os.readlink(
            proc / "self/ns/mnt"
        ):
            return "this program sees its own pod's processes alone; its DaemonSet needs hostPID: true"
    except OSError as fault:
        return f"{proc}/1 cannot be read: {fault.strerror}"
    return ""
