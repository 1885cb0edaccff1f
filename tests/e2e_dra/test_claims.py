# SPDX-License-Identifier: Apache-2.0
"""Tests with real Kubernetes programs that ResourceClaims limit containers: the simulated driver reports how much
memory each container's processes got."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import CLAIMS, SLICES, Claim, devices, minor, pod
from kubebox.cluster import Cluster
from kubebox.gpunode import MIB, GpuNode
from kubebox.process import until
from kubebox.programs import Programs

# The worker allocates all memory that it gets, then tries 1 MiB more. It prints "took 1:" and the CUDA error code of
# the last allocation; 2 means out of memory.
FILL = ("fill", "take", "1")
GIB = 1024 * MIB


def used(node: GpuNode) -> dict[int, int]:
    """Returns pid → bytes on all GPUs, as the simulated driver counts them."""
    gpus = node.gpusimctl("usage", "--json")["gpus"]
    return {one["pid"]: one["total"] for gpu in gpus for one in gpu["processes"] if one["total"]}


def records() -> list[dict[str, Any]]:
    return json.loads(Path("/var/lib/vgpu/allocations.json").read_text())["allocations"]


def test_the_node_publishes_its_gpus(cluster: Cluster, node: GpuNode) -> None:
    found = devices(cluster)
    assert all(one["allowMultipleAllocations"] for one in found.values())
    assert {one["capacity"]["memory"]["value"] for one in found.values()} == {"14400Mi"}
    assert node.status()["registered"]


def test_a_pod_gets_what_it_claimed(cluster: Cluster, node: GpuNode, claim: Claim) -> None:
    one = pod(cluster, "one", claim("c", gpu={"memory": "4Gi", "cores": "30"}), command=FILL).wait_running()
    assert int(one.wait_log(r"^total (\d+)$")[1]) == 4 * GIB
    assert one.wait_log(r"^took 1: (\d+)$")[1] == "2"
    assert used(node) == {one.pids()[0]: 4 * GIB}
    (record,) = records()
    assert (record["kind"], record["holder"], record["limits"]["devices"][0]["sm_percent"]) == (
        "claim",
        "default/c",
        30,
    )
    one.delete()
    until(lambda: records() == [], "deletion of the allocation of claim c")


def test_a_request_without_capacity_gets_an_equal_slice(cluster: Cluster, claim: Claim) -> None:
    one = pod(cluster, "one", claim("c", gpu={}), command=FILL).wait_running()
    assert int(one.wait_log(r"^total (\d+)$")[1]) == 3840 * MIB


def test_two_requests_in_one_container_add_up(cluster: Cluster, node: GpuNode, claim: Claim) -> None:
    name = claim("c", a={"memory": "3Gi", "cores": "10"}, b={"memory": "2Gi", "cores": "10"})
    one = pod(cluster, "one", name, command=FILL).wait_running()
    assert int(one.wait_log(r"^total (\d+)$")[1]) == 5 * GIB
    assert one.wait_log(r"^took 1: (\d+)$")[1] == "2"
    assert used(node) == {one.pids()[0]: 5 * GIB}


def test_a_container_gets_only_the_request_that_it_names(cluster: Cluster, claim: Claim) -> None:
    name = claim("c", a={"memory": "3Gi", "cores": "10"}, b={"memory": "2Gi", "cores": "10"})
    one = pod(cluster, "one", name, request="b", command=FILL).wait_running()
    assert int(one.wait_log(r"^total (\d+)$")[1]) == 2 * GIB


def test_two_claims_in_one_container_add_up(cluster: Cluster, node: GpuNode, claim: Claim) -> None:
    names = [claim(f"c{n}", gpu={"memory": f"{n}Gi", "cores": "10"}) for n in (1, 2)]
    one = pod(cluster, "one", *names, command=FILL).wait_running()
    assert int(one.wait_log(r"^total (\d+)$")[1]) == 3 * GIB
    assert one.wait_log(r"^took 1: (\d+)$")[1] == "2"
    assert used(node) == {one.pids()[0]: 3 * GIB}


def test_pods_with_the_same_claim_share_its_limit(cluster: Cluster, node: GpuNode, claim: Claim) -> None:
    name = claim("c", gpu={"memory": "4Gi", "cores": "30"})
    one = pod(cluster, "one", name, command=("take", "3000")).wait_running()
    assert one.wait_log(r"^took 3000: (\d+)$")[1] == "0"
    other = pod(cluster, "other", name, command=FILL).wait_running()
    other.wait_log(r"^took 1: 2$")
    assert sum(used(node).values()) == 4 * GIB
    one.delete()
    assert [one["claim"] for one in records()], "expected the allocation to remain for pod other, found none"
    other.delete()
    until(lambda: records() == [], "deletion of the allocation of claim c")


def test_a_restarted_container_keeps_its_limit(cluster: Cluster, claim: Claim) -> None:
    name = claim("c", gpu={"memory": "2Gi", "cores": "10"})
    loop = pod(cluster, "loop", name, command=("fill", "crash"), restart="Always")
    until(lambda: loop.restarts() >= 2, "second restart of pod loop")
    # A container that has just started has written nothing yet.
    written = [text for text in loop.logs().values() if text]
    assert written and all(f"total {2 * GIB}\n" in text for text in written)


def test_a_pod_waits_while_all_gpus_are_full(cluster: Cluster, node: GpuNode, claim: Claim) -> None:
    """Claims fill two GPUs to the last MiB. The next pod waits until one pod ends."""
    if minor(Programs.from_environment()) < 36:
        pytest.skip("the alpha feature of 1.34 allocates no share of a second GPU once the first is full")
    full = [
        pod(cluster, f"p{n}", claim(f"c{n}", gpu={"memory": "7200Mi", "cores": "50"}), command=FILL) for n in range(4)
    ]
    for one in full:
        one.wait_running().wait_log(r"^took 1: 2$")
    assert sorted(used(node).values()) == [7200 * MIB] * 4
    late = pod(cluster, "late", claim("late", gpu={"memory": "1Gi"}), command=("take", "0"))
    until(late.why_not_scheduled, "message of the scheduler why pod late waits")
    full[0].delete()
    late.wait_running()


def test_claims_keep_their_limit_after_a_restart_of_the_kubelet(cluster: Cluster, node: GpuNode, claim: Claim) -> None:
    name = claim("c", gpu={"memory": "2Gi", "cores": "10"})
    # The claim has memory left for the other pod's context, but not for its allocation of 1000 MiB.
    pod(cluster, "one", name, command=("take", "1000")).wait_running().wait_log(r"^took 1000: 0$")
    before = cluster.api.get(SLICES)["items"][0]["metadata"]["uid"]
    cluster.kubelet.stop(kill=True)
    cluster.kubelet.start()
    until(
        lambda: len(devices(cluster)) == 2 and cluster.api.get(SLICES)["items"][0]["metadata"]["uid"] != before,
        "ResourceSlices published again after the kubelet deleted them",
    )
    other = pod(cluster, "other", name, command=("take", "1000")).wait_running()
    assert other.wait_log(r"^took 1000: (\d+)$")[1] == "2", "expected one limit for both pods of the claim"
    assert len(used(node)) == 2 and sum(used(node).values()) < 2 * GIB


def test_a_killed_driver_serves_claims_after_its_restart(cluster: Cluster, node: GpuNode, claim: Claim) -> None:
    one = pod(cluster, "one", claim("c", gpu={"memory": "2Gi", "cores": "10"}), command=FILL).wait_running()
    node.plugin.stop(kill=True)
    waits = pod(cluster, "waits", claim("d", gpu={"memory": "1Gi", "cores": "10"}), command=FILL)
    until(
        lambda: cluster.api.get(f"{CLAIMS}/d").get("status", {}).get("allocation"),
        "allocation of the waiting pod's claim",
    )
    assert waits.phase == "Pending"
    node.start()
    assert int(waits.wait_running().wait_log(r"^total (\d+)$")[1]) == GIB
    assert one.running() and used(node)[one.pids()[0]] == 2 * GIB


def test_a_claim_with_an_unknown_parameter_keeps_the_pod_pending(cluster: Cluster, claim: Claim) -> None:
    words = {"apiVersion": "vgpu.fleet/v1", "kind": "Share", "memory": "100Gi"}
    config = [{"opaque": {"driver": "gpu.vgpu.fleet", "parameters": words}}]
    one = pod(cluster, "one", claim("c", config, gpu={"memory": "1Gi", "cores": "10"}))

    def said() -> bool:
        events = cluster.api.get("/api/v1/namespaces/default/events")["items"]
        return any("unknown parameter 'memory'" in event.get("message", "") for event in events)

    until(said, "event that names the unknown parameter")
    assert one.phase == "Pending" and records() == []
