# SPDX-License-Identifier: Apache-2.0
"""Creates the ResourceClaims (Dynamic Resource Allocation) of pods that requested GPUs by resource names, as for a
device plugin. Only the replica that writes creates claims, and only for pods that the API server has stored.

Admission writes the names and contents of a pod's claims into an annotation of the pod, and creates nothing. A claim
belongs to its pod, so Kubernetes deletes it with the pod. Until the claim exists, the kube-scheduler lets the pod wait.

Tenants may write this annotation themselves, but it gives them only what a pod of their own namespace may request
anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vgpu_plugin._shared.pods.claim_requests import ANNOTATION, LABEL, WANTED, read_annotation, spec_of

from . import wire
from .api import Api, ApiError
from .reflector import Kind, Reflector

log = logging.getLogger(__name__)

REFUSED = "GpuClaimRefused"
# MAX_SERVED: maximum number of pods in one round. AT_ONCE: maximum number of parallel API calls. MAX_EVENTS: maximum
# number of events in one round.
MAX_SERVED, AT_ONCE, MAX_EVENTS = 200, 16, 5
# All in seconds. LOOK: time between two rounds. FIRST_PAUSE, LAST_PAUSE: first and longest pause before a pod is tried
# again; the pause doubles each time. BETWEEN_EVENTS: minimum time between two events on one pod.
LOOK, FIRST_PAUSE, LAST_PAUSE, BETWEEN_EVENTS = 1.0, 2.0, 300.0, 60.0


class ClaimError(ValueError):
    """Raised if a claim cannot be created. The text says why and what to do."""


@dataclass(eq=False)
class Due:
    """A pod whose claims are not created yet, with the time of the next attempt and the pause after another failure."""

    pod: wire.ClaimingPod
    when: float
    pause: float = FIRST_PAUSE


class PodClaims:
    """Creates the claims. ``counts``: number of created claims (made), and of failures that were reported by an event
    (refused).
    """

    def __init__(self, api: Api, resync: float = 300.0, now: Callable[[], float] = time.monotonic) -> None:
        self._api, self._now = api, now
        self._due: dict[str, Due] = {}
        # Uid of a pod → hash of the annotation whose claims were created.
        self._made: dict[str, int] = {}
        self._said: dict[str, tuple[str, float]] = {}
        self._events = 0
        self._wake = asyncio.Event()
        self.counts = {"made": 0, "refused": 0}
        labelled = {"labelSelector": f"{LABEL}={WANTED}"}
        kind = Kind("/api/v1/pods", wire.ClaimingPod, wire.ClaimingPodList, labelled)
        self.pods = Reflector(api, kind, self.all_pods, self.pod, resync)

    # --- updates

    def pod(self, gone: bool, pod: wire.ClaimingPod) -> None:
        meta = pod.metadata
        text = (meta.annotations or {}).get(ANNOTATION, "")
        # A pod that is bound or has ended needs no more claims.
        if gone or meta.deletionTimestamp or pod.spec.nodeName or pod.status.phase in wire.ENDED or not text:
            self._forget(meta.uid)
            return
        if self._made.get(meta.uid) == hash(text):
            return
        known = self._due.get(meta.uid)
        if known is not None and (known.pod.metadata.annotations or {}).get(ANNOTATION) == text:
            known.pod = pod
            return
        self._due[meta.uid] = Due(pod, self._now())
        self._wake.set()

    def all_pods(self, pods: list[wire.ClaimingPod], _began: float) -> None:
        # Pods that still wait are checked again, because a claim may have been deleted.
        self._made.clear()
        there = {pod.metadata.uid for pod in pods}
        for uid in {*self._due, *self._said} - there:
            self._forget(uid)
        for pod in pods:
            self.pod(False, pod)

    def _forget(self, uid: str) -> None:
        for known in (self._due, self._made, self._said):
            known.pop(uid, None)

    # --- actions

    async def run(self, writes: Callable[[], bool]) -> None:
        """Runs until it is cancelled. ``writes``: whether this replica is the writer."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.pods.run())
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK):
                        await self._wake.wait()
                self._wake.clear()
                if writes():
                    await self.round()
                else:
                    await asyncio.sleep(LOOK)

    async def round(self) -> None:
        """Creates the claims of the pods that are due."""
        self._events = 0
        now, calls = self._now(), asyncio.Semaphore(AT_ONCE)
        due = sorted((one for one in self._due.values() if one.when <= now), key=lambda one: one.when)
        if len(due) > MAX_SERVED:
            self._wake.set()
        async with asyncio.TaskGroup() as group:
            for one in due[:MAX_SERVED]:
                group.create_task(self._serve(one, calls))

    async def _serve(self, due: Due, calls: asyncio.Semaphore) -> None:
        meta = due.pod.metadata
        async with calls:
            try:
                await self._make(due.pod)
            except (ApiError, ValueError) as fault:
                due.when, due.pause = self._now() + due.pause, min(2 * due.pause, LAST_PAUSE)
                await self._tell(meta, str(fault))
                return
        # Meanwhile the pod may be gone, or its annotation may have changed.
        if self._due.get(meta.uid) is due:
            del self._due[meta.uid]
            self._made[meta.uid] = hash((meta.annotations or {})[ANNOTATION])

    async def _make(self, pod: wire.ClaimingPod) -> None:
        """Creates the claims of a pod. Raises ApiError, or ValueError if the annotation is invalid."""
        meta = pod.metadata
        claims = read_annotation((meta.annotations or {})[ANNOTATION])
        named = {one.resourceClaimName for one in pod.spec.resourceClaims or []}
        strange = sorted(set(claims.shares) - named)
        if strange:
            raise ClaimError(f"{ANNOTATION}: expected names of the pod's spec.resourceClaims, found {strange[0][:64]}")
        for name, share in claims.shares.items():
            await self._claim(meta, name, spec_of(share, claims.selectors))

    async def _claim(self, meta: wire.Meta, name: str, spec: Mapping[str, Any]) -> None:
        folder = f"/apis/resource.k8s.io/v1/namespaces/{meta.namespace}/resourceclaims"
        # ``controller`` is set so that Kubernetes deletes the claim also if its pod has ended but still exists.
        owner = {"apiVersion": "v1", "kind": "Pod", "name": meta.name, "uid": meta.uid, "controller": True}
        body = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": name, "labels": {LABEL: WANTED}, "ownerReferences": [owner]},
            "spec": spec,
        }
        where = f"ResourceClaim {meta.namespace}/{name}"
        try:
            # An API server without the fields for parts of devices would store a claim for more than the pod requested,
            # and the kube-scheduler might use that claim at once. So a dry run first shows what would be stored.
            for query in ({"dryRun": "All"}, {}):
                found = await self._api.json("POST", folder, body, **query)
                if found.get("spec") != spec:
                    text = "found fewer fields; shares need Kubernetes 1.36"
                    raise ClaimError(f"{where}: expected to read back what was written, {text}")
        except ApiError as fault:
            if fault.status != 409:
                raise
            self._compare(where, await self._api.json("GET", f"{folder}/{name}"), meta, spec)
        else:
            self.counts["made"] += 1

    @staticmethod
    def _compare(where: str, found: Mapping[str, Any], meta: wire.Meta, spec: Mapping[str, Any]) -> None:
        kept = found.get("metadata") or {}
        if not any(one.get("uid") == meta.uid for one in kept.get("ownerReferences") or []):
            raise ClaimError(
                f"{where}: expected no claim or a claim of this pod, found another owner; create the pod again"
            )
        if kept.get("deletionTimestamp"):
            raise ClaimError(f"{where}: it is being deleted, and is created again after that")
        if found.get("spec") != spec:
            raise ClaimError(f"{where}: expected the pod's request, found another request; delete the claim")

    async def _tell(self, meta: wire.Meta, text: str) -> None:
        """Writes an event if the reason changed, at most one a minute for a pod."""
        said, when = self._said.get(meta.uid, ("", -BETWEEN_EVENTS))
        if said == text or self._now() - when < BETWEEN_EVENTS or self._events >= MAX_EVENTS:
            return
        self._events += 1
        self._said[meta.uid] = text, self._now()
        self.counts["refused"] += 1
        log.warning("pod %s/%s: its claims could not be created: %s", meta.namespace, meta.name, text)
        about = {"namespace": meta.namespace, "name": meta.name, "uid": meta.uid}
        try:
            await self._api.event(about, REFUSED, f"its claims could not be created; trying again: {text}")
        except ApiError as fault:
            log.warning("the event on pod %s/%s could not be written: %s", meta.namespace, meta.name, fault)
