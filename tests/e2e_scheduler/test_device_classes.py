# SPDX-License-Identifier: Apache-2.0
"""Tests the scheduler next to another driver whose DeviceClass maps ``nvidia.com/gpu``, as NVIDIA's and HAMi's do. From
Kubernetes 1.36 on, the kube-scheduler then requires that the node or a DeviceClass lists every extended resource of a
pod. The device plugin therefore adds its resource names to the node's capacity. No plugin runs here, so the tests
add the names.
"""

from __future__ import annotations

import pytest
from vgpu_plugin._shared.pods import annotations as pod_annotations
from vgpu_plugin.reconcile import node_capacity

GPU, MEM, CORES = "nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpucores"
CLASSES = "/apis/resource.k8s.io/v1/deviceclasses"
CLASS = "gpu.example.com"
SINCE = (1, 36)

# columns: the case, limits and labels of the pod; expected (MiB, percent of the SMs) of each GPU
ASKED = [
    ("hami", {GPU: 1, MEM: 3000, CORES: 30}, {}, [(3000, 30)]),
    ("hami-percent", {"nvidia.com/gpumem-percentage": 50}, {}, [(8080, 0)]),
    ("hami-priority", {GPU: 1, MEM: 3000, "nvidia.com/priority": 1}, {}, [(3000, 0)]),
    ("alibaba", {"aliyun.com/gpu-mem": 8}, {"aliyun.com/gpu-count": "2"}, [(4309, 0), (4309, 0)]),
    ("tencent", {"tencent.com/vcuda-core": 50, "tencent.com/vcuda-memory": 30}, {}, [(7680, 50)]),
    ("nvidia", {GPU: 1}, {}, [(16160, 100)]),
    ("shared", {GPU + ".shared": 1}, {}, [(1616, 10)]),
]


@pytest.fixture(scope="module")
def version(fleet):
    """Returns (major, minor) of the control plane's version."""
    found = fleet.api.get("/version")
    return int(found["major"]), int(found["minor"].rstrip("+"))


@pytest.fixture
def mapped(fleet):
    """Creates another driver's DeviceClass that maps our resource name; no node has a device of it."""
    spec = {"extendedResourceName": GPU, "selectors": [{"cel": {"expression": f"device.driver == '{CLASS}'"}}]}
    fleet.api.create(CLASSES, {"metadata": {"name": CLASS}, "spec": spec})
    yield
    fleet.api.delete(f"{CLASSES}/{CLASS}")


def list_names(fleet, name):
    """Adds our resource names to a node's capacity, as the device plugin does."""
    path = f"/api/v1/nodes/{name}"
    node = fleet.api.get(path)
    gpus = pod_annotations.read_gpus(node["metadata"]["annotations"][pod_annotations.GPUS])
    change = node_capacity.patch(node, node_capacity.amounts(gpus, node_capacity.names_of({}), [GPU]))
    fleet.api.call("PATCH", f"{path}/status", change, "application/strategic-merge-patch+json")


@pytest.mark.parametrize(("name", "limits", "labels", "sizes"), ASKED, ids=[one[0] for one in ASKED])
def test_each_dialect_is_placed_on_a_node_that_lists_its_names(fleet, mapped, name, limits, labels, sizes):
    fleet.node("a")
    list_names(fleet, "a")
    fleet.pod(name, limits, labels=labels)
    node, plan = fleet.bound(name)
    assert (node, [(one.memory_mib, one.cores) for one in plan[0].devices]) == ("a", sizes)
    # The device plugin's slices (parts of a GPU) serve the pod: the kube-scheduler has created no claim of the other
    # driver's class.
    assert not fleet.get(name)["status"].get("extendedResourceClaimStatus")


def test_a_node_that_lists_no_names_fits_no_pod_next_to_such_a_class(fleet, version, mapped):
    """Negative control: from Kubernetes 1.36 on, a pod does not fit a node that does not list its resource names."""
    fleet.node("bare")
    fleet.pod("hami", {GPU: 1, MEM: 3000})
    if version < SINCE:
        assert fleet.bound("hami")[0] == "bare"
        return
    assert "cannot fit resource" in fleet.waits("hami")
    fleet.node("listed")
    list_names(fleet, "listed")
    assert fleet.bound("hami")[0] == "listed"
