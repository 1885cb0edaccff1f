# SPDX-License-Identifier: Apache-2.0
"""Tests an upgrade from the release that mounted single files into containers, while a pod of a real kubelet runs.

The kubelet stores the old device plugin's Allocate response and uses it at every restart of the pod's container.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import former
import pytest
from kubebox.cluster import Cluster
from kubebox.gpunode import LIBRARIES, LIBRARY_VERSION, MIB, GpuNode
from kubebox.pods import WORKER, Pod
from kubebox.process import until

GPUS = ["T4"]
SPLIT = SLICES = 4
SLICE = 15360 // SPLIT * MIB
CONFIGURATION = {"vcuda": {"libraryRoot": str(LIBRARIES), "splitCount": SPLIT}}
OLD_LEDGER, LEDGER = "/run/vgpu/ledger", "/dev/vgpu/0/ledger"
# Seconds after which the plugin must have deleted the files of an ended container. They cover one minute of grace and
# the plugin's cleanup interval.
FORGOTTEN_S = 240


def use(cluster: Cluster, node: GpuNode, version: str, environment: dict[str, str]) -> None:
    """Switches the library, the arbiter (which balances compute time) and the device plugin to a release, as an upgrade
    does."""
    node.stop()
    fresh = LIBRARIES / ".current.new"
    fresh.symlink_to(version)
    fresh.replace(LIBRARIES / "current")
    node.plugin.environment = environment
    node.start()
    until(lambda: cluster.allocatable() == SLICES, f"all slices offered by release {version}")


@pytest.fixture
def upgrade(cluster, node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], None]]:
    """Installs the former release on the node; yields a function that upgrades the node."""
    if not former.has_history():
        pytest.skip(former.NO_HISTORY)
    built = former.check_out(tmp_path_factory.mktemp("former"))
    folder = LIBRARIES / former.VERSION
    folder.mkdir()
    for name in ("libvgpu.so", "vgpu-probe", "vgpu-arbiter"):
        shutil.copy2(built.build / name, folder / name)
    mine = node.plugin.environment
    try:
        use(cluster, node, former.VERSION, {**mine, "PYTHONPATH": str(built.sources)})
        yield lambda: use(cluster, node, LIBRARY_VERSION, mine)
    finally:
        use(cluster, node, LIBRARY_VERSION, mine)


def ledgers(one: Pod) -> set[str]:
    """Returns the mount points of ledgers (files in which a container's processes count their memory) in the pod's
    container, from the kernel's mountinfo.
    """
    rows = [line.split() for line in Path(f"/proc/{one.pids()[0]}/mountinfo").read_text().splitlines()]
    return {row[4] for row in rows if row[3].endswith("/ledger")}


def is_limited(node: GpuNode, one: Pod, start: int = 0) -> None:
    """Asserts by the container's log and the driver that this start got exactly its slice (part of a GPU)."""
    until(lambda: "took 1: 2\n" in one.logs().get(start, ""), f"container start {start} that allocates its whole slice")
    assert f"total {SLICE}\n" in one.logs()[start]
    usage = node.gpusimctl("usage", "--json")["gpus"]
    (used,) = [process["total"] for gpu in usage for process in gpu["processes"]]
    assert used == SLICE


def named(node: GpuNode) -> list[str]:
    """Waits for three polls of the watcher, which looks for containers that bypass their limits. Asserts that it has no
    findings, and returns the pods that it lists with old mounts."""
    goal = node.vgpuctl("watch")["looks"] + 3
    found = until(lambda: (now := node.vgpuctl("watch"))["looks"] >= goal and now, "three polls of the watcher")
    assert (found["findings"], found["fault"]) == ([], "")
    return [one["pod"] for one in found["old_mounts"]]


def test_a_pod_keeps_its_old_mounts_until_it_is_replaced(upgrade, node, pod):
    fill = [WORKER, "fill", "take", "1"]
    one = pod("old", fill, restart="Always").wait_running()
    is_limited(node, one)
    assert ledgers(one) == {OLD_LEDGER}, (
        f"the release before the upgrade: expected the mount {OLD_LEDGER}, found {ledgers(one)}"
    )

    upgrade()

    is_limited(node, one)
    assert (one.restarts(), named(node)) == (0, ["old"])
    for pid in one.pids():
        os.kill(pid, signal.SIGKILL)
    until(lambda: one.restarts() == 1 and one.running(), "restart of the container of pod old")
    is_limited(node, one, start=1)
    assert ledgers(one) == {OLD_LEDGER}
    assert named(node) == ["old"]

    one.delete()
    again = pod("again", fill, restart="Always").wait_running()
    is_limited(node, again)
    assert ledgers(again) == {LEDGER}
    until(lambda: named(node) == [], "report of the watcher without a pod that has old mounts", limit_s=FORGOTTEN_S)
