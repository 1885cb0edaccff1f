# SPDX-License-Identifier: Apache-2.0
"""A double of the Kubernetes API as the device plugin of one node uses it."""

from __future__ import annotations

from typing import Any

from doubles.kube_api import KubeApi, Object

LABEL = "nvidia.com/device-plugin.config"
NODE = "/api/v1/nodes/node-1"


class NodeApi(KubeApi):
    """An API server double with the node node-1."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        metadata = {"name": "node-1", "uid": "0ab1", "labels": {"kubernetes.io/os": "linux"}}
        status = {"conditions": [{"type": "Ready", "status": "True"}]}
        self.put(NODE, {"kind": "Node", "apiVersion": "v1", "metadata": metadata, "status": status})

    @property
    def node(self) -> Object:
        return self.objects[NODE]

    @property
    def annotations(self) -> dict[str, str]:
        return self.node["metadata"].get("annotations") or {}

    def label(self, name: str | None) -> None:
        with self.edit(NODE) as node:
            node["metadata"]["labels"].pop(LABEL, None)
            if name is not None:
                node["metadata"]["labels"][LABEL] = name

    def condition(self) -> Object:
        return next((one for one in self.node["status"]["conditions"] if one["type"] == "VgpuConfiguration"), {})

    def add_pod(self, name: str, uid: str, annotations: dict[str, str], **more: Any) -> None:
        metadata = {"namespace": "default", "name": name, "uid": uid, "annotations": annotations}
        metadata["creationTimestamp"] = f"2026-11-21T10:00:00.{self.version:09d}Z"
        pod = {"kind": "Pod", "metadata": metadata, "spec": {}, "status": {}, **more}
        pod["spec"].setdefault("nodeName", "node-1")
        self.put(pod_path(name), pod)


def pod_path(name: str) -> str:
    return f"/api/v1/namespaces/default/pods/{name}"
