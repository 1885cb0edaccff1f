# SPDX-License-Identifier: Apache-2.0
"""Tests memory limits that the driver itself enforces (from release 615 on), in pods of a real kubelet. At the start of
a container, containerd runs the hook that the project's CDI file names, and the hook sets the limit. The driver is
simulated, but the control groups are real.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import offer
from kubebox import pods, state
from kubebox.box import CGROUPS
from kubebox.cluster import WITH_CDI, Cluster
from kubebox.gpunode import BUILD, LIBRARIES, LIBRARY_VERSION, MIB, PROFILE, STATE, GpuNode
from kubebox.process import until

RUNTIME = WITH_CDI
SPLIT, CARD_MIB = 3, 15360
SLICE = CARD_MIB // SPLIT * MIB
# The mount point of control groups version 2, alone or next to version 1.
GROUPS = CGROUPS if (CGROUPS / "cgroup.controllers").exists() else CGROUPS / "unified"
BYPASSES = ["bypass-own-loader", "bypass-symbol-table"]
PROBE = ["vgpu-probe", "--json", "--checks", ",".join(["totals", "limit-exact", *BYPASSES])]
HOOK = LIBRARIES / LIBRARY_VERSION / "vgpu-limit-hook"


def furnish(node: GpuNode, driver: str, more: str) -> None:
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        shutil.copy2(BUILD / driver / name, Path("/usr/local/lib/gpusim", name))
    PROFILE.write_text(f"{more}device_nodes = require\n[gpu]\nmodel = T4\ncontext_mib = 100\n")
    node.gpusimctl("reset")


@pytest.fixture(scope="module", params=["misc", "dmem"])
def node(machine: tuple[Cluster, GpuNode], request: pytest.FixtureRequest) -> Iterator[GpuNode]:
    """Returns a node with driver 615. A runtime passes no environment to hooks, so a wrapper of our hook sets the
    variables of the simulated driver."""
    if not GROUPS.is_dir():
        pytest.skip("version 2 of control groups is mounted nowhere on this host")
    cluster, node = machine
    state.reset(cluster, node, RUNTIME)
    node.exchange(["T4"])
    profile = PROFILE.read_text()
    version = f"driver_version = 615.71.09\ncuda_version = 13.5\nmemacct = {request.param}\n"
    furnish(node, "gpusim-615", f"{version}cgroup_root = {GROUPS}\n")
    shutil.copy2(BUILD / "vgpu-limit-hook", HOOK.with_name("real-hook"))
    HOOK.write_text(
        f'#!/bin/sh\nexport GPUSIM_PROFILE={PROFILE} GPUSIM_STATE={STATE}\nexec {HOOK.parent}/real-hook "$@"\n'
    )
    HOOK.chmod(0o755)
    node.plugin.command += ["--cgroup-root", str(GROUPS)]
    vcuda = {"vcuda": {"libraryRoot": str(LIBRARIES), "splitCount": SPLIT}}
    node.configure(vcuda, {"plugin": {"memoryEnforcement": "driver"}})
    offer(cluster, node, SPLIT)
    yield node
    pods.delete_all(cluster)
    node.reset()
    shutil.copy2(BUILD / "gpusim" / "libcuda.so.1", "/usr/local/lib/gpusim/libcuda.so.1")
    shutil.copy2(BUILD / "gpusim" / "libnvidia-ml.so.1", "/usr/local/lib/gpusim/libnvidia-ml.so.1")
    PROFILE.write_text(profile)
    node.gpusimctl("reset")
    HOOK.unlink()


def pod(cluster: Cluster, name: str, *command: str) -> pods.Pod:
    """Creates a pod with a slice (part of a GPU). Mounts the control groups, which the simulated driver reads there."""
    body = pods.manifest(name, pods.container(list(command)))
    body["spec"]["volumes"].append({"name": "groups", "hostPath": {"path": str(GROUPS), "type": "Directory"}})
    seen = {"name": "groups", "mountPath": str(GROUPS), "readOnly": True}
    body["spec"]["containers"][0]["volumeMounts"].append(seen)
    return pods.create(cluster, body)


def limits(node: GpuNode) -> dict[int, tuple[int, int]]:
    """Returns inode of the group → (soft, hard) limit in bytes, of all limits in the simulated driver."""
    found: list[dict[str, Any]] = node.gpusimctl("limits", "--json")["limits"]
    return {one["group"]: (one["soft"], one["hard"]) for one in found}


def group_of(one: pods.Pod) -> int:
    """Returns the inode of the container's control group."""
    (pid,) = one.pids()
    (path,) = [line[3:] for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines() if line.startswith("0::")]
    return Path(f"{GROUPS}{path}").stat().st_ino


def test_the_driver_limits_the_control_group_of_a_pods_container(cluster: Cluster, node: GpuNode) -> None:
    assert node.status()["memory_enforcement"].startswith("driver-")
    one = pod(cluster, "one", pods.WORKER, "fill", "take", "1").wait_running()
    assert one.wait_log(r"^took 1: (\d+)$")[1] == "2"
    assert limits(node)[group_of(one)] == (0, SLICE)


def test_the_driver_limits_programs_that_bypass_the_library(cluster: Cluster, node: GpuNode) -> None:
    one = pod(cluster, "probe", *PROBE)
    until(lambda: one.phase in ("Succeeded", "Failed"), "end of pod probe")
    report = json.loads(one.log())
    expected = dict.fromkeys(["totals", "limit-exact", *BYPASSES], "passed")
    assert {check["name"]: check["verdict"] for check in report["checks"]} == expected, report
    assert report["devices"][0]["total_cuda"] == SLICE


def test_a_lost_limit_is_set_again(cluster: Cluster, node: GpuNode) -> None:
    group = group_of(pod(cluster, "again", pods.WORKER, "fill").wait_running())
    assert limits(node)[group] == (0, SLICE)
    node.gpusimctl("memacct-forget")
    until(lambda: limits(node).get(group) == (0, SLICE), "limit of the pod's control group, after the driver lost it")
