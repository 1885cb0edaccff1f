# SPDX-License-Identifier: Apache-2.0
"""The watcher put together for a node: whose allocations are whose, the policy of node.yaml, events at pods."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from .._proto import admin_pb2 as api
from ..allocation.allocation_files import AllocationFiles
from ..allocation.allocator import Allocator
from ..allocation.records import KUBELET
from ..errors import PluginError
from ..node import checkpoint, podresources
from ..node.gpus import GpuSource
from ..node.paths import Paths
from ..node.podresources import Holder
from ..offer.pool import Pool
from ..offer.settings import Settings
from . import watcher as watch
from .usage import NOBODY
from .watcher import Finding, State, Watch

EVENT = "VgpuWatch"
# Of events that wait for a slow API server; what is more is in the log and the metrics alone.
MOST_WAITING = 8

log = logging.getLogger(__name__)


def make(
    source: GpuSource,
    files: AllocationFiles,
    pool: Pool,
    allocator: Allocator,
    paths: Paths,
    settings: Callable[[], Settings],
    interval_s: float,
) -> Watch:
    def uuids() -> list[str]:
        return list(pool.shape().limited)

    def kinds() -> Mapping[str, str]:
        return {record.id: record.kind for record in allocator.records.all()}

    def pods() -> Mapping[str, frozenset[str]]:
        found = checkpoint.read(paths.checkpoint)
        out: dict[str, frozenset[str]] = {}
        for entry in found.entries if found else ():
            if entry.allocation:
                out[entry.pod_uid] = out.get(entry.pod_uid, frozenset()) | {entry.allocation}
        return out

    def policy() -> str:
        return settings().watch

    return Watch(source, files, uuids, kinds, pods, policy, Teller(allocator).tell, interval_s=interval_s)


class Teller:
    """Events at pods, where an API server is known. The watcher itself waits for no server."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._waiting = threading.BoundedSemaphore(MOST_WAITING)

    def tell(self, finding: Finding) -> None:
        if finding.kind != KUBELET or self._allocator.sizes is None:
            return
        if self._waiting.acquire(blocking=False):
            threading.Thread(target=self._send, args=(finding,), name="watch event", daemon=True).start()

    def _send(self, finding: Finding) -> None:
        try:
            record = self._allocator.records.get(finding.allocation)
            sizes = self._allocator.sizes
            if record is not None and sizes is not None:
                sizes.tell(sizes.owner(record), EVENT, finding.text())
        except PluginError as fault:
            log.warning("watcher: no event is written: %s", fault)
        finally:
            self._waiting.release()


def answer(state: State, allocator: Allocator, paths: Paths) -> api.WatchResponse:
    """What vgpuctl and the isolation check are told."""
    known: Mapping[str, Holder] = {}
    if any(one.kind == KUBELET for one in (*state.findings, *state.past)):
        known = podresources.holders(paths.pod_resources) or {}

    def message(one: Finding) -> api.WatchFinding:
        record = allocator.records.get(one.allocation)
        ids = record.kubelet_ids if record is not None else ()
        holder = next((known[name] for name in ids if name in known), NOBODY)
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
            processes=[
                api.WatchProcess(pid=process.pid, name=process.name, bytes=used)
                for process, used in one.suspicion.processes
            ],
            action=one.action,
            text=one.text(),
        )

    return api.WatchResponse(
        policy=state.policy,
        interval_s=state.interval_s,
        looks_to_name=watch.LOOKS,
        looks=state.looks,
        fault=state.fault or watch.host_is_seen(),
        findings=[message(one) for one in state.findings],
        past=[message(one) for one in state.past],
        totals=[
            api.WatchTotal(reason=reason, kind=kind, count=count)
            for (reason, kind), count in sorted(state.totals.items())
        ],
        sigterm=state.ended.get("SIGTERM", 0),
        sigkill=state.ended.get("SIGKILL", 0),
    )
