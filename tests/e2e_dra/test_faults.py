# SPDX-License-Identifier: Apache-2.0
"""Tests pods with ResourceClaims during faults, and pods that request a GPU by an extended resource.

The faults are a GPU with an Xid error, a reboot, a killed API server, and an API server without the feature of shared
devices. In the last test one node offers its GPUs by claims and the other node offers slices (parts of a GPU) of the
device plugin.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from conftest import CLAIMS, CLASSES, ON, Claim, devices, minor, pod
from kubebox import pods, power
from kubebox.cluster import Cluster
from kubebox.gpunode import MIB, GpuNode
from kubebox.process import until
from kubebox.programs import Programs
from test_claims import FILL, GIB, records, used

NUMBER = "nvidia.com/gpu"
PODS, HOST = "/api/v1/namespaces/default/pods", "kubernetes.io/hostname"


def allocated(cluster: Cluster, name: str) -> list[str]:
    """Returns the names of the devices allocated to a claim."""
    found = (cluster.api.get(f"{CLAIMS}/{name}").get("status") or {}).get("allocation") or {}
    return [one["device"] for one in (found.get("devices") or {}).get("results") or ()]


def tainted(cluster: Cluster) -> dict[str, str]:
    """Returns device → value of its taint, for all tainted devices."""
    found = devices(cluster).items()
    return {name: one["taints"][0]["value"] for name, one in found if one.get("taints")}


def test_a_gpu_with_an_xid_gets_no_claim_until_it_is_clean(cluster: Cluster, node: GpuNode, claim: Claim) -> None:
    first = pod(cluster, "first", claim("c0", gpu={"memory": "2Gi", "cores": "10"}), command=FILL).wait_running()
    (ill,) = allocated(cluster, "c0")
    index = [gpu["uuid"][:12] for gpu in node.status()["gpus"]].index(f"GPU-{ill.removeprefix('gpu-')}")
    node.gpusimctl("xid", str(index), "79")
    until(lambda: tainted(cluster) == {ill: "xid-79"}, f"taint xid-79 of device {ill}, and of no other device")
    # The healthy GPU has memory for only one of the two claims.
    for n in (1, 2):
        pod(cluster, f"p{n}", claim(f"c{n}", gpu={"memory": "8Gi", "cores": "10"}), command=FILL)
    until(
        lambda: len(allocated(cluster, "c1") + allocated(cluster, "c2")) == 1,
        "allocation of a device to one of the claims c1 and c2",
    )
    assert ill not in allocated(cluster, "c1") + allocated(cluster, "c2")
    waits = pods.Pod(cluster, "p2" if allocated(cluster, "c1") else "p1")
    until(waits.why_not_scheduled, f"message of the scheduler why pod {waits.name} waits")
    until(lambda: not tainted(cluster), "removal of all taints of devices")
    waits.wait_running()
    assert first.phase in ("Running", "Failed")


@pytest.mark.parametrize("order", ["plugin", "kubelet"])
def test_pods_start_again_after_a_boot(cluster: Cluster, node: GpuNode, claim: Claim, order: str) -> None:
    """Pods with claims start again whether the driver or the kubelet starts first (``order``).

    If the kubelet starts first, the pods wait for the driver; pods with slices of a device plugin would fail.
    """
    name = claim("c", gpu={"memory": "2Gi", "cores": "10"})
    one = pod(cluster, "one", name, command=FILL, restart="Always").wait_running()
    one.wait_log(r"^took 1: 2$")
    before, uid = records(), one.uid

    power.cut(cluster, node)
    power.boot_runtime(cluster)
    if order == "plugin":
        power.boot_programs(node)
        cluster.kubelet.start()
    else:
        cluster.kubelet.start()
        until(cluster.node_ready, "readiness of the node after the boot")
        assert one.phase in ("Running", "Pending") and used(node) == {}
        node.start()

    until(
        lambda: list(used(node).values()) == [2 * GIB],
        f"process that fills 2 GiB again; the pod before: {one.object()['status']}",
    )
    assert one.uid == uid and one.restarts() >= 1
    assert [record["id"] for record in records()] == [record["id"] for record in before]


def test_a_killed_api_server_ends_no_running_pod(cluster: Cluster, node: GpuNode, claim: Claim) -> None:
    """A running pod keeps running, and a pod whose claim was being prepared starts after the server is back."""
    one = pod(cluster, "one", claim("c", gpu={"memory": "2Gi", "cores": "10"}), command=FILL).wait_running()
    one.wait_log(r"^took 1: 2$")
    (pid,) = one.pids()
    pod(cluster, "late", claim("d", gpu={"memory": "1Gi", "cores": "10"}), command=FILL)
    until(lambda: allocated(cluster, "d"), "allocation of a device to claim d")
    cluster.apiserver.stop(kill=True)
    assert used(node)[pid] == 2 * GIB
    cluster.apiserver.start()
    until(cluster._api_ready, "ready API server after its start")
    pods.Pod(cluster, "late").wait_running()
    assert used(node)[pid] == 2 * GIB and sorted(used(node).values()) == [GIB, 2 * GIB]


@pytest.fixture
def without_shares(cluster: Cluster, node: GpuNode) -> Iterator[None]:
    """Restarts the API server so that it drops the fields of shared devices, as Kubernetes 1.34 and 1.35 do by
    default."""
    command = list(cluster.apiserver.command)

    def again(words: list[str]) -> None:
        node.plugin.stop()
        for path in devices_path(cluster):
            cluster.api.delete(path)
        cluster.apiserver.stop(kill=True)
        cluster.apiserver.command = words
        cluster.apiserver.start()
        until(cluster._api_ready, "ready API server after its start")
        node.start()

    if minor(Programs.from_environment()) < 36:
        pytest.skip("before 1.36 these tests enable the feature gate for the whole cluster")
    again([*command, "--feature-gates", "DRAConsumableCapacity=false"])
    yield
    again(command)
    until(lambda: len(devices(cluster)) == 2, "ResourceSlices with both GPUs after the fixture restored the API server")


def devices_path(cluster: Cluster) -> list[str]:
    found = cluster.api.get("/apis/resource.k8s.io/v1/resourceslices")["items"]
    return [f"/apis/resource.k8s.io/v1/resourceslices/{one['metadata']['name']}" for one in found]


def test_no_resource_slice_if_the_api_server_drops_the_fields(cluster: Cluster, node: GpuNode, without_shares) -> None:
    def said() -> list[str]:
        return [one for one in node.status()["warnings"] if "DRAConsumableCapacity" in one]

    until(said, "warning of the driver that names the feature gate DRAConsumableCapacity")
    assert devices(cluster) == {}


@pytest.fixture
def by_number(cluster: Cluster) -> Iterator[None]:
    """Creates a DeviceClass with which Kubernetes creates a claim for each pod that requests `nvidia.com/gpu`."""
    if minor(Programs.from_environment()) < 36:
        pytest.skip("this version of Kubernetes ignores the extended resource of a DeviceClass")
    spec = {"selectors": [{"cel": {"expression": ON}}], "extendedResourceName": NUMBER}
    body = {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": "by-number"}, "spec": spec}
    cluster.api.create(CLASSES, body)
    yield
    pods.delete_all(cluster)
    cluster.api.delete(f"{CLASSES}/by-number")


def test_a_pod_with_an_extended_resource_gets_equal_slices(cluster: Cluster, node: GpuNode, by_number: Any) -> None:
    two = pods.create(cluster, pods.manifest("two", pods.container([pods.WORKER, "fill"], slices=2))).wait_running()
    assert int(two.wait_log(r"^total (\d+)$")[1]) == 3840 * MIB
    claims = cluster.api.get(CLAIMS)["items"]
    results = [one["device"] for claim in claims for one in claim["status"]["allocation"]["devices"]["results"]]
    assert len(set(results)) == len(results) == 2, f"expected shares of two different GPUs, found {results}"


@pytest.fixture
def by_plugin(cluster: Cluster) -> Iterator[str]:
    """Creates a node that exists only as an API object with a capacity of two slices; yields its name."""
    name = "by-plugin"
    amounts = {"cpu": "8", "memory": "64Gi", "pods": "110", NUMBER: "2"}
    status = {"capacity": amounts, "allocatable": amounts}
    cluster.api.create("/api/v1/nodes", {"metadata": {"name": name, "labels": {HOST: name}}})
    cluster.api.patch(f"/api/v1/nodes/{name}/status", {"status": status})
    yield name
    for one in cluster.api.get(PODS)["items"]:
        if one["spec"].get("nodeName", name) == name:
            # No kubelet runs on this node, so the fixture deletes the pods itself.
            cluster.api.delete(f"{PODS}/{one['metadata']['name']}", 0)
    cluster.api.delete(f"/api/v1/nodes/{name}")


def test_a_pod_gets_a_slice_on_one_node_and_a_claim_on_the_other(
    cluster: Cluster, node: GpuNode, by_number: Any, by_plugin: str
) -> None:
    """The same pod gets a slice of the device plugin on one node and a claim on the other node."""

    def asks(name: str, **spec: Any) -> pods.Pod:
        container = pods.container([pods.WORKER, "fill"], slices=1)
        # Nothing renews the lease of the node without a kubelet, so the pods tolerate every taint of the node.
        return pods.create(cluster, pods.manifest(name, container, tolerations=[{"operator": "Exists"}], **spec))

    def rides_on(one: pods.Pod) -> str:
        status = one.object()["status"].get("extendedResourceClaimStatus") or {}
        return str(status.get("resourceClaimName", ""))

    there = {"nodeSelector": {HOST: by_plugin}}
    sliced = [asks(f"sliced-{n}", **there) for n in range(2)]
    for one in sliced:
        until(lambda one=one: one.object()["spec"].get("nodeName") == by_plugin, f"{one.name} on {by_plugin}")
    assert [rides_on(one) for one in sliced] == ["", ""] and cluster.api.get(CLAIMS)["items"] == []
    full = asks("full", **there)
    until(
        lambda: f"Insufficient {NUMBER}" in full.why_not_scheduled(),
        f"message of the scheduler that node {by_plugin} has no free slice for pod full",
    )
    claimed = asks("claimed").wait_running()
    assert int(claimed.wait_log(r"^total (\d+)$")[1]) == 3840 * MIB
    assert [one["metadata"]["name"] for one in cluster.api.get(CLAIMS)["items"]] == [rides_on(claimed)]
