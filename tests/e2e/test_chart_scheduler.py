# SPDX-License-Identifier: Apache-2.0
"""Tests the project's Helm chart with its scheduler, installed with Helm and kubectl alone on a node that no playbook
has prepared. Pods that request memory are admitted, placed, limited and resized, and they burst beyond their guaranteed
memory. The pods of vgpu-scheduler also run the stock kube-scheduler, from an image that contains only its binary.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kubebox import deployments, pods
from kubebox.cluster import PODS
from kubebox.gpunode import MIB
from kubebox.pods import WORKER
from kubebox.process import until
from kubebox.programs import SCHEDULER_IMAGE
from test_chart import (  # noqa: F401  # pylint: disable=unused-import # fixtures
    LABEL,
    bare,
    before,
    chart,
    end_pods,
    files,
    kubectl,
    rendered,
    serves,
    traces,
    wait_until_clean,
)
from test_scheduler_pods import (
    DEPLOYMENT,
    GPU,
    MEM,
    REPOSITORY,
    load_images,
    our_pods,
    refused,
    remove_images,
    wait_until_ready,
)

SLOTS, CARD = 10, 15360
# Controllers that the fixture `bare` starts.
CONTROLLERS = ("daemonset-controller", *deployments.CONTROLLERS)


def values(cluster: Any) -> dict[str, Any]:
    return {
        "variables": {"vgpu_split_count": SLOTS, "vgpu_slice_sizing": "requested"},
        "scheduler": {
            "enabled": True,
            "image": SCHEDULER_IMAGE,
            "kubeSchedulerImage": f"{REPOSITORY}:{deployments.version(cluster)}",
        },
    }


@pytest.fixture(scope="module")
def installed(cluster, chart, bare, before) -> Iterator[Any]:  # noqa: F811
    """Installs the chart as a person does: applies what Helm renders, labels the node, and waits."""
    deployments.write_network(cluster)
    load_images(cluster)
    text = rendered(cluster, chart, **values(cluster))
    try:
        kubectl(cluster, "apply", "--server-side", "--filename=-", text=text)
        kubectl(cluster, "label", "node", cluster.node, f"{LABEL}=daemonset")
        serves(cluster, SLOTS)
        wait_until_ready(cluster, "two ready replicas")
        until(lambda: not refused(cluster, gpu_pod("try", {MEM: 1000})), "admission through the Service", 120)
        yield bare
    finally:
        pods.delete_all(cluster)
        kubectl(cluster, "delete", "--wait=false", "--ignore-not-found", "--filename=-", text=text)
        until(lambda: our_pods(cluster) == [], "deletion of the scheduler's pods")
        remove_images(cluster)
        deployments.network_file(cluster).unlink()


def gpu_pod(name: str, limits: dict[str, Any], notes: dict[str, str] | None = None, word: str = "fill") -> dict:
    container = pods.container([WORKER, word], slices=0)
    container["resources"] = {"limits": {key: str(value) for key, value in limits.items()}}
    body = pods.manifest(name, container)
    body["metadata"]["annotations"] = notes or {}
    return body


@pytest.fixture
def pod(cluster, installed) -> Iterator[Callable[..., pods.Pod]]:
    yield lambda *words, **more: pods.create(cluster, gpu_pod(*words, **more))
    pods.delete_all(cluster)
    until(lambda: not installed.held(), "kubelet without allocated devices")


def used(node: Any) -> dict[int, int]:
    """Returns pid → bytes of GPU memory, as the simulated driver counts them."""
    found = node.gpusimctl("usage", "--json")["gpus"]
    return {one["pid"]: one["total"] for gpu in found for one in gpu["processes"]}


def test_a_pod_that_asks_for_memory_runs_in_its_size(cluster, installed, pod):
    one = pod("sized", {MEM: 3000})
    made = one.object()
    assert made["spec"]["schedulerName"] == "vgpu-scheduler"
    assert made["spec"]["containers"][0]["resources"]["limits"][GPU] == "1"
    one.wait_running()
    assert int(one.wait_log(r"^total (\d+)$").group(1)) == 3000 * MIB
    assert "101" in refused(cluster, gpu_pod("odd", {"nvidia.com/gpumem-percentage": 101}))
    for each in our_pods(cluster):
        assert {state["restartCount"] for state in each["status"]["containerStatuses"]} == {0}


def test_a_running_pod_is_resized_and_its_neighbour_keeps_its_memory(cluster, installed, pod):
    neighbour = pod("neighbour", {MEM: 4000}).wait_running()
    neighbour.wait_log(r"^filled \d+$")
    one = pod("resized", {MEM: 3000}, word="follow").wait_running()
    (pid,), (other,) = one.pids(), neighbour.pids()
    until(lambda: used(installed)[pid] == 3000 * MIB, "usage of 3000 MiB, the first size of the pod")
    size = json.dumps({"main": {"memory_mib": 9000}})
    kubectl(cluster, "annotate", "pod", "resized", "--overwrite", f"vgpu.fleet/resize={size}")
    until(lambda: used(installed)[pid] == 9000 * MIB, "usage of 9000 MiB by the same process")
    assert used(installed)[other] == 4000 * MIB and [one.restarts(), neighbour.restarts()] == [0, 0]


def test_a_pod_bursts_and_frees_the_burst_memory(cluster, installed, pod):
    neighbour = pod("neighbour", {MEM: 4000}).wait_running()
    neighbour.wait_log(r"^filled \d+$")
    one = pod("bursts", {MEM: CARD}, {"vgpu.fleet/memory-request": "2000"}, word="follow").wait_running()
    (pid,), (other,) = one.pids(), neighbour.pids()
    until(lambda: used(installed)[pid] == (CARD - 4000) * MIB, "pod that uses all free memory of the GPU")
    os.kill(pid, signal.SIGUSR1)
    until(
        lambda: used(installed)[pid] < 2000 * MIB,
        "process that has freed its memory, so that it uses less than 2000 MiB",
    )
    comes = pod("comes", {MEM: 6000}).wait_running()
    comes.wait_log(r"^filled \d+$")
    (newcomer,) = comes.pids()
    assert used(installed)[newcomer] == 6000 * MIB
    os.kill(pid, signal.SIGUSR2)
    until(lambda: used(installed)[pid] == (CARD - 10000) * MIB, "usage of the remaining memory by the same process")
    assert used(installed)[other] == 4000 * MIB and [one.restarts(), neighbour.restarts()] == [0, 0]


def test_node_and_cluster_are_emptied(cluster, chart, installed, before):  # noqa: F811
    """If the label changes to "absent", none of our files, annotations, labels and GPU resources remains on the node,
    except nvidia.com/gpu, which the kubelet keeps. If the chart's objects are deleted, none remains in the cluster.
    """
    until(lambda: "vgpu.fleet/capacity" in traces(cluster), "annotations of the plugin on its node")
    kubectl(cluster, "label", "node", cluster.node, f"{LABEL}=absent", "--overwrite")
    wait_until_clean(cluster)
    assert files() - before == set() and traces(cluster) == []
    capacity = cluster.node_object()["status"]["capacity"]
    assert [name for name in capacity if name.startswith(("nvidia.com/gpu", "aliyun.com/"))] == [GPU]
    text = rendered(cluster, chart, **values(cluster))
    kubectl(cluster, "delete", "--wait=false", "--filename=-", text=text)
    end_pods(cluster)
    until(lambda: our_pods(cluster) == [], "deletion of the scheduler's pods")
    left = kubectl(cluster, "get", "--ignore-not-found", "--filename=-", "--output=name", text=text, check=False)
    assert left == "" and cluster.api.get_or_none(DEPLOYMENT) is None
    # The webhook is gone, so the API server accepts the pod.
    assert refused(cluster, gpu_pod("free", {MEM: 1000})) == ""
    assert cluster.api.get(PODS)["items"] == []
