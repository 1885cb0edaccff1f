# SPDX-License-Identifier: Apache-2.0
"""Tests that the real kubelet calls a driver for ResourceClaims as the recorded trace says. tests/unit/plugin checks
the kubelet double by the same trace. The driver here is kubetrace's recorder, which shares only gRPC code with the
project's driver. The project's driver runs at the same time. ``VGPU_E2E_RECORD=1`` writes a new trace instead.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import CLAIMS, CLASSES, SLICES, devices, minor, remove
from kubebox import pods
from kubebox.cluster import Cluster
from kubebox.gpunode import CHECKPOINT
from kubebox.process import until
from kubebox.programs import Programs
from kubetrace import claims_scenario as scenario
from kubetrace.claims_recorder import KIND

WAIT = ["/bin/sh", "-c", "while :; do sleep 1; done"]
CLASS = "traced"
SLICE = f"{SLICES}/0-{scenario.DRIVER}"
CDI = Path("/var/run/cdi")
# There are more devices than claims in the recorded steps, because a device is allocated again only after its former
# claim is deleted.
DEVICES = 32
# The kubelet checks once a second for new and removed sockets.
NOTICED_S = 10.0
WIPED_S = 30.0


class RealKubelet:
    """The cluster's kubelet, with the interface that claims_scenario.py expects."""

    root = CHECKPOINT.parent.parent

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._pods: dict[str, str] = {}

    def look(self) -> None:
        time.sleep(NOTICED_S)

    def make_claim(self, name: str, requests: tuple[str, ...]) -> str:
        edits = [{"name": f"{name}.{one}", "containerEdits": {"env": [f"TRACED={one}"]}} for one in requests]
        CDI.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"cdiVersion": "0.6.0", "kind": KIND, "devices": edits})
        (CDI / f"traced-{name}.json").write_text(text)
        asked = [{"name": one, "exactly": {"deviceClassName": CLASS}} for one in requests]
        spec = {"devices": {"requests": asked}}
        body = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": name}, "spec": spec}
        return self.cluster.api.create(CLAIMS, body)["metadata"]["uid"]

    def make_pod(self, name: str, claims: tuple[str, ...], containers: scenario.Containers, ends: bool) -> None:
        found = []
        for container, named in containers.items():
            body = pods.container(["/bin/true"] if ends else WAIT, slices=0, name=container)
            body["volumeMounts"] = []
            asked = [{"name": claim, **({"request": request} if request else {})} for claim, request in named]
            body["resources"] = {"claims": asked}
            found.append(body)
        sources = [{"name": one, "resourceClaimName": one} for one in claims]
        restart = "Never" if ends else "Always"
        pod = pods.create(
            self.cluster, pods.manifest(name, *found, restart=restart, resourceClaims=sources, volumes=[])
        )
        self._pods[pod.uid] = name

    def wait_running(self, name: str) -> None:
        pods.Pod(self.cluster, name).wait_running()

    def wait_ended(self, name: str) -> None:
        pods.Pod(self.cluster, name).wait_phase("Succeeded")

    def why_not(self, name: str, lasting: bool = False) -> str:
        def said() -> str:
            for one in self.cluster.api.get("/api/v1/namespaces/default/events")["items"]:
                # The node authorizer may learn of a new pod later than the kubelet, which then tries again.
                # With ``lasting`` the event must have occurred twice. An event without a count counts as one.
                known = "no relationship found" not in one["message"] and one.get("count", 1) > lasting
                if known and one["involvedObject"]["name"] == name and one["reason"] == "FailedPrepareDynamicResources":
                    return one["message"]
            return ""

        return until(said, f"event with the reason why pod {name} does not start")

    def injected(self, name: str) -> dict[str, list[str]]:
        """Returns container → CDI device names, from the container runtime's stored configuration."""
        found = {}
        for one in pods.Pod(self.cluster, name).statuses():
            identity = one["containerID"].rpartition("/")[2]
            info = json.loads(self.cluster.ctr("containers", "info", identity).stdout)
            stored = info["Extensions"]["io.cri-containerd.container.metadata"]["value"]
            config = json.loads(base64.b64decode(stored))["Metadata"]["Config"]
            found[one["name"]] = [device["name"] for device in config.get("CDI_devices", ())]
        return found

    def crash(self, name: str) -> None:
        pod = pods.Pod(self.cluster, name)
        before = pod.restarts()
        for pid in pod.pids():
            # If one process is killed, other processes of the pod may end too.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until(lambda: pod.restarts() > before and pod.running(), f"restart of pod {name}")

    def health(self, name: str) -> list[Any]:
        return [one.get("allocatedResourcesStatus") for one in pods.Pod(self.cluster, name).statuses()]

    def ask_to_end(self, name: str) -> None:
        pods.Pod(self.cluster, name).ask_to_end()

    def wait_gone(self, name: str) -> None:
        path = pods.Pod(self.cluster, name).path
        until(lambda: self.cluster.api.get_or_none(path) is None, f"deletion of pod {name}")

    def restart(self, removed: str) -> None:
        self.cluster.kubelet.stop(kill=True)
        self.cluster.api.delete(pods.Pod(self.cluster, removed).path, grace_s=0)
        self.cluster.kubelet.start()
        until(self.cluster.node_ready, "readiness of the node after the restart of the kubelet")

    def pods(self) -> dict[str, str]:
        return self._pods

    def publish(self) -> None:
        if self.published():
            return
        found = [{"name": f"d{n}"} for n in range(DEVICES)]
        pool = {"name": self.cluster.node, "generation": 1, "resourceSliceCount": 1}
        spec = {"driver": scenario.DRIVER, "nodeName": self.cluster.node, "pool": pool, "devices": found}
        name = SLICE.rpartition("/")[2]
        body = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": name}, "spec": spec}
        self.cluster.api.create(SLICES, body)

    def published(self) -> bool:
        return self.cluster.api.get_or_none(SLICE) is not None

    def outlast(self) -> None:
        time.sleep(WIPED_S + 5)


@pytest.fixture
def story(cluster: Cluster) -> Iterator[scenario.Story]:
    """Creates a DeviceClass for the recorder's devices and yields the object that runs the recorded steps; deletes all
    objects of the steps afterwards."""
    if minor(Programs.from_environment()) < 36:
        pytest.skip("the trace was recorded with a kubelet 1.36")
    selectors = [{"cel": {"expression": f"device.driver == '{scenario.DRIVER}'"}}]
    body = {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": CLASS}}
    cluster.api.create(CLASSES, {**body, "spec": {"selectors": selectors}})
    kubelet = RealKubelet(cluster)
    out = scenario.Story(kubelet)
    yield out
    # A pod ends only after the driver has unprepared its claims, so the recorder serves while the pods are deleted.
    out.plugin.stop()
    out.plugin.take(mend=True)
    out.plugin.serve()
    pods.delete_all(cluster)
    out.plugin.stop()
    for one in cluster.api.get(CLAIMS)["items"]:
        remove(cluster, one["metadata"]["name"])
    cluster.api.delete(f"{CLASSES}/{CLASS}")
    if kubelet.published():
        cluster.api.delete(SLICE)
    for one in CDI.glob("traced-*.json"):
        one.unlink()
    until(
        lambda: len(devices(cluster)) == 2,
        "ResourceSlices of the project's driver, which the kubelet deleted at its restart",
    )


def test_kubelet_asks_for_claims_as_recorded(story: scenario.Story, cluster: Cluster) -> None:
    version = cluster.node_object()["status"]["nodeInfo"]["kubeletVersion"]
    steps = story.tell()
    if os.environ.get("VGPU_E2E_RECORD"):
        scenario.TRACE.write_text(json.dumps({"kubelet": version, "steps": steps}, indent=1, sort_keys=True) + "\n")
    found = scenario.differences(scenario.recorded()["steps"], steps)
    assert not found, "\n".join(found)
