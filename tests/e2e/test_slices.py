# SPDX-License-Identifier: Apache-2.0
"""Slices of a node as pods get them. What is held is judged by the simulated driver and the kubelet's checkpoint."""

from __future__ import annotations

from kubebox.gpunode import LIBRARIES, MIB
from kubebox.pods import WORKER
from kubebox.process import until

GPUS = ["T4"]
SPLIT = SLICES = 4
SLICE = 15360 // SPLIT * MIB
CONFIGURATION = {"vcuda": {"libraryRoot": str(LIBRARIES), "splitCount": SPLIT}}
WAIT = [WORKER]


def ids_of(node) -> list[str]:
    return sorted(one for ids in node.held().values() for one in ids)


def used(node) -> dict[int, int]:
    """pid → bytes that the driver has given to it, contexts included."""
    return {one["pid"]: one["total"] for gpu in node.gpusimctl("usage", "--json")["gpus"] for one in gpu["processes"]}


def test_node_shows_slices(cluster, node):
    assert (cluster.capacity(), cluster.allocatable()) == (SPLIT, SPLIT)
    uuid = node.nvidia_smi("-L").split("UUID: ")[1].split(")")[0]
    assert sorted(one["id"] for one in node.status()["slices"]) == [f"{uuid}::{n}" for n in range(SPLIT)]


def test_pod_gets_its_slice_and_no_more(node, pod):
    one = pod("full", [WORKER, "fill", "take", "1"]).wait_running()
    filled = int(one.wait_log(r"^filled (\d+)$").group(1))
    assert int(one.wait_log(r"^total (\d+)$").group(1)) == SLICE
    # 2 is the driver's "out of memory". All that it got and its context are the slice, to the byte.
    assert one.wait_log(r"^took 1: (\d+)$").group(1) == "2"
    (pid,) = one.pids()
    assert used(node)[pid] == SLICE
    assert 0 < filled < SLICE
    assert node.memory_by_pid()[pid] // MIB == SLICE // MIB


def test_pod_without_a_slice_finds_no_driver(node, pod):
    """The negative control of the hand-over: the same image and node."""
    one = pod("none", WAIT, slices=0).wait_phase("Failed")
    assert "no driver" in one.log()


def test_probe_holds_in_a_pod(node, pod):
    one = pod("probe", ["/usr/local/bin/vgpu-probe", "--json", "--checks", "totals,limit-exact,getprocaddress-route"])
    one.wait_phase("Succeeded")
    assert '"violated"' not in one.log()
    assert one.log().count('"held"') == 3


def test_four_pods_share_a_gpu_and_the_fifth_waits(cluster, node, pod):
    four = [pod(f"share-{n}", [WORKER, "take", "1000"]) for n in range(SPLIT)]
    for one in four:
        one.wait_running()
        assert one.wait_log(r"^took 1000: (\d+)$").group(1) == "0"
    pids = sorted(pid for one in four for pid in one.pids())
    assert sorted(node.memory_by_pid()) == pids  # NVIDIA's own program, on the host
    assert len(ids_of(node)) == len(set(ids_of(node))) == SPLIT
    fifth = pod("share-4", WAIT)
    assert "1 Insufficient nvidia.com/gpu" in until(fifth.why_not_scheduled, "sentence of the scheduler")
    four[1].delete()
    fifth.wait_running()
    assert len(set(ids_of(node))) == SPLIT


def test_deleted_pod_frees_its_slice(node, pod):
    one = pod("short", [WORKER, "take", "500"]).wait_running()
    one.wait_log(r"^took 500: 0$")
    (taken,) = ids_of(node)
    one.delete()
    until(lambda: not used(node), "memory that is free again")
    # All four at once: none is left behind with the deleted pod.
    again = [pod(f"after-{n}", WAIT) for n in range(SPLIT)]
    for each in again:
        each.wait_running()
    assert taken in ids_of(node)


def test_two_containers_of_a_pod_have_a_limit_each(cluster, node):
    from kubebox import pods

    pair = [pods.container([WORKER, "fill"], name=name) for name in ("left", "right")]
    one = pods.create(cluster, pods.manifest("pair", *pair)).wait_running()
    try:
        for name in ("left", "right"):
            one.wait_log(r"^filled ", name)
        assert sorted(used(node).values()) == [SLICE, SLICE]
    finally:
        one.delete()


def test_more_slices_than_gpus_is_refused_with_a_sentence(node, pod):
    """Two slices of one GPU for one container: never silently a single share."""
    one = pod("greedy", WAIT, slices=2).wait_phase("Failed")
    status = one.object()["status"]
    assert status["reason"] == "UnexpectedAdmissionError"
    assert "vgpu_multi_slice" in status["message"] or "one GPU" in status["message"], status["message"]
