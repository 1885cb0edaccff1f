# SPDX-License-Identifier: Apache-2.0
"""Connects the watcher to this node: gives it the data of the node, writes its findings as events on pods, and builds
the response for vgpuctl.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .._proto import admin_pb2 as api
from ..allocation.records import KUBELET, LEASE, Record, RecordStore
from ..errors import PluginError
from ..node import checkpoint, podresources
from ..node.podresources import Holder
from ..offer.pool import Pool
from . import watcher as watch
from .finding import UNKNOWN, Finding, OldMounts, Programs, State
from .processes import host_is_seen
from .usage import NOBODY

if TYPE_CHECKING:
    from ..allocation.pod_sizes import PodSizes

EVENT = "VgpuWatch"
# Maximum number of events that wait for a slow API server. Further findings get no event; they appear only in log and
# metrics.
MOST_WAITING = 8
# Maximum number of host programs that a message names.
MOST_NAMED = 3

log = logging.getLogger(__name__)


class NodeView:
    """The data of the node that the watcher reads, as watcher.NodeView declares them."""

    def __init__(
        self,
        pool: Pool,
        records: RecordStore,
        checkpoint_file: Path,
        policy: Callable[[], str],
        library: Callable[[], Path] = Path,
    ) -> None:
        """``library`` returns the folder of the active library version, and raises PluginError if there is none."""
        self._pool = pool
        self._records = records
        self._checkpoint_file = checkpoint_file
        self._library = library
        self.policy = policy

    def uuids(self) -> list[str]:
        # The health checks report a lost GPU (one that the driver no longer finds), and it has no processes, so it is
        # left out here.
        return [one for one in self._pool.shape().limited if not self._pool.is_lost(one)]

    def records(self) -> Mapping[str, Record]:
        return {record.id: record for record in self._records.all()}

    def library(self) -> str:
        try:
            found = self._library()
        except PluginError:
            return ""
        return str(found) if found.name else ""

    def pods(self) -> Mapping[str, frozenset[str]]:
        found = checkpoint.read(self._checkpoint_file)
        out: dict[str, frozenset[str]] = {}
        for entry in found.entries if found else ():
            if entry.allocation:
                out[entry.pod_uid] = out.get(entry.pod_uid, frozenset()) | {entry.allocation}
        return out


class Teller:
    """Writes events on pods if an API server is configured. Another thread sends them, so that the watcher does not
    wait.
    """

    def __init__(self, records: RecordStore, pods: PodSizes | None) -> None:
        self._records = records
        self._pods = pods
        self._waiting = threading.BoundedSemaphore(MOST_WAITING)

    def tell(self, finding: Finding) -> None:
        if finding.kind != KUBELET or self._pods is None:
            return
        if self._waiting.acquire(blocking=False):
            threading.Thread(target=self._send, args=(finding,), name="watch event", daemon=True).start()

    def say(self, allocation: str, text: str) -> None:
        """Writes an event on the pod of an allocation (the slices of one container). Other parts of the plugin call it
        with the event's text."""
        record = self._records.get(allocation)
        if record is None or record.kind != KUBELET or self._pods is None:
            return
        if self._waiting.acquire(blocking=False):
            threading.Thread(target=self._report, args=(allocation, text), name="event", daemon=True).start()

    def _send(self, finding: Finding) -> None:
        self._report(finding.allocation, finding.text())

    def _report(self, allocation: str, text: str) -> None:
        try:
            record = self._records.get(allocation)
            if record is not None and self._pods is not None:
                self._pods.report(self._pods.owner(record), EVENT, text)
        except PluginError as fault:
            log.warning("watcher: an event could not be written: %s", fault)
        finally:
            self._waiting.release()


def _holders(records: RecordStore, pod_resources: Path) -> Callable[[str], Holder]:
    """Returns a function from allocation to its pod and container. The kubelet is asked only once."""
    known: Mapping[str, Holder] = podresources.holders(pod_resources) or {}

    def holder_of(allocation: str) -> Holder:
        record = records.get(allocation)
        ids = record.kubelet_ids if record is not None else ()
        return next((known[name] for name in ids if name in known), NOBODY)

    return holder_of


def programs(seen: Programs) -> list[api.WatchProcess]:
    return [api.WatchProcess(pid=process.pid, name=process.name, bytes=used) for process, used in seen]


def _unplaced(uuid: str, count: int, state: State) -> api.WatchUnplaced:
    held, hosts = (min(2**63 - 1, by.get(uuid, 0)) for by in (state.unaccounted, state.host_bytes))
    return api.WatchUnplaced(uuid=uuid, processes=count, bytes=held, host_bytes=hosts)


def notes(state: State) -> list[str]:
    """Returns messages for the administrator that are not single findings."""
    out = [f"the watcher cannot check all processes: {state.fault}"] if state.fault else []
    named = {one.allocation for one in state.findings if one.allocation and one.kind not in (LEASE, UNKNOWN)}
    if named:
        out.append(f"the watcher reports {len(named)} container{'s' * (len(named) > 1)}; see: vgpuctl watch")
    for uuid, used in sorted(state.unaccounted.items()):
        if used:
            out.append(f"GPU {uuid}: {used >> 20} MiB are held by processes of no allocation; see: vgpuctl watch")
    for uuid, used in sorted(state.host_bytes.items()):
        if used:
            names = ", ".join(f"{process.name} {process.pid}" for process, _used in state.host[uuid][:MOST_NAMED])
            out.append(
                f"GPU {uuid}: programs of the host itself hold {used >> 20} MiB that no slice limits ({names}); end "
                "them, or start them in a slice: vgpuctl run"
            )
    return out


def answer(state: State, records: RecordStore, pod_resources: Path) -> api.WatchResponse:
    """Returns the watcher's state as the response for vgpuctl and the isolation check."""
    anybody = state.findings or state.past or state.old_mounts
    holder_of = _holders(records, pod_resources) if anybody else lambda _allocation: NOBODY

    def old(one: OldMounts) -> api.WatchOldMounts:
        holder = holder_of(one.allocation)
        return api.WatchOldMounts(
            allocation=one.allocation,
            kind=one.kind,
            namespace=holder.namespace,
            pod=holder.pod,
            container=holder.container,
        )

    def message(one: Finding) -> api.WatchFinding:
        holder = holder_of(one.allocation)
        return api.WatchFinding(
            allocation=one.allocation,
            kind=one.kind,
            namespace=holder.namespace,
            pod=holder.pod,
            container=holder.container,
            uuid=one.uuid,
            reason=one.suspicion.reason,
            found=one.suspicion.found,
            accounted=min(one.suspicion.accounted, 2**63 - 1),
            tolerated=one.suspicion.tolerated,
            age_s=max(0.0, time.monotonic() - one.since),
            processes=programs(one.suspicion.processes),
            action=one.action,
            text=one.text(),
            looks=one.looks,
            over_s=-1 if one.over is None else max(0.0, time.monotonic() - one.over),
        )

    return api.WatchResponse(
        policy=state.policy,
        interval_s=state.interval_s,
        looks_to_name=watch.LOOKS,
        looks=state.looks,
        fault=state.fault or host_is_seen(),
        findings=[message(one) for one in state.findings],
        past=[message(one) for one in state.past],
        totals=[
            api.WatchTotal(reason=reason, kind=kind, count=count)
            for (reason, kind), count in sorted(state.totals.items())
        ],
        sigterm=state.ended.get("SIGTERM", 0),
        sigkill=state.ended.get("SIGKILL", 0),
        old_mounts=[old(one) for one in state.old_mounts],
        unplaced=[_unplaced(uuid, count, state) for uuid, count in sorted(state.unplaced.items())],
    )
