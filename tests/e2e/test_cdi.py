# SPDX-License-Identifier: Apache-2.0
"""Tests pods that get their GPUs by the kubelet's CDI devices (Container Device Interface), with a containerd that
supports CDI and without NVIDIA's runtime."""

from __future__ import annotations

from kubebox.cluster import WITH_CDI
from kubebox.gpunode import LIBRARIES, MIB
from kubebox.pods import WORKER
from kubebox.process import until

RUNTIME = WITH_CDI
GPUS = ["T4", "T4"]
SPLIT, SLICES = 3, 6
SLICE = 15360 // SPLIT * MIB
CONFIGURATION = {"vcuda": {"libraryRoot": str(LIBRARIES), "splitCount": SPLIT}}


def test_plugin_chooses_cdi_without_a_setting(node):
    assert node.status()["hand_over"] == "cdi-cri"


def test_two_gpus_show_all_their_slices(cluster, node):
    assert (cluster.capacity(), cluster.allocatable()) == (SLICES, SLICES)


def test_pod_gets_its_slice_by_cdi(node, pod):
    one = pod("cdi", [WORKER, "fill", "take", "1"]).wait_running()
    assert int(one.wait_log(r"^total (\d+)$").group(1)) == SLICE
    assert one.wait_log(r"^took 1: (\d+)$").group(1) == "2"
    (pid,) = one.pids()
    used = {
        each["pid"]: each["total"] for gpu in node.gpusimctl("usage", "--json")["gpus"] for each in gpu["processes"]
    }
    assert used == {pid: SLICE}


def test_two_slices_are_of_two_gpus(node, pod):
    pod("wide", [WORKER], slices=2).wait_running()
    (ids,) = node.held().values()
    assert len({one.partition("::")[0] for one in ids}) == 2


def test_pod_without_a_slice_finds_no_driver(node, pod):
    one = pod("none", [WORKER], slices=0).wait_phase("Failed")
    assert "no driver" in one.log()


def test_crashed_container_starts_again(node, pod):
    one = pod("loop", [WORKER, "fill", "crash"], restart="Always")
    until(lambda: one.restarts() >= 2, "second restart of pod loop")
    assert all(f"total {SLICE}\n" in text for text in one.logs().values() if "total" in text)
