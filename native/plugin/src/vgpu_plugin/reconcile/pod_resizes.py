# SPDX-License-Identifier: Apache-2.0
"""Applies resizes that the scheduler granted to running pods, and reports on the pod when they are done.

A pod with a granted resize has the annotation ``vgpu.fleet/former`` until its node has applied the resize (see
``pods/resizes`` of the shared core). This module watches the metadata of this node's pods to find such pods. It does so
only if the node gives containers the size that their pod requests, not equal slices. A resize that cannot be applied
yet, because programs use more than the new size, is tried again, and an event on the pod gives the reason.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from .._shared.pods import annotations as pod_annotations
from .._shared.pods import resizes
from .._shared.pods.annotations import Part, PlanError
from ..allocation.pod_sizes import Owner, PodSizes
from ..allocation.records import KUBELET, RecordStore
from ..allocation.resize_rules import Wanted
from ..allocation.resizer import Resizer
from ..errors import NotNow, PluginError
from ..node import checkpoint
from ..node.kube_api import ApiError
from ..node.persist import persist

DONE, WAITS = "VgpuResized", "VgpuResizeWaits"
GONE = 410
# Minimum seconds between two events on one pod.
BETWEEN_EVENTS_S = 60.0
RETRY_S = 10.0
# Seconds after which a changed configuration is noticed.
IDLE_S = 5.0

log = logging.getLogger(__name__)


class Client(Protocol):
    """The methods of kube_api.Api that this module calls."""

    @property
    def server(self) -> str: ...

    def list_metadata(self, path: str) -> dict[str, Any]: ...

    def watch(self, path: str, metadata: bool = False) -> Any: ...

    def stop(self) -> None: ...


class PodResizes:
    """``run`` watches the pods and ``retry`` repeats failed resizes, each in its own thread. ``requested`` returns
    whether containers on this node now get the size that their pod requests.
    """

    def __init__(
        self,
        api: Client,
        pods: PodSizes,
        resizer: Resizer,
        records: RecordStore,
        checkpoint_file: Path,
        requested: Callable[[], bool],
    ) -> None:
        self._api = api
        self._pods = pods
        self._resizer = resizer
        self._records = records
        self._checkpoint_file = checkpoint_file
        self._requested = requested
        self._path = f"/api/v1/pods?fieldSelector={quote(f'spec.nodeName={pods.node}', safe='')}"
        self._stopping = threading.Event()
        self._one_at_a_time = threading.Lock()
        # Uid → metadata of each pod whose granted resize is not applied yet.
        self._due: dict[str, dict[str, Any]] = {}
        # Uid → text and time of the last event.
        self._said: dict[str, tuple[str, float]] = {}
        # Errors in watching pods: subject → reason; empty if there is none.
        self.faults: dict[str, str] = {}

    def notes(self) -> list[str]:
        return [f"{what}: {why}" for what, why in sorted(self.faults.items())]

    def stop(self) -> None:
        self._stopping.set()
        self._api.stop()

    def run(self) -> None:
        while not self._stopping.is_set():
            if not self._requested():
                self._stopping.wait(IDLE_S)
                continue
            persist(self._follow, self._stopping, self.faults, "resizes of running pods are not noticed")

    def retry(self) -> None:
        while not self._stopping.wait(RETRY_S):
            self.poll()

    def _follow(self) -> None:
        """Lists the pods and watches them until the server ends the watch."""
        found = self._api.list_metadata(self._path)
        with self._one_at_a_time:
            items = [one.get("metadata") or {} for one in found.get("items") or []]
            self._due = {str(one.get("uid")): one for one in items if _is_due(one)}
            self._said = {uid: said for uid, said in self._said.items() if uid in self._due}
        self.faults.clear()
        self.poll()
        version = quote(str((found.get("metadata") or {}).get("resourceVersion") or ""), safe="")
        for event in self._api.watch(f"{self._path}&resourceVersion={version}", metadata=True):
            kind, one = event.get("type"), event.get("object") or {}
            if kind == "ERROR":
                # Status 410 means that the resource version is too old, so the pods are listed again.
                if one.get("code") != GONE:
                    raise ApiError(int(one.get("code") or 0), f"{self._api.server}: watch: {one.get('message')}")
                return
            metadata = one.get("metadata") or {}
            with self._one_at_a_time:
                uid = str(metadata.get("uid"))
                self._due.pop(uid, None)
                if kind in ("ADDED", "MODIFIED") and _is_due(metadata):
                    self._due[uid] = metadata
                    self._try(uid)
                else:
                    self._said.pop(uid, None)

    def poll(self) -> None:
        with self._one_at_a_time:
            for uid in list(self._due):
                self._try(uid)

    def _try(self, uid: str) -> None:
        owner = Owner({"metadata": self._due[uid]}, "")
        try:
            parts = self._apply(uid)
            self._pods.write_done(owner)
        except (PluginError, PlanError) as fault:
            said, when = self._said.get(uid, ("", -BETWEEN_EVENTS_S))
            # NotNow usually passes soon, for example when the container has started, so no event is written for it.
            # There is no event either if the last one gave the same error or is too recent.
            if isinstance(fault, NotNow) or said == str(fault) or time.monotonic() - when < BETWEEN_EVENTS_S:
                log.debug("pod %s: %s", owner.name, fault)
                return
            self._said[uid] = str(fault), time.monotonic()
            log.warning("pod %s: its new size is not applied yet: %s", owner.name, fault)
            self._pods.report(owner, WAITS, f"{fault}; it is tried again")
            return
        del self._due[uid]
        sizes = ", ".join(
            f"container {part.container}: {one.memory_mib} MiB, {one.cores or 'no limit of'} % of {one.uuid}"
            for part in parts
            for one in part.devices
        )
        log.info("pod %s: %s", owner.name, sizes)
        self._pods.report(owner, DONE, sizes, "Normal")

    def _apply(self, uid: str) -> tuple[Part, ...]:
        """Resizes the allocations (slices of containers) of a pod to its granted sizes. Raises PluginError or PlanError
        if not all allocations could be resized.
        """
        plan = pod_annotations.read_annotations(self._due[uid].get("annotations") or {}) or ()
        found = checkpoint.read(self._checkpoint_file)
        entries = {one.container: one.allocation for one in (found.entries if found else ()) if one.pod_uid == uid}
        faults: list[PluginError] = []
        for part in plan:
            if not part.devices:
                continue
            try:
                self._apply_part(entries.get(part.container, ""), part)
            except PluginError as fault:
                faults.append(fault)
        # Raise the most important error. An error that stays until somebody acts is more important than NotNow, which
        # passes.
        if faults:
            raise min(faults, key=lambda one: isinstance(one, NotNow))
        return plan

    def _apply_part(self, allocation: str, part: Part) -> None:
        record = self._records.get(allocation)
        # A container that is starting gets its size from sizer.py, which may have read an older version of the pod. So
        # a container is resized only after its start.
        if record is None or record.kind != KUBELET or record.limits.get("deny"):
            raise NotNow(f"container {part.container} has not started")
        # Memory with a burst limit is managed by burst.py.
        wanted = {one.uuid: Wanted(None if one.burst_mib else one.memory_mib, one.cores) for one in part.devices}
        if set(wanted) != {one["uuid"] for one in record.limits["devices"]}:
            raise NotNow(f"container {part.container} has other GPUs than {', '.join(sorted(wanted))}")
        self._resizer.resize(record.id, wanted, waits=False)
        if self._resizer.leaving(record.id):
            raise NotNow(f"container {part.container} still uses more than its new size")


def _is_due(metadata: dict[str, Any]) -> bool:
    return resizes.FORMER in (metadata.get("annotations") or {})
