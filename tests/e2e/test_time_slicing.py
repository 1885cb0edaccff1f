# SPDX-License-Identifier: Apache-2.0
"""Tests NVIDIA's published example of time-slicing: two pods share one GPU, which is offered as two replicas."""

from __future__ import annotations

from kubebox.pods import WORKER
from kubebox.process import until

GPUS = ["T4"]
REPLICAS = SLICES = 2
CONFIGURATION = {"timeSlicing": {"resources": [{"name": "nvidia.com/gpu", "replicas": REPLICAS}]}}
CARD = 15360 << 20
MEASURED_NS = 4_000_000_000


def busy(node) -> dict[int, int]:
    """Returns pid → nanoseconds for which the simulated GPU ran the process's kernels."""
    (gpu,) = node.gpusimctl("log", "--json")["gpus"]
    return {one["pid"]: one["busy_ns"] for one in gpu["processes"] if one["alive"]}


def test_two_pods_share_the_time_of_one_gpu(node, pod):
    pair = [pod(f"busy-{n}", [WORKER, "take", "2000", "busy"]).wait_running() for n in range(REPLICAS)]
    for one in pair:
        # Time-slicing limits no memory: each pod sees the memory of the whole GPU.
        assert int(one.wait_log(r"^total (\d+)$").group(1)) == CARD
        one.wait_log(r"^busy$")
    pids = [pid for one in pair for pid in one.pids()]
    assert len(pids) == REPLICAS
    assert all(set(ids) <= set(node_ids(node)) for ids in node.held().values())

    start = busy(node)
    until(
        lambda: sum(busy(node)[pid] - start[pid] for pid in pids) > MEASURED_NS,
        "the two pods to use four seconds of GPU time together",
    )
    end = busy(node)
    ran = [end[pid] - start[pid] for pid in pids]
    shares = [one / sum(ran) for one in ran]
    print(f"\n    shares of the GPU time by the simulator's log: {shares[0]:.3f} and {shares[1]:.3f}")
    assert all(0.4 < one < 0.6 for one in shares), shares

    on_gpu_0 = node.nvidia_smi("--id=0", "--query-compute-apps=pid", "--format=csv,noheader").split()
    assert sorted(int(one) for one in on_gpu_0) == sorted(pids)
    shown = node.nvidia_smi()
    assert all(f" {pid} " in shown for pid in pids), shown

    third = pod("busy-2", [WORKER, "busy"])
    assert "1 Insufficient nvidia.com/gpu" in until(
        third.why_not_scheduled, "reason of the scheduler why the third pod waits"
    )


def node_ids(node) -> list[str]:
    return [one["id"] for one in node.status()["slices"]]
