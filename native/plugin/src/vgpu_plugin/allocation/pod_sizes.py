# SPDX-License-Identifier: Apache-2.0
"""Finds the pod that holds given slices (parts of GPUs), and its plan: the GPUs and sizes that the scheduler chose for
its containers. The kubelet's PodResources service and its checkpoint (the file with its allocations) name the pod. The
plan is in the annotations of the pod at the API server (``pods/annotations`` of the shared modules).

A new container's plan is read in the kubelet's call PreStartContainer, the only call that comes before the start of a
container and after the kubelet has assigned the slice ids to a pod.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

from .._shared.pods import annotations as pod_annotations
from .._shared.pods import requests, resizes
from .._shared.pods.annotations import Part, PlanError
from ..errors import NotNow, Refused
from ..node import checkpoint
from ..node.kube_api import ApiError
from ..node.podresources import Holder
from .records import Record

ENDED = ("Succeeded", "Failed")
COMPONENT = "vgpu-device-plugin"

log = logging.getLogger(__name__)


class Client(Protocol):
    """The methods of kube_api.Api that this module calls."""

    def get(self, path: str) -> dict[str, Any]: ...

    def patch(self, path: str, body: dict[str, Any]) -> dict[str, Any]: ...

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]: ...


class Owner(NamedTuple):
    """A container and its pod. The data come from the API server."""

    pod: dict[str, Any]
    container: str

    @property
    def name(self) -> str:
        metadata = self.pod["metadata"]
        return f"{metadata['namespace']}/{metadata['name']}"


class PodSizes:
    """Reads and writes pods at the API server. ``holders`` asks PodResources which container holds which slice. Every
    error is raised as Refused or NotNow, with a message that the kubelet shows.
    """

    def __init__(
        self, api: Client, node: str, checkpoint_file: Path, holders: Callable[[], dict[str, Holder] | None]
    ) -> None:
        self._api = api
        self.node = self._node = node
        self._checkpoint_file = checkpoint_file
        self._holders = holders

    def owner(self, record: Record) -> Owner:
        """Returns the container that holds an allocation, and its pod. The pod's name comes from PodResources. The
        container's name and the pod's uid come from the kubelet's checkpoint.
        """
        known = self._holders() or {}
        holder = next((known[one] for one in record.kubelet_ids if one in known), None)
        found = checkpoint.read(self._checkpoint_file)
        entry = next((one for one in found.entries if one.allocation == record.id), None) if found else None
        container = entry.container if entry is not None else holder.container if holder is not None else ""
        uid = entry.pod_uid if entry is not None else ""
        pod = None
        if holder is not None:
            pod = self._get(f"/api/v1/namespaces/{quote(holder.namespace)}/pods/{quote(holder.pod)}")
        if (pod is None or (uid and _uid(pod) != uid)) and uid:
            # PodResources does not list init containers. So their pod is searched by its uid, which comes from the
            # checkpoint.
            pod = next((one for one in self.pods() if _uid(one) == uid), None)
        if pod is None or not container:
            raise NotNow(
                f"allocation {record.id}: neither PodResources nor the checkpoint of the kubelet names the pod of "
                f"{', '.join(record.kubelet_ids)}, so its size is unknown; the start is tried again"
            )
        return Owner(pod, container)

    def pods(self) -> list[dict[str, Any]]:
        """Returns the pods on this node, except those that have ended."""
        selector = quote(f"spec.nodeName={self._node}", safe="")
        items = self._get(f"/api/v1/pods?fieldSelector={selector}").get("items") or []
        return [one for one in items if (one.get("status") or {}).get("phase") not in ENDED]

    def _get(self, path: str) -> dict[str, Any]:
        try:
            return self._api.get(path)
        except ApiError as fault:
            raise NotNow(f"the size of a pod cannot be read from the API server: {fault}") from None

    def plan(self, owner: Owner) -> tuple[Part, ...]:
        """Returns the plan of a pod. Raises Refused if the pod has no plan for this container."""
        try:
            plan = pod_annotations.read_annotations(owner.pod["metadata"].get("annotations") or {})
        except PlanError as fault:
            raise Refused(f"pod {owner.name}: {fault}") from None
        if plan is None or not any(part.container == owner.container for part in plan):
            raise Refused(
                f"pod {owner.name}, container {owner.container}: no plan of its GPUs ({pod_annotations.PLAN}); pods of "
                "a node with requested sizes are placed by vgpu-scheduler: set schedulerName, and no nodeName"
            )
        return plan

    @staticmethod
    def priority(owner: Owner, config: dict[str, Any]) -> int:
        """Returns the priority that the pod requested: 0 is high, 1 is low and the default. The names of the resources
        come from the node's configuration.
        """
        vcuda = config["sharing"]["vcuda"]
        names = requests.Config()
        names = names._replace(
            gpu=vcuda.get("resourceName", names.gpu), priority=vcuda.get("priorityResource", names.priority)
        )
        try:
            asked = requests.read_pod(owner.pod, names).priority
        except requests.DialectError:
            return 1
        return 1 if asked is None else asked

    def write_given(self, owner: Owner, plan: Iterable[Part]) -> None:
        """Writes on the pod which devices it really gets. This is done before the pod gets them. From then on the
        scheduler uses this annotation instead of the plan. Raises NotNow if the request fails or the pod was changed
        after it was read: the change may be a granted resize, which has another size.
        """
        self._annotate(owner, {pod_annotations.GIVEN: pod_annotations.write_plan(tuple(plan))})

    def write_resized(self, owner: Owner, plan: Iterable[Part], former: Iterable[Part] = ()) -> None:
        """Writes the new sizes of a resized pod. ``former`` has the larger, former sizes if the pod's processes still
        use more than the new sizes. Raises NotNow if the pod was changed after it was read.
        """
        texts: dict[str, str | None] = {pod_annotations.GIVEN: pod_annotations.write_plan(tuple(plan))}
        if held := tuple(former):
            texts[resizes.FORMER] = pod_annotations.write_plan(held)
        self._annotate(owner, texts)

    def write_done(self, owner: Owner) -> None:
        """Marks a resize as finished, so that the pod's former size is no longer counted. Raises NotNow if the request
        fails or the pod was changed after it was read.
        """
        self._annotate(owner, {resizes.FORMER: None})

    def _annotate(self, owner: Owner, texts: Mapping[str, str | None]) -> None:
        metadata = owner.pod["metadata"]
        path = f"/api/v1/namespaces/{quote(metadata['namespace'])}/pods/{quote(metadata['name'])}/status"
        change = {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"], "annotations": dict(texts)}
        try:
            self._api.patch(path, {"metadata": change})
        except ApiError as fault:
            raise NotNow(f"pod {owner.name}: its GPUs and sizes cannot be written on it: {fault}") from None

    def report(self, owner: Owner, reason: str, text: str, kind: str = "Warning") -> None:
        """Reports an event on a pod. If the request fails, the failure is only logged."""
        metadata = owner.pod["metadata"]
        about = {key: metadata.get(key, "") for key in ("namespace", "name", "uid")}
        event = {
            "metadata": {"generateName": f"{metadata['name']}.", "namespace": metadata["namespace"]},
            "involvedObject": {"apiVersion": "v1", "kind": "Pod", **about},
            "type": kind,
            "reason": reason,
            "message": text[:1000],
            "source": {"component": COMPONENT, "host": self._node},
        }
        try:
            self._api.post(f"/api/v1/namespaces/{quote(metadata['namespace'])}/events", event)
        except ApiError as fault:
            log.warning("pod %s: an event could not be written: %s", owner.name, fault)

    def expected(self, size: int) -> list[str]:
        """Returns the planned GPUs of the container that the kubelet most likely admits now. This container belongs to
        the oldest pod that is not in the checkpoint yet. The result is only a hint for the choice of slices, and may be
        empty.
        """
        found = checkpoint.read(self._checkpoint_file)
        known = {(one.pod_uid, one.container) for one in found.entries} if found else set()
        try:
            pods = self.pods()
        except NotNow as fault:
            log.warning("%s", fault)
            return []
        for pod in sorted(pods, key=lambda one: str(one["metadata"].get("creationTimestamp") or "")):
            try:
                plan = pod_annotations.read_annotations(pod["metadata"].get("annotations") or {}) or ()
            except PlanError:
                continue
            for part in plan:
                if (_uid(pod), part.container) not in known and len(part.devices) == size:
                    return [device.uuid for device in part.devices]
        return []


def _uid(pod: dict[str, Any]) -> str:
    return str((pod.get("metadata") or {}).get("uid") or "")
