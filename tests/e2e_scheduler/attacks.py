# SPDX-License-Identifier: Apache-2.0
"""Helpers of the tests that attack the scheduler: requests with the expected refusal, pods, and a neighbour that must
stay unaffected."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from fleet import container
from kubebox.api import ApiError
from kubebox.process import until
from vgpu_plugin._shared.pods import annotations as pod_annotations

GPU, MEM = "nvidia.com/gpu", "nvidia.com/gpumem"
CARD = 16160
IGNORE = {"vgpu.fleet/webhook": "ignore"}
NEIGHBOUR = "/api/v1/namespaces/neighbour"
MERGE, STRATEGIC = "application/merge-patch+json", "application/strategic-merge-patch+json"


class Try(NamedTuple):
    """A request of the tenant. ``words``: text of the expected refusal, or "" if the API server accepts the request."""

    method: str
    path: str
    body: Any
    words: str
    kind: str = "application/json"


def said(api: Any, one: Try) -> str:
    """Makes the request and returns the API server's refusal, or "" if it accepts the request."""
    try:
        api.call(one.method, one.path, one.body, one.kind)
    except ApiError as fault:
        assert fault.code < 500, f"{one}: expected success or a refusal (4xx), found {fault}"
        return str(fault)
    return ""


def judged(api: Any, tries: list[Try]) -> None:
    wrong = []
    for one in tries:
        found = said(api, one)
        if one.words not in found or bool(found) is not bool(one.words):
            wrong.append(
                f"{one.method} {one.path} {json.dumps(one.body)[:300]}: expected {one.words!r}, found {found!r}"
            )
    assert not wrong, "\n".join(wrong)


def gpu_pod(name: str, limits: Any = None, labels: Any = None, notes: Any = None, **spec: Any) -> dict[str, Any]:
    limits = {GPU: 1, MEM: 3000} if limits is None else limits
    metadata = {"name": name, "labels": labels or {}, "annotations": notes or {}}
    return {"metadata": metadata, "spec": {"containers": [container("main", limits)], **spec}}


def spec_of(one: dict[str, Any], kind: str = "containers") -> dict[str, Any]:
    return {"spec": {kind: [one]}}


def part(memory: int, uuid: str = "GPU-a-0") -> str:
    devices = (pod_annotations.Device(uuid, memory, 0),)
    return pod_annotations.write_plan([pod_annotations.Part("main", pod_annotations.APP, devices)])


def holds(fleet: Any, name: str, memory: int, uuid: str = "GPU-a-0") -> None:
    """Asserts that the pod has this memory on this GPU, by its plan annotation (the scheduler's choice) and by the
    leading scheduler's ledger (its count of used memory)."""
    (one,) = pod_annotations.read_plan(fleet.get(name)["metadata"]["annotations"][pod_annotations.PLAN])
    assert [(device.uuid, device.memory_mib) for device in one.devices] == [(uuid, memory)]
    assert f"{uuid}: {memory} MiB" in fleet.explain(name), fleet.explain(name)


class Neighbour:
    def __init__(self, fleet: Any) -> None:
        self.fleet = fleet

    def make(self, name: str, limits: Any, **more: Any) -> dict[str, Any]:
        made: dict[str, Any] = self.fleet.api.create(f"{NEIGHBOUR}/pods", gpu_pod(name, limits, **more))
        return made

    def get(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.fleet.api.get(f"{NEIGHBOUR}/pods/{name}")
        return found

    def bound(self, name: str, limits: Any, **more: Any) -> list[tuple[str, int]]:
        """Creates a pod, waits until it is bound, and returns (GPU, MiB) of each device of its plan."""
        self.make(name, limits, **more)
        until(
            lambda: self.get(name)["spec"].get("nodeName"),
            f"node of the neighbour's pod {name}; the pod: {self.get(name)}",
        )
        text = self.get(name)["metadata"]["annotations"][pod_annotations.PLAN]
        return [(one.uuid, one.memory_mib) for item in pod_annotations.read_plan(text) for one in item.devices]


def impersonated(api: Any, user: str, one: Try) -> str:
    plain = api._opener.addheaders
    api._opener.addheaders = [*plain, ("Impersonate-User", user)]
    try:
        return said(api, one)
    finally:
        api._opener.addheaders = plain


def mounts_of(made: dict[str, Any]) -> list[str]:
    mounts = made["spec"]["containers"][0].get("volumeMounts") or []
    return [one["mountPath"] for one in mounts if "serviceaccount" not in one["mountPath"]]
