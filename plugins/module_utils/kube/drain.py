# SPDX-License-Identifier: Apache-2.0
"""Cordons and drains one Kubernetes node. The functions take an ``Api`` of client.py or an object with the same
methods.
"""

from __future__ import annotations

import time
from typing import Any, Callable
from urllib.parse import quote

# Annotation of a node that the collection cordoned. A cordoned node without this annotation was cordoned by another
# user, so it stays cordoned.
MARK = "vgpu.fleet/cordoned-for"
MIRROR = "kubernetes.io/config.mirror"
FINISHED = ("Succeeded", "Failed")
# Seconds between two polls of the remaining pods.
PAUSE = 2.0
GONE, FORBIDDEN_NOW = 404, 429


class DrainError(Exception):
    """A node could not be drained; the text gives the reason and the remedy."""


def cordon(api: Any, name: str, reason: str, apply: bool = True) -> bool:
    """Makes a node unschedulable and adds the annotation MARK. Returns whether the node was changed."""
    node = read(api, name)
    if (node.get("spec") or {}).get("unschedulable"):
        return False
    if apply:
        api.patch(path_of(name), {"metadata": {"annotations": {MARK: reason}}, "spec": {"unschedulable": True}})
    return True


def uncordon(api: Any, name: str, apply: bool = True) -> bool:
    """Makes a node schedulable again if the collection cordoned it."""
    node = read(api, name)
    if MARK not in ((node.get("metadata") or {}).get("annotations") or {}):
        return False
    if apply:
        api.patch(path_of(name), {"metadata": {"annotations": {MARK: None}}, "spec": {"unschedulable": None}})
    return True


def path_of(name: str) -> str:
    return "/api/v1/nodes/" + quote(name, safe="")


def read(api: Any, name: str) -> dict[str, Any]:
    """Returns the node. Raises DrainError if there is no node of that name."""
    found = api.get(path_of(name))
    if found is None:
        raise DrainError(
            f"node {name}: the API server answered 404 Not Found; give a name that kubectl get nodes lists"
        )
    return found


def pods_of(api: Any, name: str) -> list[dict[str, Any]]:
    return api.list("/api/v1/pods", fieldSelector=f"spec.nodeName={name}")


def evict(api: Any, pod: dict[str, Any]) -> int:
    """Evicts a pod. Returns an HTTP status: 201, GONE, or FORBIDDEN_NOW if a disruption budget forbids it now."""
    meta = {"name": pod["metadata"]["name"], "namespace": pod["metadata"]["namespace"]}
    path = "/api/v1/namespaces/{namespace}/pods/{name}/eviction".format(**meta)
    return api.post(path, {"metadata": meta}, (GONE, FORBIDDEN_NOW))


def asks_for(pod: dict[str, Any], prefix: str) -> bool:
    """Returns whether a container of the pod requests a resource whose name begins with ``prefix``, or the pod has a
    claim (Dynamic Resource Allocation). Every claim counts, because the pod's spec does not show which driver's devices
    a claim is for.
    """
    spec = pod.get("spec") or {}
    if spec.get("resourceClaims"):
        return True
    containers = list(spec.get("containers") or []) + list(spec.get("initContainers") or [])
    return any(
        key.startswith(prefix)
        for container in containers
        for kind in ("limits", "requests")
        for key in ((container.get("resources") or {}).get(kind) or {})
    )


def to_evict(pods: list[dict[str, Any]], only: str, force: bool, lose_data: bool) -> list[dict[str, Any]]:
    """Returns the pods that a drain evicts. ``only``: prefix of resource names, empty for every pod.

    Pods of DaemonSets, static pods and finished pods stay, because a drain cannot move them. Raises DrainError, before
    any change, if a pod or its data would be lost: a pod without a controller (unless ``force`` is set), or with data
    in an emptyDir (unless ``lose_data`` is set).
    """
    chosen, faults = [], []
    for pod in pods:
        meta, spec = pod["metadata"], pod.get("spec") or {}
        owners = [owner for owner in meta.get("ownerReferences") or [] if owner.get("controller")]
        if MIRROR in (meta.get("annotations") or {}) or any(owner.get("kind") == "DaemonSet" for owner in owners):
            continue
        if (pod.get("status") or {}).get("phase") in FINISHED or (only and not asks_for(pod, only)):
            continue
        chosen.append(pod)
        if not owners and not force:
            faults.append(f"pod {title(pod)} has no controller that would start it elsewhere; end it or set force")
        if not lose_data and any("emptyDir" in volume for volume in spec.get("volumes") or []):
            faults.append(f"pod {title(pod)} has data in an emptyDir that would be lost; set delete_emptydir_data")
    if faults:
        raise DrainError("\n".join(faults))
    return chosen


def title(pod: dict[str, Any]) -> str:
    return "{}/{}".format(pod["metadata"]["namespace"], pod["metadata"]["name"])


def drain(
    api: Any,
    name: str,
    pods: list[dict[str, Any]],
    timeout: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[str]:
    """Evicts the pods and waits until they are gone. Returns their names. Raises DrainError after ``timeout`` seconds.

    Pods are identified by uid, because a StatefulSet creates a new pod of the same name.
    """
    waiting = {pod["metadata"]["uid"]: pod for pod in pods}
    asked: set[str] = set()
    held: dict[str, str] = {}
    end = clock() + timeout
    while waiting:
        for uid, pod in waiting.items():
            if uid in asked:
                continue
            if evict(api, pod) == FORBIDDEN_NOW:
                held[uid] = "a PodDisruptionBudget forbids its eviction"
                continue
            held.pop(uid, None)
            asked.add(uid)
        there = {pod["metadata"]["uid"] for pod in pods_of(api, name)}
        waiting = {uid: pod for uid, pod in waiting.items() if uid in there}
        if not waiting:
            break
        if clock() >= end:
            rows = [f"{title(pod)}: {held.get(uid, 'still ending')}" for uid, pod in waiting.items()]
            raise DrainError(
                f"node {name}: {len(waiting)} of {len(pods)} pods are still there after {timeout:g} s: "
                + "; ".join(sorted(rows))
                + "; check these pods, or set a longer timeout"
            )
        sleep(PAUSE)
    return [title(pod) for pod in pods]
