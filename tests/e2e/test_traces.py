# SPDX-License-Identifier: Apache-2.0
"""Tests that the real kubelet's calls to a device plugin match the recorded trace, with which tests/unit/plugin checks
the kubelet double. ``VGPU_E2E_RECORD=1`` writes a new trace instead.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from kubebox import pods
from kubebox.cluster import Cluster
from kubebox.gpunode import CHECKPOINT
from kubebox.process import until
from kubetrace import scenario

WAIT = ["/bin/sh", "-c", "while :; do sleep 1; done"]


class RealKubelet:
    """The cluster's kubelet, with the interface that scenario.py expects."""

    folder = CHECKPOINT.parent
    pod_resources = CHECKPOINT.parent.parent / "pod-resources" / "kubelet.sock"

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def run_pod(self, name: str, count: int, init_container: bool) -> str:
        main = pods.container(WAIT, count, resource=scenario.RESOURCE)
        more = {}
        if init_container:
            more["initContainers"] = [pods.container(["/bin/true"], count, name="init", resource=scenario.RESOURCE)]
        body = pods.manifest(name, main, restart="Always", **more)
        body["spec"]["volumes"] = []
        for one in [main, *more.get("initContainers", [])]:
            one["volumeMounts"] = []
        pod = pods.create(self.cluster, body)
        until(lambda: pod.running() or pod.phase == "Failed", f"pod {name} that runs or has failed")
        if pod.running():
            return "Running"
        status = pod.object()["status"]
        return f"{status['reason']}: {status['message']}"

    def crash(self, name: str) -> None:
        pod = pods.Pod(self.cluster, name)
        before = pod.restarts()
        for pid in pod.pids():
            os.kill(pid, signal.SIGKILL)
        until(lambda: pod.restarts() > before and pod.running(), f"restart of pod {name}")

    def delete_pod(self, name: str) -> None:
        pods.Pod(self.cluster, name).delete()

    def restart(self) -> None:
        socket = Path(self.folder, "kubelet.sock")
        before = socket.stat().st_ino
        self.cluster.kubelet.stop(kill=True)
        self.cluster.kubelet.start()
        until(lambda: socket.exists() and socket.stat().st_ino != before, "new socket of the kubelet")
        until(self.pod_resources.exists, "PodResources socket of the kubelet")
        until(self.cluster.node_ready, "readiness of the node after the restart of the kubelet")

    def allocatable(self) -> int:
        return self.cluster.allocatable(scenario.RESOURCE)


def test_kubelet_behaves_as_recorded(cluster):
    """The project's plugin does not run during this test, because its device list would make the kubelet write its
    checkpoint more often.
    """
    version = cluster.node_object()["status"]["nodeInfo"]["kubeletVersion"]
    steps = scenario.Story(RealKubelet(cluster)).tell()
    if os.environ.get("VGPU_E2E_RECORD"):
        scenario.TRACE.write_text(json.dumps({"kubelet": version, "steps": steps}, indent=1, sort_keys=True) + "\n")
    assert scenario.differences(scenario.recorded()["steps"], steps) == []
