# SPDX-License-Identifier: Apache-2.0
"""Resizes running pods: checks the request in a pod's annotation and grants it. Only the replica that binds does that.
The module ``pods/resizes`` of the shared core defines the annotations.

A request is checked again until it is granted. So it survives the loss of a replica or of an event, and the pod gets
more once there is room. A granted request is not applied a second time, so that a size that root later sets on the node
stays.

As with a bind, a grant is entered in the ledger (which pod holds how much of which GPU) before the API server is asked.
The room stays reserved until the watch shows the pod with the grant, because an older event would free the room again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from vgpu_plugin._shared.pods import annotations as pod_annotations
from vgpu_plugin._shared.pods import resizes
from vgpu_plugin._shared.pods.annotations import Part, PlanError, Use, use_of

from . import wire
from .api import ApiError, Unknown
from .extender import KEPT, Extender
from .ledger import Ledger
from .quota import Demand

log = logging.getLogger(__name__)

REFUSED, WAITS = "GpuResizeRefused", "GpuResizeWaits"
# Maximum numbers in one round. MAX_JUDGED: checked requests. MAX_GRANTED: grants. MAX_EVENTS: events. A tenant may
# change all its pods at once, and each grant means a write at the API server and a write of limits on a node.
MAX_JUDGED, MAX_GRANTED, MAX_EVENTS = 200, 20, 5
# All in seconds. BETWEEN_GRANTS: minimum time between two grants to one pod. BETWEEN_EVENTS: minimum time between two
# events on one pod. GIVE_UP: if the watch has not shown a grant after this time, the grant counts as failed, because no
# request to the API server takes longer.
BETWEEN_GRANTS, BETWEEN_EVENTS, GIVE_UP = 10.0, 60.0, 70.0


class Writer(Protocol):
    """The API calls that a grant needs."""

    async def annotate(
        self, namespace: str, name: str, uid: str, annotations: Mapping[str, str], version: str = ""
    ) -> None: ...

    async def event(self, pod: dict[str, str], reason: str, message: str) -> None: ...


class Claim(NamedTuple):
    """A grant that the watch has not shown yet: the parts of GPUs that count for the pod, the request, and the time of
    the grant.
    """

    parts: tuple[Part, ...]
    request: str
    when: float


class Resizing:
    def __init__(self, extender: Extender, api: Writer, now: Callable[[], float] = time.monotonic) -> None:
        self._extender, self._ledger, self._api, self._now = extender, extender.ledger, api, now
        # Uid → pod with a request that is not granted. The pods that were checked longest ago come first.
        self._pending: dict[str, wire.Pod] = {}
        self._claims: dict[str, Claim] = {}
        self._granted_at: dict[str, float] = {}
        # Uid → text and time of the last event on a pod.
        self._said: dict[str, tuple[str, float]] = {}
        self._events = 0
        self.counts = {"granted": 0, "refused": 0}

    # --- updates

    def counts_for(self, pod: wire.Pod) -> tuple[Part, ...] | None:
        """Returns the parts of GPUs that the ledger must count for a bound pod. Raises PlanError."""
        uid, annotations = pod.metadata.uid, pod.metadata.annotations or {}
        counted = resizes.counted(annotations)
        claim = self._claims.get(uid)
        if claim is not None and annotations.get(resizes.RESIZED) == claim.request:
            del self._claims[uid]
            claim = None
        if counted is not None:
            self._note(uid, pod, annotations)
        return resizes.greater(counted, claim.parts) if counted is not None and claim is not None else counted

    def _note(self, uid: str, pod: wire.Pod, annotations: Mapping[str, str]) -> None:
        asked = annotations.get(resizes.RESIZE)
        if asked is None or (resizes.RESIZED in annotations and self._is_granted(annotations)):
            self._pending.pop(uid, None)
            self._said.pop(uid, None)
        else:
            self._pending[uid] = pod

    @staticmethod
    def _is_granted(annotations: Mapping[str, str]) -> bool:
        try:
            return resizes.pending(annotations) is None
        except PlanError:
            return False

    def claims(self, uid: str) -> bool:
        return uid in self._claims

    @property
    def pending(self) -> int:
        return len(self._pending)

    def forget(self, uid: str) -> None:
        """Drops a pod that has ended or is gone."""
        for known in (self._pending, self._claims, self._granted_at, self._said):
            known.pop(uid, None)

    def forget_others(self, there: set[str]) -> None:
        for uid in {*self._pending, *self._claims, *self._granted_at, *self._said} - there:
            self.forget(uid)

    # --- regular work

    async def round(self) -> None:
        """Checks pending requests and grants those that fit; runs only on the replica that binds."""
        for uid, claim in list(self._claims.items()):
            if self._now() - claim.when > GIVE_UP:
                del self._claims[uid]
        granted, self._events = 0, 0
        for uid in list(self._pending)[:MAX_JUDGED]:
            pod = self._pending.pop(uid, None)
            if pod is None:
                continue
            # The pod moves to the end of the order, whatever the result is.
            self._pending[uid] = pod
            if uid in self._claims or self._now() - self._granted_at.get(uid, -BETWEEN_GRANTS) < BETWEEN_GRANTS:
                continue
            if granted < MAX_GRANTED and await self._answer(uid, pod):
                granted += 1

    async def _answer(self, uid: str, pod: wire.Pod) -> bool:
        """Checks the request of a pod. Returns whether it was granted."""
        annotations, held = pod.metadata.annotations or {}, self._ledger.held(uid)
        if held is None or not pod.spec.nodeName:
            return False
        try:
            request = resizes.pending(annotations)
            plan = pod_annotations.read_annotations(annotations)
            if request is None or plan is None:
                return False
            after = resizes.applied(plan, request)
        except PlanError as fault:
            return await self._tell(pod, REFUSED, str(fault))
        # From here to the call of ``hold`` there is no ``await``, so no bind can run between the check and the entry in
        # the ledger (which pod holds how much of which GPU).
        counted = resizes.greater(after, resizes.counted(annotations) or ())
        reason = self._fault(uid, pod, counted)
        if reason:
            return await self._tell(
                pod, WAITS, f"{reason}; the resize is tried again as long as {resizes.RESIZE} requests it"
            )
        return await self._grant(uid, pod, Grant(request, plan, after, counted))

    def _fault(self, uid: str, pod: wire.Pod, parts: tuple[Part, ...]) -> str:
        """Returns "" or why the pod cannot grow: its quota is exhausted, the room is reserved for other pods, or the
        GPU has no room.
        """
        held = self._ledger.held(uid)
        assert held is not None
        had = {use[0]: Use(*use[1:]) for use in held.uses}
        uses = use_of(parts)
        own = Demand(sum(one.memory_mib for one in had.values()), sum(one.cores for one in had.values()))
        demand = Demand(sum(one.memory_mib for one in uses.values()), sum(one.cores for one in uses.values()))
        over = self._extender.quotas.takes(pod.metadata.namespace, demand, own)
        if over:
            return over
        if all(_within(use, had.get(uuid)) for uuid, use in uses.items()):
            return ""
        with self._extender.preemption.kept(uid, pod.spec.priority or 0, [held.node]) as kept:
            return KEPT if kept else misfit(self._ledger, held.node, had, parts)

    async def _grant(self, uid: str, pod: wire.Pod, grant: Grant) -> bool:
        meta, text = pod.metadata, resizes.write_request(grant.request)
        held = self._ledger.held(uid)
        assert held is not None
        texts = {resizes.RESIZED: text}
        if grant.after != grant.plan:
            former = resizes.counted(meta.annotations or {})
            assert former is not None
            texts[pod_annotations.GIVEN] = pod_annotations.write_plan(grant.after)
            texts[resizes.FORMER] = pod_annotations.write_plan(former)
        self._claims[uid] = Claim(grant.counted, text, self._now())
        self._ledger.hold(uid, held.pod, held.node, grant.counted)
        self._granted_at[uid] = self._now()
        try:
            # The annotations are written only on this version of the pod, because otherwise changes that its node wrote
            # meanwhile would be lost.
            await self._api.annotate(meta.namespace, meta.name, uid, texts, meta.resourceVersion)
        except Unknown as fault:
            log.warning(
                "pod %s: the write of its resize has no known outcome: %s; its room stays reserved", held.pod, fault
            )
            return False
        except ApiError as fault:
            # The usual cause is a newer version of the pod, which the next event contains.
            log.info("pod %s: its resize could not be written: %s", held.pod, fault)
            self._claims.pop(uid, None)
            self._granted_at.pop(uid, None)
            if self._ledger.held(uid) is not None:
                self._ledger.hold(uid, held.pod, held.node, resizes.counted(meta.annotations or {}) or ())
            return False
        self._said.pop(uid, None)
        self.counts["granted"] += 1
        log.info("pod %s: resized: %s", held.pod, text)
        return True

    async def _tell(self, pod: wire.Pod, reason: str, text: str) -> bool:
        """Writes an event if the reason changed, at most one a minute for a pod. Returns False, which means that
        nothing was granted.
        """
        meta = pod.metadata
        said, when = self._said.get(meta.uid, ("", -BETWEEN_EVENTS))
        if said == text or self._now() - when < BETWEEN_EVENTS or self._events >= MAX_EVENTS:
            return False
        self._events += 1
        self._said[meta.uid] = text, self._now()
        self.counts["refused"] += 1
        try:
            await self._api.event({"namespace": meta.namespace, "name": meta.name, "uid": meta.uid}, reason, text)
        except ApiError as fault:
            log.warning("the event on pod %s/%s could not be written: %s", meta.namespace, meta.name, fault)
        return False


class Grant(NamedTuple):
    """A grant of a resize. ``plan``: the pod's parts of GPUs before the resize; ``after``: those after the resize;
    ``counted``: the parts that the ledger counts until the node has applied the resize.
    """

    request: Mapping[str, resizes.Size]
    plan: tuple[Part, ...]
    after: tuple[Part, ...]
    counted: tuple[Part, ...]


def _within(use: Use, had: Use | None) -> bool:
    return had is not None and use.memory_mib <= had.memory_mib and use.cores <= had.cores


def misfit(ledger: Ledger, node: str, had: Mapping[str, Use], parts: tuple[Part, ...]) -> str:
    """Returns "" or which GPU has no room for a pod that holds ``had`` and would hold ``parts``. A part that does not
    grow always fits. As in a placement, a container with 100 % of the compute needs the GPU alone.
    """
    gpus = {gpu.uuid: gpu for gpu in ledger.nodes.get(node, ())}
    used: Mapping[str, Any] = ledger.use(node) if gpus else {}
    for uuid, use in use_of(parts).items():
        mine = had.get(uuid, Use(0, 0, 0))
        if _within(use, mine):
            continue
        if uuid not in gpus:
            return f"GPU {uuid}: node {node} does not publish this GPU now"
        total = used[uuid]
        others = Use(total.memory_mib - mine.memory_mib, total.cores - mine.cores, total.slots - mine.slots)
        capacity = gpus[uuid].capacity_mib
        if use.memory_mib > mine.memory_mib and others.memory_mib + use.memory_mib > capacity:
            return (
                f"GPU {uuid}: {use.memory_mib} MiB are asked for, {others.memory_mib} of {capacity} are held by "
                f"others; at most {max(capacity - others.memory_mib, 0)} are possible now"
            )
        owns = any(one.cores >= 100 for part in parts for one in part.devices if one.uuid == uuid)
        if use.cores > mine.cores and (others.cores + use.cores > 100 or (owns and others.slots)):
            return (
                f"GPU {uuid}: {use.cores} % of the SMs are asked for, {others.cores} % are held by others"
                f"{', and 100 % requires the GPU without other pods' if owns else ''}"
            )
    return ""
