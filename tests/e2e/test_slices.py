# SPDX-License-Identifier: Apache-2.0
"""Tests pods that get slices (parts of a node's GPUs). The tests read the simulated driver's memory usage and the
kubelet's checkpoint.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from kubebox import pods
from kubebox.cluster import SERVER
from kubebox.gpunode import LIBRARIES, MIB, RESOURCE
from kubebox.modules import run_module
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
    """Returns pid → bytes that the driver has allocated to it, contexts included."""
    return {one["pid"]: one["total"] for gpu in node.gpusimctl("usage", "--json")["gpus"] for one in gpu["processes"]}


def test_node_shows_slices(cluster, node):
    assert (cluster.capacity(), cluster.allocatable()) == (SPLIT, SPLIT)
    uuid = node.nvidia_smi("-L").split("UUID: ")[1].split(")")[0]
    assert sorted(one["id"] for one in node.status()["slices"]) == [f"{uuid}::{n}" for n in range(SPLIT)]


def test_pod_gets_its_slice_and_no_more(node, pod):
    one = pod("full", [WORKER, "fill", "take", "1"]).wait_running()
    filled = int(one.wait_log(r"^filled (\d+)$").group(1))
    assert int(one.wait_log(r"^total (\d+)$").group(1)) == SLICE
    # 2 is CUDA_ERROR_OUT_OF_MEMORY. Allocated memory and context together are exactly the slice.
    assert one.wait_log(r"^took 1: (\d+)$").group(1) == "2"
    (pid,) = one.pids()
    assert used(node)[pid] == SLICE
    assert 0 < filled < SLICE
    assert node.memory_by_pid()[pid] // MIB == SLICE // MIB


def test_pod_without_a_slice_finds_no_driver(node, pod):
    """Negative control: without a slice, a pod with the same image on the same node finds no driver."""
    one = pod("none", WAIT, slices=0).wait_phase("Failed")
    assert "no driver" in one.log()


def test_probe_passes_in_a_pod(node, pod):
    one = pod("probe", ["/usr/local/bin/vgpu-probe", "--json", "--checks", "totals,limit-exact,getprocaddress-route"])
    one.wait_phase("Succeeded")
    assert '"violated"' not in one.log()
    assert one.log().count('"passed"') == 3


def test_four_pods_share_a_gpu_and_the_fifth_waits(cluster, node, pod):
    four = [pod(f"share-{n}", [WORKER, "take", "1000"]) for n in range(SPLIT)]
    for one in four:
        one.wait_running()
        assert one.wait_log(r"^took 1000: (\d+)$").group(1) == "0"
    pids = sorted(pid for one in four for pid in one.pids())
    assert sorted(node.memory_by_pid()) == pids  # nvidia-smi is NVIDIA's real program and runs on the host.
    assert len(ids_of(node)) == len(set(ids_of(node))) == SPLIT
    fifth = pod("share-4", WAIT)
    assert "1 Insufficient nvidia.com/gpu" in until(
        fifth.why_not_scheduled, "message of the scheduler why the fifth pod waits"
    )
    four[1].delete()
    fifth.wait_running()
    assert len(set(ids_of(node))) == SPLIT


def test_deleted_pod_frees_its_slice(node, pod):
    one = pod("short", [WORKER, "take", "500"]).wait_running()
    one.wait_log(r"^took 500: 0$")
    (taken,) = ids_of(node)
    one.delete()
    until(lambda: not used(node), "driver that reports no used memory")
    # Four pods run at the same time, so the deleted pod keeps no slice.
    again = [pod(f"after-{n}", WAIT) for n in range(SPLIT)]
    for each in again:
        each.wait_running()
    assert taken in ids_of(node)


def test_two_containers_of_a_pod_have_a_limit_each(cluster, node):
    pair = [pods.container([WORKER, "fill"], name=name) for name in ("left", "right")]
    one = pods.create(cluster, pods.manifest("pair", *pair)).wait_running()
    try:
        for name in ("left", "right"):
            one.wait_log(r"^filled ", name)
        assert sorted(used(node).values()) == [SLICE, SLICE]
    finally:
        one.delete()


def test_more_slices_than_gpus_is_refused_with_the_reason(node, pod):
    """A container that requests two slices of one GPU is refused. It must not start with the limits of one slice."""
    one = pod("greedy", WAIT, slices=2).wait_phase("Failed")
    status = one.object()["status"]
    assert status["reason"] == "UnexpectedAdmissionError"
    assert "vgpu_multi_slice" in status["message"] or "one GPU" in status["message"], status["message"]


# A faulty device plugin: it offers one slice more than its GPU was split into.
GREEDY = """
import sys
from vgpu_plugin.offer import settings
honest = settings.make_slices
def make(gpus, config):
    made = honest(gpus, config)
    return [*made, made[-1]._replace(id=made[-1].uuid + "::99")]
settings.make_slices = make
from vgpu_plugin.main import main
sys.exit(main())
"""


@pytest.fixture
def look(cluster, node):
    """Returns a function that reads the capacity of the host (vgpu_capacity_info) and of Kubernetes."""
    program = Path("/usr/local/bin/vgpuctl")
    paths = node.environment["PYTHONPATH"]
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{paths}" exec "{sys.executable}" -m vgpu_plugin.ctl.main "$@"\n')
    program.chmod(0o755)
    kubeconfig = cluster.authority.kubeconfig("capacity", SERVER, "/O=system:masters/CN=capacity")

    # An allocation is removed up to two minutes after its pod.
    def ask(timeout: int = 180, usage: bool = True) -> tuple[dict, dict]:
        host = run_module("vgpu_capacity_info", timeout=timeout, usage=usage)
        assert "ok" in host, host
        kube = run_module("kube_capacity_info", timeout=timeout, kubeconfig=str(kubeconfig), nodes={cluster.node: host})
        assert kube["missing"] == "", kube
        return host, kube["nodes"][cluster.node]

    yield ask
    os.unlink(program)


def test_capacity_shows_the_slices_of_each_pod(cluster, node, pod, look):
    host, kube = look()
    assert (host["ok"], host["drift"], kube["drift"]) == (True, [], [])
    assert (kube["found"], kube["ready"], kube["pods"]) == (True, True, [])
    ended = pod("ended", ["/bin/true"])
    ended.wait_phase("Succeeded")  # An ended pod has no slice, so it must not be listed.
    pod("one", [WORKER, "take", "700"]).wait_running().wait_log(r"^took 700: 0$")
    pair = [pods.container(WAIT, name=name) for name in ("left", "right")]
    pods.create(cluster, pods.manifest("pair", *pair)).wait_running()
    host, kube = look()
    assert (host["drift"], kube["drift"]) == ([], [])
    assert kube["resources"] == {RESOURCE: {"capacity": SPLIT, "allocatable": SPLIT, "allocated": 3}}
    assert sorted((one["pod"], one["count"], one["phase"]) for one in kube["pods"]) == [
        ("default/one", 1, "Running"),
        ("default/pair", 2, "Running"),
    ]
    # The node's ledgers, in which containers count their memory, agree: each container has the slice that the kubelet
    # reports for it.
    held = {f"default/{name}/{container}": ids for (name, container), ids in node.held().items()}
    assert {one["by"]: one["slices"] for one in host["usage"]} == held
    used = {one["by"]: one["used_mib"] for one in host["usage"]}
    assert used["default/one/main"] > 700 > used["default/pair/left"] > 0


def test_capacity_reports_a_slice_in_excess(cluster, node, look):
    plain = node.plugin.command
    node.plugin.stop()
    node.plugin.command = [sys.executable, "-c", GREEDY, *plain[plain.index("vgpu_plugin.main") + 1 :]]
    try:
        node.plugin.start()
        until(lambda: cluster.capacity() == SPLIT + 1, "capacity of the node with one slice in excess")
        host, kube = look(timeout=0, usage=False)
        assert host["ok"] is False
        assert {one["what"] for one in host["drift"]} == {"slice", "advertised"}
        assert all("::99" in one["where"] + one["found"] for one in host["drift"]), host["drift"]
        (one,) = kube["drift"]
        assert (one["what"], one["where"]) == ("Kubernetes capacity", f"{cluster.node} {RESOURCE}")
        assert (one["expected"], one["found"]) == (str(SPLIT), str(SPLIT + 1))
    finally:
        node.plugin.stop()
        node.plugin.command = plain
        node.plugin.start()
        until(
            lambda: (cluster.capacity(), cluster.allocatable()) == (SPLIT, SPLIT),
            "correct number of slices in the node's capacity",
        )
    host, kube = look(usage=False)
    assert (host["drift"], kube["drift"]) == ([], [])
