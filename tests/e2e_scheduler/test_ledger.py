# SPDX-License-Identifier: Apache-2.0
"""Tests the scheduler's ledger, its count of what each pod uses of each GPU, which the scheduler rebuilds from the
objects at the API server. The tests kill both replicas of vgpu-scheduler, delete and re-create a node, and delete
annotations. They sum the used memory from the objects and compare the sum with the replicas' metrics.
"""

from __future__ import annotations

import pytest
from fleet import NODES
from kubebox.api import Api
from kubebox.cluster import PODS, SERVER
from kubebox.process import until
from vgpu_plugin._shared.pods import annotations as pod_annotations

GPU, MEM = "nvidia.com/gpu", "nvidia.com/gpumem"
CARD, SIZE = 16160, 3000
MIB = 1 << 20


def held(fleet, node):
    """Returns the MiB used on a node's GPUs, by the plans (choices of GPUs and sizes) of the pods bound to the node."""
    total = 0
    for pod in fleet.api.get(PODS)["items"]:
        if pod["spec"].get("nodeName") == node:
            for part in pod_annotations.read_plan(pod["metadata"]["annotations"][pod_annotations.PLAN]):
                total += sum(one.memory_mib for one in part.devices)
    return total


def says(fleet, node):
    """Returns the MiB used on the node as each running replica of vgpu-scheduler reports it in its metrics."""
    running = [one for one in fleet.replicas if one.ours.running]
    return {fleet.metric(one, "node_memory_held_bytes", node=node) // MIB for one in running}


def fill(fleet, first, count):
    for n in range(first, first + count):
        fleet.pod(f"p{n}", {GPU: 1, MEM: SIZE})


def bound(fleet):
    return sum(bool(one["spec"].get("nodeName")) for one in fleet.api.get(PODS)["items"])


def agree(fleet, node="a"):
    until(
        lambda: says(fleet, node) == {held(fleet, node)},
        f"metric of {held(fleet, node)} used MiB in each program; found {says(fleet, node)}",
        60,
    )


def test_the_ledger_is_rebuilt_after_a_kill_of_both_programs(fleet):
    fleet.node("a", 8)
    fill(fleet, 0, 30)
    until(lambda: bound(fleet) >= 3, "first three bound pods", 60, 0.02)
    for one in fleet.replicas:
        one.ours.stop(kill=True)
    seen = bound(fleet)
    for one in fleet.replicas:
        one.ours.start()
    until(fleet.serves, "listening webhook and extenders after the restart")
    # Forty pods fit and fifty are created: the scheduler must find all free memory and use none of it twice.
    until(lambda: made(fleet, "first"), "admission of pod first by the webhook")
    fill(fleet, 30, 19)
    until(
        lambda: bound(fleet) == 40,
        f"number of 40 bound pods; found {bound(fleet)}, and {seen} when the programs were killed",
        120,
    )
    fleet.pause(2)
    assert bound(fleet) == 40 and fleet.faults() == []
    agree(fleet)


def made(fleet, name):
    try:
        return fleet.pod(name, {GPU: 1, MEM: SIZE})
    except OSError:
        return None


def test_a_recreated_node_has_the_used_memory_of_its_pods(fleet):
    fleet.node("a", 1)
    fill(fleet, 0, 3)
    until(lambda: bound(fleet) == 3, "number of 3 bound pods", 60)
    before = fleet.api.get(f"{NODES}/a")["metadata"]["uid"]
    fleet.api.delete(f"{NODES}/a")
    until(lambda: says(fleet, "a") == {0}, "metric of 0 used MiB on the deleted node in both programs", 60)
    fleet.pod("waits", {GPU: 1, MEM: SIZE})
    fleet.waits("waits")
    fleet.node("a", 1)
    assert fleet.api.get(f"{NODES}/a")["metadata"]["uid"] != before
    # Five pods fit. Three are already bound, so two of the three pending pods get bound.
    fill(fleet, 3, 2)
    until(lambda: bound(fleet) == 5, "number of 5 bound pods", 120)
    fleet.pause(2)
    assert bound(fleet) == 5 and fleet.faults() == []
    agree(fleet)


def test_a_deleted_node_annotation_is_counted_and_changes_nothing(fleet):
    fleet.node("a", 1)
    fill(fleet, 0, 2)
    until(lambda: bound(fleet) == 2, "number of 2 bound pods", 60)
    before = [fleet.metric(one, "drift_total", kind="gpus_deleted") for one in fleet.replicas]
    fleet.api.patch(f"{NODES}/a", {"metadata": {"annotations": {pod_annotations.GPUS: None}}})
    until(
        lambda: (
            [fleet.metric(one, "drift_total", kind="gpus_deleted") for one in fleet.replicas]
            == [count + 1 for count in before]
        ),
        "count of the deleted annotation in both programs",
        60,
    )
    fill(fleet, 2, 4)
    until(lambda: bound(fleet) == 5, "number of 5 bound pods", 60)
    fleet.pause(2)
    assert bound(fleet) == 5 and fleet.faults() == []
    agree(fleet)


@pytest.fixture(scope="module")
def trusted(fleet):
    """Returns a client with all rights; the webhook takes its user for a kubelet and allows each of its requests."""
    authority = fleet.cluster.authority
    pair = authority.pair("trusted", "/O=system:masters/CN=system:node:trusted")
    return Api(SERVER, authority.certificate, *pair)


def test_a_deleted_plan_is_restored_and_counted(fleet, trusted):
    fleet.node("a", 1)
    fill(fleet, 0, 5)
    until(lambda: bound(fleet) == 5, "number of 5 bound pods", 60)
    plan = fleet.get("p0")["metadata"]["annotations"][pod_annotations.PLAN]
    writer = until(fleet.writer, "program that holds the Lease to bind pods")
    before = fleet.metric(writer, "drift_total", kind="plan_deleted")
    trusted.patch(f"{PODS}/p0", {"metadata": {"annotations": {pod_annotations.PLAN: None}}})
    until(
        lambda: (fleet.get("p0")["metadata"].get("annotations") or {}).get(pod_annotations.PLAN) == plan,
        "restored plan annotation of pod p0",
        60,
    )
    assert fleet.metric(writer, "drift_total", kind="plan_deleted") == before + 1
    fleet.pod("more", {GPU: 1, MEM: SIZE})
    fleet.waits("more")
    assert fleet.faults() == []
    agree(fleet)


def test_the_kubelets_choice_counts_and_an_oversold_gpu_is_reported(fleet, trusted):
    """If the kubelet allocated another GPU than planned, the ledger follows the kubelet and reports an oversold GPU.

    Two pods planned on different GPUs are both on GPU 0. No further pod is placed on it.
    """
    fleet.node("a", 2)
    for n in range(2):
        fleet.pod(f"p{n}", {GPU: 1, MEM: 9000}, {"nvidia.com/use-gpuuuid": f"GPU-a-{n}"})
        fleet.bound(f"p{n}")
    given = pod_annotations.write_plan(
        [pod_annotations.Part("main", pod_annotations.APP, (pod_annotations.Device("GPU-a-0", 9000, 0),))]
    )
    trusted.patch(f"{PODS}/p1", {"metadata": {"annotations": {pod_annotations.GIVEN: given}}})
    until(
        lambda: [fleet.metric(one, "oversold_gpus") for one in fleet.replicas] == [1, 1],
        "metric of one oversold GPU in both programs",
        60,
    )
    fleet.pod("there", {GPU: 1, MEM: 100}, {"nvidia.com/use-gpuuuid": "GPU-a-0"})
    assert "not a GPU with 100 MiB free" in fleet.waits("there")
    fleet.pod("free", {GPU: 1, MEM: 16000})
    assert [one.uuid for one in fleet.bound("free")[1][0].devices] == ["GPU-a-1"]
