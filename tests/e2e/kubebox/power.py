# SPDX-License-Identifier: Apache-2.0
"""Simulates a power cut of the node and its next boot. The control plane keeps running, as if on another machine.

The power cut ends every process of the node and removes its mounts, /run/vgpu, /run/containerd, the pods' control
groups and the driver's memory. Files on disk remain: images and records of the container runtime, and the kubelet's
checkpoints. Each boot has a new boot id.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import uuid
from pathlib import Path

from .box import RUN, hierarchies, mount, remove_cgroups
from .cluster import Cluster
from .gpunode import GpuNode
from .process import until

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# On a real node these folders are on a tmpfs.
VOLATILE = (Path("/run/vgpu"), Path("/run/containerd"))
SHIM = "containerd-shim"


def cut(cluster: Cluster, node: GpuNode) -> None:
    """Kills every process of the node without cleanup, and removes mounts, volatile folders and control groups."""
    for service in (node.plugin, node.arbiter, cluster.kubelet, cluster.containerd):
        service.stop(kill=True)
    # Shims are killed before the containers, because a live shim would record how its container ended.
    for pids in (shims, lambda: contained(cluster)):
        until(lambda pids=pids: not killed(pids()), "end of the node's processes")
    for place in reversed(mounts()):
        if any(folder in (place, *place.parents) for folder in (*VOLATILE, Path("/var/lib/kubelet/pods"))):
            subprocess.run(["umount", "--lazy", str(place)], check=True)
    for folder in VOLATILE:
        shutil.rmtree(folder)
    Path("/run/vgpu").mkdir()
    remove_cgroups(f"{cluster.cgroup}/kubepods")
    node.gpusimctl("reset")
    new_boot()


def contained(cluster: Cluster) -> list[int]:
    """Returns the pids of all processes in the pods' control groups."""
    found = set()
    for place in hierarchies():
        for file in (place / cluster.cgroup / "kubepods").rglob("cgroup.procs"):
            found |= {int(pid) for pid in file.read_text().split()}
    return sorted(found)


def shims() -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, state = (folder / "stat").read_text().partition("(")[2].rpartition(")")[::2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if name.startswith(SHIM) and state.split()[0] != "Z":
            found.append(int(folder.name))
    return found


def killed(pids: list[int]) -> list[int]:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return pids


def mounts() -> list[Path]:
    """Returns all mount points, in the order of mounting."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [Path(line.split()[4].encode().decode("unicode_escape")) for line in lines]


def new_boot() -> None:
    """Sets a new boot id, which the kubelet and our plugin read."""
    stand_in = RUN / "sysctl" / "boot_id"
    first = not stand_in.exists()
    stand_in.write_text(f"{uuid.uuid4()}\n")
    if first:
        mount("--bind", str(stand_in), str(BOOT_ID))


def boot_runtime(cluster: Cluster) -> None:
    """Starts the container runtime, which still has its images."""
    cluster.containerd.start()
    until(lambda: cluster.ctr("version", check=False).returncode == 0, "answer of containerd")


def boot_programs(node: GpuNode) -> None:
    """Starts our programs and waits until the plugin serves, as systemd does before it starts dependent units."""
    node.arbiter.start()
    node.plugin.start()
    until(lambda: serves(node), f"plugin that serves; its log:\n{node.plugin.tail(5)}")


def serves(node: GpuNode) -> bool:
    node.plugin.must_run()
    try:
        return bool(node.status())
    except subprocess.CalledProcessError:
        return False
