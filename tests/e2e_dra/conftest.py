# SPDX-License-Identifier: Apache-2.0
"""Fixtures of a cluster whose pods get GPUs by ResourceClaims, with the stock scheduler, the kubelet and the project's
driver. From Kubernetes 1.36 on, all feature gates have their defaults. In 1.34 consumable capacity, by
which several claims share one device, is alpha; the fixtures switch it on, so that most tests run on that version too.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
PLUGIN = HERE.parents[1] / "native" / "plugin"
sys.path[:0] = [str(HERE.parent / "e2e"), str(PLUGIN / "src")]
subprocess.run(["make", "-s", "-C", str(PLUGIN), "proto", f"PYTHON={sys.executable}"], check=True)

from kubebox import pods  # noqa: E402
from kubebox.api import ApiError  # noqa: E402
from kubebox.box import CGROUP_VARIABLE  # noqa: E402
from kubebox.cluster import WITH_CDI, Cluster  # noqa: E402
from kubebox.gpunode import LIBRARIES, GpuNode  # noqa: E402
from kubebox.process import until  # noqa: E402
from kubebox.programs import Programs  # noqa: E402

API = "/apis/resource.k8s.io/v1"
CLAIMS = f"{API}/namespaces/default/resourceclaims"
SLICES, CLASSES = f"{API}/resourceslices", f"{API}/deviceclasses"
ON = "device.driver == 'gpu.vgpu.fleet' && device.attributes['gpu.vgpu.fleet'].type == 'gpu'"
CONFIGURATION = {"vcuda": {"libraryRoot": str(LIBRARIES), "splitCount": 4, "sliceSizing": "requested"}}


def minor(programs: Programs) -> int:
    found = re.match(r"v1\.(\d+)\.", programs.kubernetes.name)
    assert found, programs.kubernetes
    return int(found[1])


@pytest.fixture(scope="session")
def started() -> Iterator[tuple[Cluster, GpuNode]]:
    if CGROUP_VARIABLE not in os.environ:
        pytest.fail("these tests need the box: run `make e2e-dra`")
    programs = Programs.from_environment()
    gates = ("DRAConsumableCapacity",) if minor(programs) < 36 else ()
    with Cluster(programs, os.environ[CGROUP_VARIABLE], controllers=True, gates=gates) as cluster:
        cluster.runtime = WITH_CDI
        cluster.containerd = cluster._containerd_service()
        node = GpuNode(programs, ["T4", "T4"], cluster.logs)
        node.furnish()
        cluster.start()
        node.plugin.command += ["--kubeconfig", str(cluster.folder / "pki" / "kubelet.conf")]
        node.plugin.command += ["--node-name", cluster.node, "--health-clean-period", "30"]
        node.configure(CONFIGURATION, {"allocation": "dra"})
        node.start()
        selectors = [{"cel": {"expression": ON}}]
        made = {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": "vgpu"}}
        cluster.api.create(CLASSES, {**made, "spec": {"selectors": selectors}})
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        until(lambda: cluster.api.get_or_none(account), "service account default, which a controller creates")
        until(
            lambda: len(devices(cluster)) == 2,
            f"ResourceSlices with both GPUs; the driver's log:\n{node.plugin.tail(20)}",
        )
        yield cluster, node
        node.stop()


@pytest.fixture
def cluster(started: tuple[Cluster, GpuNode]) -> Iterator[Cluster]:
    """Returns the cluster; deletes all pods and claims after the test."""
    yield started[0]
    pods.delete_all(started[0])
    for one in started[0].api.get(CLAIMS)["items"]:
        remove(started[0], one["metadata"]["name"])


@pytest.fixture
def node(started: tuple[Cluster, GpuNode]) -> GpuNode:
    return started[1]


def devices(cluster: Cluster) -> dict[str, Any]:
    """Returns device name → device of all ResourceSlices at the API server."""
    found = cluster.api.get(SLICES)["items"]
    return {one["name"]: one for part in found for one in part["spec"].get("devices") or ()}


def remove(cluster: Cluster, name: str) -> None:
    try:
        cluster.api.delete(f"{CLAIMS}/{name}")
    except ApiError as fault:
        if fault.code != 404:
            raise
    until(lambda: cluster.api.get_or_none(f"{CLAIMS}/{name}") is None, f"deletion of claim {name}")


Claim = Callable[..., str]


@pytest.fixture
def claim(cluster: Cluster) -> Claim:
    """Creates claims: ``claim("c", gpu={"memory": "4Gi"})`` makes a claim with the request "gpu" and returns "c"."""

    def make(name: str, config: list[dict[str, Any]] | None = None, **requests: dict[str, str]) -> str:
        asked = [
            {"name": one, "exactly": {"deviceClassName": "vgpu", "capacity": {"requests": capacity}}}
            for one, capacity in requests.items()
        ]
        spec = {"devices": {"requests": asked, **({"config": config} if config else {})}}
        body = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": name}, "spec": spec}
        cluster.api.create(CLAIMS, body)
        return name

    return make


def pod(
    cluster: Cluster, name: str, *claims: str, request: str = "", command: tuple[str, ...] = (), **spec: Any
) -> pods.Pod:
    """Creates a pod with one container that uses these claims, or only ``request`` of each claim."""
    container = pods.container([pods.WORKER, *command], slices=0)
    named = [{"name": one, **({"request": request} if request else {})} for one in claims]
    container["resources"] = {"claims": named}
    sources = [{"name": one, "resourceClaimName": one} for one in claims]
    return pods.create(cluster, pods.manifest(name, container, resourceClaims=sources, **spec))
