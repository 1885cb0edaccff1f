# SPDX-License-Identifier: Apache-2.0
"""Tests the comparison of a node's slices (parts of a GPU) with the numbers that Kubernetes shows for the node
(capacity, allocatable, requests of its pods). Tables test the functions. A small API server, which returns lists in
pages, tests the module kube_capacity_info.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.vgpu.fleet.plugins.module_utils.capacity import cluster as capacity_cluster
from ansible_collections.vgpu.fleet.plugins.module_utils.capacity import tables
from doubles.kube_api import KubeApi, write_kubeconfig

ROOT = Path(__file__).resolve().parents[5]
GPU = "nvidia.com/gpu"
NODE = "/api/v1/nodes/n1"


def node(capacity=4, allocatable=4, ready="True", name="n1"):
    shown = {"capacity": {"cpu": "8"}, "allocatable": {"cpu": "8"}, "conditions": [{"type": "Ready", "status": ready}]}
    if capacity is not None:
        shown["capacity"][GPU], shown["allocatable"][GPU] = str(capacity), str(allocatable)
    return {"metadata": {"name": name}, "status": shown}


def container(count=0, **more):
    return {"name": "c", "resources": {"limits": {GPU: str(count)}} if count else {}, **more}


def pod(name, *counts, phase="Running", init=(), on="n1"):
    return {
        "metadata": {"name": name, "namespace": "work"},
        "spec": {"nodeName": on, "containers": [container(one) for one in counts], "initContainers": list(init)},
        "status": {"phase": phase},
    }


SIDECAR = {"restartPolicy": "Always"}
# columns: label, the pod; expected number of GPUs that it requests
ASKED = [
    ("pod without any field", {}, 0),
    ("init containers null", {"spec": {"containers": [container(2)], "initContainers": None}}, 2),
    ("limits or resources null", {"spec": {"containers": [{"resources": {"limits": None}}, {"resources": None}]}}, 0),
    ("limit that is not a whole number", {"spec": {"containers": [{"resources": {"limits": {GPU: "1k"}}}]}}, 0),
    ("the larger of two init containers", pod("a", 1, init=[container(3), container(2)]), 3),
    ("a sidecar after a larger init container", pod("a", 1, init=[container(3), container(1, **SIDECAR)]), 3),
    ("two sidecars", pod("a", 1, init=[container(1, **SIDECAR), container(2, **SIDECAR)]), 4),
    ("a sidecar between init containers", pod("a", init=[container(2), container(1, **SIDECAR), container(2)]), 3),
    ("pod without a GPU", pod("a", 0), 0),
    ("two containers", pod("a", 1, 2), 3),
    ("a container with a GPU and one without", pod("a", 1, 0), 1),
    ("init container larger than the container", pod("a", 1, init=[container(2)]), 2),
    ("init container smaller than the container", pod("a", 3, init=[container(2)]), 3),
    ("sidecar and a container", pod("a", 1, init=[container(1, restartPolicy="Always")]), 2),
    ("an init container after a sidecar", pod("a", 1, init=[container(1, restartPolicy="Always"), container(2)]), 3),
]


@pytest.mark.parametrize(("about", "one", "count"), ASKED)
def test_pod_request_counts_init_containers_and_sidecars(about, one, count):
    assert capacity_cluster.asked(one, GPU) == count


OFFERED = {"resources": {GPU: 4}, "withheld": 0}
# columns: label, the node in Kubernetes (None: not in the cluster), its pods, number of slices that the kubelet does
# not offer; expected subject of each reported difference (fault). The device plugin has four slices.
SHOWN = [
    ("all agree", node(), [pod("a", 1), pod("b", 3)], 0, []),
    ("node missing in Kubernetes", None, [], 0, ["Kubernetes"]),
    ("node not ready", node(ready="Unknown"), [], 0, ["Kubernetes"]),
    ("one slice too many", node(5, 5), [], 0, ["Kubernetes capacity"]),
    ("one slice too few", node(3, 3), [], 0, ["Kubernetes capacity"]),
    ("resource missing on the node", node(None), [], 0, ["Kubernetes capacity"]),
    ("unhealthy slice that the node does not report", node(4, 3), [], 0, ["Kubernetes allocatable"]),
    ("unhealthy slice that the node reports", node(4, 3), [], 1, []),
    ("more slices allocated than exist", node(), [pod("a", 3), pod("b", 2)], 0, ["Kubernetes allocated"]),
    ("all slices allocated", node(), [pod("a", 4)], 0, []),
    ("more unhealthy slices than the node reports", node(4, 2), [], 1, ["Kubernetes allocatable"]),
    ("more slices allocatable than the node reports", node(4, 4), [], 2, []),
    ("allocatable null", {"status": {**node()["status"], "allocatable": None}}, [], 0, []),
    ("node not ready, and one slice too few", node(3, 3, ready="False"), [], 0, ["Kubernetes", "Kubernetes capacity"]),
    ("node without any field", {}, [], 0, ["Kubernetes", "Kubernetes capacity"]),
    ("failed pod, whose slices are free", node(), [pod("a", 3), pod("b", 2, phase="Failed")], 0, []),
    (
        "pending pod, whose slices are allocated",
        node(),
        [pod("a", 3), pod("b", 2, phase="Pending")],
        0,
        ["Kubernetes allocated"],
    ),
    ("finished pod, whose slices are free", node(), [pod("a", 3), pod("b", 2, phase="Succeeded")], 0, []),
]


@pytest.mark.parametrize(("about", "shown", "pods", "withheld", "what"), SHOWN)
def test_differences_between_plugin_and_kubernetes(about, shown, pods, withheld, what):
    seen = capacity_cluster.facts(shown, pods, [GPU])
    found = capacity_cluster.compare("n1", seen, dict(OFFERED, withheld=withheld))
    assert [one["what"] for one in found] == what
    assert all(one["remedy"] and "n1" in one["where"] for one in found)


# columns: number of slices that the kubelet does not offer (None: unknown); expected number of allocatable slices
@pytest.mark.parametrize(("withheld", "expected"), [(None, "at least 4"), (0, "at least 4"), (1, "at least 3")])
def test_allocatable_slices_are_expected_without_the_withheld_ones(withheld, expected):
    seen = capacity_cluster.facts(node(4, 2), [], [GPU])
    (one,) = capacity_cluster.compare("n1", seen, dict(OFFERED, withheld=withheld))
    assert (one["what"], one["expected"]) == ("Kubernetes allocatable", expected)


# columns: slices in the node's capacity (None: no such resource; 1k: no whole number); expected words in the difference
@pytest.mark.parametrize(("shown", "found"), [(None, "none"), ("1k", "none"), (0, 0), (3, 3)])
def test_difference_of_the_capacity_names_what_was_found(shown, found):
    (one,) = capacity_cluster.compare("n1", capacity_cluster.facts(node(shown, shown), [], [GPU]), OFFERED)
    assert (one["what"], one["expected"], one["found"]) == ("Kubernetes capacity", "4", str(found))


def test_node_readiness_ignores_other_conditions():
    pressure = {"type": "MemoryPressure", "status": "False"}
    for conditions in ([pressure, *node()["status"]["conditions"]], [*node()["status"]["conditions"], pressure]):
        shown = {"status": {**node()["status"], "conditions": conditions}}
        assert capacity_cluster.facts(shown, [], [GPU])["ready"] is True
    assert (
        capacity_cluster.facts({"status": {**node()["status"], "conditions": [pressure]}}, [], [GPU])["ready"] is False
    )


def test_facts_list_the_devices_of_each_pod():
    seen = capacity_cluster.facts(node(), [pod("a", 1), pod("idle", 0), pod("b", 2, phase="Pending")], [GPU])
    assert seen["resources"] == {GPU: {"capacity": 4, "allocatable": 4, "allocated": 3}}
    assert [(one["pod"], one["count"], one["phase"]) for one in seen["pods"]] == [
        ("work/a", 1, "Running"),
        ("work/b", 2, "Pending"),
    ]


CAPACITY = {
    "ok": True,
    "resources": [GPU],
    "expected": [{"id": f"GPU-a::{n}", "resource": GPU} for n in range(4)],
    "advertised": [f"GPU-a::{n}" for n in range(4)],
    "drift": [],
    "sentences": [],
    "missing": {},
}


def test_offered_slices_of_a_node():
    assert capacity_cluster.offered(CAPACITY) == OFFERED
    assert capacity_cluster.offered(dict(CAPACITY, advertised=["GPU-a::0"]))["withheld"] == 3
    told_twice = dict(CAPACITY, advertised=[*CAPACITY["advertised"], "GPU-b::0"])
    assert capacity_cluster.offered(told_twice)["withheld"] == 0
    two = dict(CAPACITY, resources=[GPU, "nvidia.com/mig"])
    assert capacity_cluster.offered(two)["resources"] == {GPU: 4, "nvidia.com/mig": 0}
    assert capacity_cluster.offered({}) == {"resources": {}, "withheld": 0}


def test_node_with_claims_offers_no_resource():
    """Pods get the slices of this node by claims, so the kubelet knows no GPU resource of it."""
    assert capacity_cluster.offered(dict(CAPACITY, resources=[], claims=[]))["resources"] == {}


DRIFT = {"what": "Kubernetes capacity", "where": "n1", "expected": "4", "found": "5", "remedy": "wait"}


def test_differences_of_kubernetes_join_the_list_of_the_node():
    seen = {"found": True, "ready": True, "resources": {}, "pods": [], "drift": [DRIFT]}
    found = tables.with_kubernetes(CAPACITY, {"nodes": {"n1": seen}, "missing": ""}, "n1")
    said = "Kubernetes capacity n1: expected 4, found 5; wait"
    assert (found["ok"], found["drift"], found["sentences"]) == (False, [DRIFT], [said])
    own = dict(DRIFT, what="library")
    both = dict(CAPACITY, ok=False, drift=[own], sentences=["the library is missing"])
    found = tables.with_kubernetes(both, {"nodes": {"n1": seen}}, "n1")
    assert (found["drift"], found["sentences"]) == ([own, DRIFT], ["the library is missing", said])
    assert CAPACITY["drift"] == []


@pytest.mark.parametrize(
    ("kube", "why"),
    [({"skipped": True}, "not asked"), ({"nodes": {}, "missing": "no rights"}, "no rights"), (None, "not asked")],
)
def test_unqueried_kubernetes_is_a_missing_source(kube, why):
    found = tables.with_kubernetes(dict(CAPACITY, missing={"ledgers": "not queried"}), kube, "n1")
    assert (found["ok"], found["missing"]) == (True, {"ledgers": "not queried", "kubernetes": why})


@pytest.mark.parametrize(("kubelet", "ok"), [(False, True), (True, False)])
def test_host_without_a_kubelet_may_be_missing_in_kubernetes(kubelet, ok):
    """vgpu_kubeconfig may be set before the kubelet is installed, so a node missing in Kubernetes is a difference only
    on a host with a kubelet."""
    seen = {"found": False, "ready": False, "resources": {}, "pods": [], "drift": [DRIFT]}
    found = tables.with_kubernetes(dict(CAPACITY, ok=True, kubelet=kubelet), {"nodes": {"n1": seen}}, "n1")
    assert (found["ok"], "kubernetes" in found["missing"]) == (ok, ok)


@pytest.fixture
def cluster(tmp_path):
    with KubeApi() as api:
        api.page = 2
        for one in (node(), node(name="other")):
            api.put(f"/api/v1/nodes/{one['metadata']['name']}", one)
        for one in (pod("a", 1), pod("b", 1), pod("elsewhere", 4, on="other")):
            api.put(f"/api/v1/namespaces/work/pods/{one['metadata']['name']}", one)
        api.kubeconfig = str(write_kubeconfig(tmp_path / "kubeconfig", api.url))
        yield api


def module(cluster, timeout=0, **more):
    given = {"kubeconfig": cluster.kubeconfig, "timeout": timeout, "nodes": {"n1": CAPACITY}, **more}
    done = subprocess.run(
        [sys.executable, "-m", "ansible_collections.vgpu.fleet.plugins.modules.kube_capacity_info"],
        input=json.dumps({"ANSIBLE_MODULE_ARGS": given}),
        env={**os.environ, "PYTHONPATH": str(ROOT / ".build" / "collections")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def test_module_lists_all_nodes_once_in_pages(cluster):
    found = module(cluster, nodes={"n1": CAPACITY, "gone": CAPACITY})
    assert found["missing"] == ""
    assert found["nodes"]["n1"]["drift"] == []
    assert found["nodes"]["n1"]["resources"][GPU]["allocated"] == 2
    assert [one["what"] for one in found["nodes"]["gone"]["drift"]] == ["Kubernetes"]
    # the list of pods has two pages, so it takes two requests
    assert [path for _method, path in cluster.calls] == ["/api/v1/nodes", "/api/v1/pods", "/api/v1/pods"]


def test_module_waits_for_the_kubelet_to_report(cluster):
    cluster.put(NODE, node(2, 2))
    found = module(cluster)
    assert [one["what"] for one in found["nodes"]["n1"]["drift"]] == ["Kubernetes capacity"]
    calls = len(cluster.calls)

    def report(_method, _path):
        """Simulates a kubelet that reports the node's capacity some time after the plugin: sets the full capacity at
        the fifth call."""
        if len(cluster.calls) == calls + 5:
            cluster.put(NODE, node())

    cluster.fault = report
    assert module(cluster, timeout=60)["nodes"]["n1"]["drift"] == []


@pytest.mark.parametrize(("status", "words"), [(403, "answered 403"), (500, "answered 500")])
def test_api_server_that_refuses_is_a_missing_source(cluster, status, words):
    cluster.fault = lambda _method, _path: status
    found = module(cluster)
    assert words in found["missing"]
    assert (found["nodes"], found.get("failed", False)) == ({}, False)


def test_absent_kubeconfig_is_a_missing_source(cluster):
    found = module(cluster, kubeconfig="/nonexistent/kubeconfig")
    assert "/nonexistent/kubeconfig" in found["missing"]


RESOURCES = "/apis/resource.k8s.io/v1"
BY_CLAIMS = {
    **CAPACITY,
    "resources": [],
    "claims": [{"uuid": "GPU-a", "shared": True, "memory_mib": 15360, "slots": 2}],
}


def test_module_compares_resource_slices_of_nodes_with_claims(cluster):
    assert not [path for _method, path in cluster.calls if RESOURCES in path]
    device = {
        "name": "gpu-a",
        "attributes": {"uuid": {"string": "GPU-a"}},
        "allowMultipleAllocations": True,
        "capacity": {"memory": {"value": "15Gi"}, "slots": {"value": "2"}},
    }
    pool = {"name": "n1", "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": "gpu.vgpu.fleet", "nodeName": "n1", "pool": pool, "devices": [device]}
    result = {"driver": "gpu.vgpu.fleet", "pool": "n1", "request": "gpu", "device": "gpu-a"}
    claim = {
        "metadata": {"namespace": "work", "name": "c"},
        "status": {
            "allocation": {"devices": {"results": [result]}},
            "reservedFor": [{"resource": "pods", "name": "a"}],
        },
    }
    cluster.put(f"{RESOURCES}/namespaces/work/resourceclaims/c", claim)
    found = module(cluster, nodes={"n1": BY_CLAIMS})["nodes"]["n1"]
    assert [(one["what"], one["found"]) for one in found["drift"]] == [("ResourceSlices", "none")]
    cluster.put(f"{RESOURCES}/resourceslices/s", {"metadata": {"name": "s"}, "spec": spec})
    found = module(cluster, nodes={"n1": BY_CLAIMS, "other": CAPACITY})["nodes"]["n1"]
    assert found["drift"] == []
    assert found["pods"] == [{"pod": "work/a", "resource": "claim c", "count": 1, "phase": "Running"}]
