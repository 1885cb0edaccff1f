# SPDX-License-Identifier: Apache-2.0
"""Checks whether a Deployment runs as applied, and finds the reasons if it does not. Also checks whether pods are
assigned to our scheduler.

The caller passes an API object with ``get(path)`` (which returns None if there is no such object), ``list(path,
**query)`` and ``trial(path, body)``.
"""

from __future__ import annotations

import time
from typing import Any, Callable

# Reasons that the kubelet gives if it cannot get an image. Waiting longer does not help.
NO_IMAGE = ("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
PAUSE_S = 1.0


def is_done(deployment: dict[str, Any] | None) -> bool:
    """Returns whether every replica has the newest template and is ready, and no older replica is left."""
    if deployment is None:
        return False
    status, spec = deployment.get("status") or {}, deployment.get("spec") or {}
    counts = [status.get(key) or 0 for key in ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas")]
    seen = (status.get("observedGeneration") or 0) >= (deployment["metadata"].get("generation") or 0)
    return seen and counts == [spec.get("replicas", 1)] * len(counts)


def reasons(pods: list[dict[str, Any]]) -> list[str]:
    """Returns one line for each pod that is not ready: why it is not scheduled, or what its containers wait for."""
    found = []
    for pod in pods:
        status, name = pod.get("status") or {}, pod["metadata"]["name"]
        conditions = {one.get("type"): one for one in status.get("conditions") or []}
        placed = conditions.get("PodScheduled") or {}
        if pod["metadata"].get("deletionTimestamp") or (conditions.get("Ready") or {}).get("status") == "True":
            continue
        if placed.get("status") == "False":
            found.append(f"pod {name} has no node: {placed.get('message') or 'no reason given'}")
            continue
        waiting = [_of_container(one) for one in status.get("containerStatuses") or [] if not one.get("ready")]
        found.append(f"pod {name}: {'; '.join(waiting) or status.get('phase') or 'no status'}")
    return found


def _of_container(status: dict[str, Any]) -> str:
    state = status.get("state") or {}
    said = state.get("waiting") or state.get("terminated") or (status.get("lastState") or {}).get("terminated") or {}
    words = " ".join(str(said[key]) for key in ("reason", "message") if said.get(key))
    return f"container {status.get('name')} ({status.get('image')}) {words or 'runs and is not ready'}"


def wait(
    api: Any,
    path: str,
    pods_path: str,
    selector: str,
    seconds: float,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Waits until the Deployment at ``path`` runs and its former pods have ended, because they may still place pods by
    a former configuration. Returns an empty list if the Deployment runs, else the reasons.

    Ends early if an image cannot be pulled.
    """
    deadline = clock() + seconds
    while True:
        done = is_done(api.get(path))
        pods = api.list(pods_path, labelSelector=selector)
        # Ignore former pods after the time limit, because a pod whose node is gone never ends.
        if done and (clock() >= deadline or not any(one["metadata"].get("deletionTimestamp") for one in pods)):
            return []
        said = reasons(pods)
        hopeless = any(word in line for line in said for word in NO_IMAGE)
        if not done and (hopeless or clock() >= deadline):
            return said or ["no pod of the Deployment was created; is the controller manager of the cluster running?"]
        sleep(PAUSE_S)


def admission(
    api: Any,
    resource: str,
    scheduler: str,
    seconds: float,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[str, str]:
    """Tests by a dry run whether a pod that requests ``resource`` is assigned to ``scheduler``. Returns (fault, doubt).
    Both are empty if the pod is assigned to ``scheduler``. A doubt says why nothing was tested: the user's rights or
    another rule of the cluster refused the pod. Repeats the test for up to ``seconds``: the API server learns a
    webhook's certificate and addresses some seconds after its pods are ready.
    """
    deadline = clock() + seconds
    limits = {"limits": {resource: "1"}}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "vgpu-fleet-trial-"},
        "spec": {"containers": [{"name": "trial", "image": "localhost/none", "resources": limits}]},
    }
    while True:
        status, answer = api.trial("/api/v1/namespaces/default/pods", pod)
        if status == 201 and isinstance(answer, dict):
            found = answer.get("spec", {}).get("schedulerName")
            if found == scheduler:
                return "", ""
            fault = f"expected schedulerName {scheduler}, found {found}; does another webhook set it?"
        else:
            fault = f"{status}: {answer}"
        if status == 403 and "admission webhook" not in fault:
            return "", fault
        if clock() >= deadline:
            return fault, ""
        sleep(PAUSE_S)
