# SPDX-License-Identifier: Apache-2.0
"""Tests the resize of a slice (part of a GPU) while its container runs, with the real plugin, the real library and real
containers. The simulated driver reports how much memory the container and its neighbour use."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import RESOURCE, SLICE_MIB, RealNode, until
from .slice_containers import Mounts, Place, Runc, Work, driver_account, runc

pytestmark = pytest.mark.slow

MIB = 1 << 20
# MiB of one allocation. The program allocates until the first refusal, so less than this remains free in the end.
PIECE = 64


class Containers:
    """Runs pods' containers with runc, on slices that the test chooses."""

    def __init__(self, node: RealNode, engine: Runc) -> None:
        self._node, self._engine, self._started = node, engine, 0

    def start(self) -> tuple[str, Work]:
        (gpu,) = self._node.vgpuctl("status")["gpus"]
        name = f"{gpu['uuid']}::{self._started}"
        answer = self._node.kubelet.run_pod(f"pod-{self._started}", ids=[name])["answer"]
        self._started += 1
        mounts: Mounts = [(one["container_path"], one["host_path"], one["read_only"]) for one in answer["mounts"]]
        return name, self._engine.start(self._engine.create(mounts, {}))


class Programs:
    """Runs programs of this host in free slices with vgpuctl exec."""

    def __init__(self, node: RealNode, place: Place) -> None:
        self._node, self._place = node, place

    def start(self) -> tuple[str, Work]:
        before = [one["id"] for one in self._node.vgpuctl("status")["allocations"]]
        words = [f"{name}={value}" for name, value in self._node.environment.items() if name.startswith("GPUSIM_")]
        words.append(f"LD_LIBRARY_PATH={self._node.environment['LD_LIBRARY_PATH']}")
        command = [str(self._node.vgpuctl_program), "--socket", str(self._node.socket), "exec", "--"]
        work = Work(self._node, ["env", *words, *command, str(self._place.folder / "work")])
        (made,) = [one for one in self._node.vgpuctl("status")["allocations"] if one["id"] not in before]
        return made["slice_ids"][0], work


@pytest.fixture(params=["pods", "exec"])
def slices(node: RealNode, request: pytest.FixtureRequest) -> Iterator[Containers | Programs]:
    place = Place.make(node)
    if request.param == "exec":
        yield Programs(node, place)
        return
    with runc(place) as engine:
        yield Containers(node, engine)


def start(node: RealNode, slices: Containers | Programs) -> tuple[str, Work, int]:
    """Starts a program in a slice; returns (the slice, the program, its pid)."""
    before = {one["pid"] for one in driver_account(node)}
    name, work = slices.start()
    assert work.context == 0
    (pid,) = {one["pid"] for one in driver_account(node)} - before
    return name, work, pid


def holds(node: RealNode, pid: int) -> int:
    """Returns the MiB that a process uses, as the simulated driver reports it."""
    return next(one["total"] for one in driver_account(node) if one["pid"] == pid) // MIB


def offered(node: RealNode) -> int:
    return int(node.kubelet.state()["resources"][RESOURCE]["allocatable"])


def refused(node: RealNode, *words: str) -> str:
    with pytest.raises(subprocess.CalledProcessError) as fault:
        node.vgpuctl("resize", *words)
    return str(fault.value.stderr)


def test_running_program_is_resized_without_disturbing_its_neighbour(node, slices):
    mine, one, pid = start(node, slices)
    theirs, other, neighbour = start(node, slices)
    offers = offered(node)
    other._ask("take")
    had = holds(node, neighbour)
    one._ask("take")
    assert SLICE_MIB - PIECE < holds(node, pid) <= SLICE_MIB

    # Of the GPU's three slices one is free. The resized slice can take only memory of this free slice, which is then no
    # longer offered to the kubelet.
    answer = node.vgpuctl("resize", mine, "--memory", "8000Mi")
    assert answer["changed"] and answer["gpus"][0]["memory_mib_before"] == SLICE_MIB
    until(lambda: one._ask("take") and holds(node, pid) > 8000 - PIECE, "the larger limit in the running process")
    assert holds(node, pid) <= 8000
    assert f"{16160 - SLICE_MIB + 1} MiB are asked for, {SLICE_MIB} of 16160 are held by others" in refused(
        node, mine, "--memory", f"{16160 - SLICE_MIB + 1}Mi"
    )
    until(lambda: offered(node) == offers - 1, "an offer without the slice that has no free memory")

    # The size can be set below the program's memory use only after the program has freed memory.
    assert "its programs use" in refused(node, mine, "--memory", "4000Mi")
    one._ask("take")
    assert holds(node, pid) > 8000 - PIECE
    one.free()
    answer = node.vgpuctl("resize", f"0::{mine[-1]}", "--memory", "1000Mi", "--cores", "20")
    assert answer["gpus"][0]["memory_mib"] == 1000 and answer["gpus"][0]["sm_percent"] == 20
    one._ask("take")
    assert 1000 - PIECE < holds(node, pid) <= 1000
    until(lambda: offered(node) == offers, "an offer with the slice that has free memory again")

    # The size survives a restart of the plugin, and of the container.
    assert node.vgpuctl("resize", mine, "--memory", "1000Mi", "--cores", "20")["changed"] is False
    node.end(kill=True)
    one._ask("take")
    assert holds(node, pid) <= 1000
    node.start()
    assert node.vgpuctl("resize", mine, "--memory", "1000Mi", "--cores", "20")["changed"] is False
    node.vgpuctl("resize", mine, "--memory", "2000Mi")
    until(lambda: one._ask("take") and holds(node, pid) > 2000 - PIECE, "the memory of the new size after the restart")

    # If the OOM killer is on, a process that uses more than the limit is killed at its next CUDA call.
    killed = node.vgpuctl("resize", mine, "--memory", "500Mi", "--oom-killer")
    assert killed["leaving"] and killed["gpus"][0]["memory_used"] > 1900 * MIB
    assert one._ask("take") == ""
    until(lambda: pid not in [each["pid"] for each in driver_account(node)], "the end of the process above its limit")

    assert holds(node, neighbour) == had, "the neighbour's memory is unchanged"
    other.free()
    other._ask("take")
    assert holds(node, neighbour) == had
    (row,) = [each for each in node.vgpuctl("top", "--once")["usages"] if each["slice_ids"] == [theirs]]
    assert row["memory_limit"] == SLICE_MIB * MIB and row["violations"] == 0
    other.client.communicate("", timeout=60)
    one.client.communicate("", timeout=60)
    assert node.vgpuctl("watch")["findings"] == []
    assert not list(Path(node.folder).glob("run/allocations/*/limits.new"))
