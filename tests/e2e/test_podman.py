# SPDX-License-Identifier: Apache-2.0
"""Tests that a podman container can get a slice (part of a GPU) by the device plugin's CDI file, which tells podman
what to add for a device, while pods use other slices of the same node."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from kubebox.box import RUN
from kubebox.cluster import IMAGE
from kubebox.gpunode import LIBRARIES, MIB, PROFILE, STATE, STATE_IN_PODS
from kubebox.pods import WORKER
from kubebox.process import until

GPUS = ["T4"]
SPLIT = SLICES = 2
SLICE = 15360 // SPLIT * MIB
CONFIGURATION = {"vcuda": {"libraryRoot": str(LIBRARIES), "splitCount": SPLIT}}
LIMITS = ["--ulimit=nofile=4096:4096", "--ulimit=nproc=2048:2048"]


def podman(*words: str, check: bool = True) -> subprocess.CompletedProcess:
    own = ["--root", str(RUN / "podman"), "--runroot", str(RUN / "podman-run"), "--storage-driver", "vfs"]
    command = ["podman", *own, "--runtime", "runc", "--cgroup-manager", "cgroupfs", "--events-backend", "none", *words]
    return subprocess.run(command, capture_output=True, text=True, check=check)


@pytest.fixture(scope="module", autouse=True)
def image(cluster):
    podman("import", "-q", str(cluster.programs.image), IMAGE)


def run(device: str, *command: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    files = [f"{PROFILE}:{PROFILE}:ro", f"{STATE}:{STATE_IN_PODS}", f"{WORKER}:{WORKER}:ro"]
    volumes = [word for one in files for word in ("--volume", one)]
    more = ["--network=none", "--env", f"GPUSIM_STATE={STATE_IN_PODS}", *LIMITS, *volumes, *options]
    chosen = ["--device", device] if device else []
    return podman("run", *chosen, *more, IMAGE, *command, check=False)


def free_slice(node) -> str:
    return next(one["id"] for one in node.status()["slices"] if not one["in_use"] and one["health"] == "Healthy")


def test_podman_and_a_pod_use_different_slices_of_a_gpu(cluster, node, pod):
    beside = pod("beside", [WORKER, "fill"]).wait_running()
    beside.wait_log(r"^filled ")
    until(lambda: any(one["in_use"] for one in node.status()["slices"]), "slice that the pod 'beside' uses")
    mine = free_slice(node)
    started = run(f"vgpu.fleet/slice={mine}", WORKER, "fill", "take", "1", options=("--detach", "--name", "outside"))
    assert started.returncode == 0, started.stderr
    try:
        until(lambda: "took 1" in podman("logs", "outside").stdout, "allocation result in the container's log")
        said = podman("logs", "outside").stdout
        assert f"total {SLICE}\n" in said
        # The worker prints "took MIB: RESULT" for an allocation. Its slice is full, so the result is 2, out of memory.
        assert "took 1: 2\n" in said
        totals = [one["total"] for gpu in node.gpusimctl("usage", "--json")["gpus"] for one in gpu["processes"]]
        assert totals == [SLICE, SLICE]
        # The plugin no longer offers the podman container's slice to the kubelet.
        until(
            lambda: cluster.allocatable() == SPLIT - 1,
            f"number of {SPLIT - 1} allocatable slices, one less than before",
        )
        late = pod("late", [WORKER])
        assert "1 Insufficient nvidia.com/gpu" in until(
            late.why_not_scheduled, "message of the scheduler why the pod 'late' waits"
        )
    finally:
        podman("rm", "--force", "--time=0", "outside", check=False)
    late.wait_running()
    assert [ids for ids in node.held().values() if ids == [mine]]


def test_podman_without_a_device_finds_no_driver(node):
    done = run("", WORKER, options=("--rm",))
    assert done.returncode == 1
    assert "no driver" in done.stdout


def test_cdi_file_names_every_slice(node):
    spec = json.loads(Path("/var/run/cdi/vgpu-vgpu.fleet-slice.json").read_text())
    assert sorted(one["name"] for one in spec["devices"]) == sorted(one["id"] for one in node.status()["slices"])
