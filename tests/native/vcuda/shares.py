# SPDX-License-Identifier: Apache-2.0
"""Creates containers that share a simulated GPU in real time, and measures the GPU time of each of their programs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import BUILD, LIMIT, LINKED, SIMULATOR, Host, compile_program, layouts

ARBITER = BUILD / "vgpu-arbiter"
# The largest part of a measuring round for which programs may wait for a CPU. Such a wait costs them at most 5
# percentage points of their share.
STARVED = 0.05
ROUNDS = 12


def waited(pid: int) -> float:
    """Returns the seconds that the process's threads waited for a CPU (second figure of schedstat)."""
    total = 0
    for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            total += int(task.read_text().split()[1])
    return total / 1e9


class Container:
    """A simulated container. It has an allocation's folder, as on the node, and a second folder with hard links to the
    same files, as the container's processes see them in /dev/vgpu/0."""

    def __init__(self, node: Node, name: str, percent: int, pages: bool = True, **limits: object) -> None:
        self.node, self.name = node, name
        self.folder = node.run / "allocations" / name
        self.view = node.folder / ("view-" + name)
        (self.folder / "rw").mkdir(parents=True)
        self.view.mkdir()
        uuids = node.host.uuids
        self.change(percent, **limits)
        (self.folder / "rw/ledger").write_bytes(layouts.pack_ledger(uuids, name))
        os.link(self.folder / "rw/ledger", self.view / "ledger")
        if pages:
            (self.folder / "rw/tenant").write_bytes(layouts.pack_tenant_page(uuids, name))
            os.link(self.folder / "rw/tenant", self.view / "tenant")
            for uuid in uuids:
                (self.folder / f"gpu-{uuid}").write_bytes(layouts.pack_gpu_page(uuid, name))
                os.link(self.folder / f"gpu-{uuid}", self.view / f"gpu-{uuid}")

    def change(self, percent: int, **limits: object) -> None:
        """Writes the limits file, or changes an existing one in place."""
        devices = [{"uuid": u, "memory_bytes": LIMIT, "sm_percent": percent} for u in self.node.host.uuids]
        wanted = dict({"allocation": self.name, "devices": devices}, **limits)
        path = self.folder / "limits"
        if path.exists():
            layouts.rewrite_limits(str(path), wanted)
        else:
            path.write_bytes(layouts.pack_limits(wanted))

    def start(
        self, way: str = "kernel", seconds: float = 0, us: float = 100, threads: int = 1, streams: int = 1, **env: str
    ) -> subprocess.Popen:
        """Starts a program that keeps the GPU busy, and waits for its "ready". With seconds=0 the program runs until it
        is killed."""
        environment = self.node.host.env(
            CUDA_DEVICE_MEMORY_SHARED_CACHE=str(self.view / "ledger"),
            VGPU_LIMITS_FILE=str(self.folder / "limits"),
            **env,
        )
        command = [self.node.launcher, way, str(seconds), str(us), "0", str(threads), str(streams)]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        self.node.processes.append(process)
        assert process.stdout and process.stdout.readline() == "ready\n"
        return process

    def page(self, gpu: int = 0) -> dict:
        return layouts.parse_gpu_page((self.folder / f"gpu-{self.node.host.uuids[gpu]}").read_bytes())

    def said(self, gpu: int = 0) -> dict:
        return layouts.parse_tenant_page((self.folder / "rw/tenant").read_bytes())["devices"][gpu]


class Node:
    def __init__(self, host: Host) -> None:
        self.host, self.folder = host, host.folder
        self.run = host.folder / "run"
        (self.run / "allocations").mkdir(parents=True)
        self.launcher = compile_program(host.folder, "launcher", "launcher.c", flags=LINKED)
        self.processes: list = []

    def arbiter(self) -> subprocess.Popen:
        process = subprocess.Popen([ARBITER, "--run", self.run])
        self.processes.append(process)
        wait_for(lambda: self.status()["arbiter"] or not self.status()["tenants"], "the arbiter runs")
        return process

    def status(self) -> dict:
        done = subprocess.run(
            [ARBITER, "--run", self.run, "--json-status"], check=True, stdout=subprocess.PIPE, text=True
        )
        return json.loads(done.stdout)

    def busy(self) -> dict:
        """Returns two figures in ns: a dict from pid to the time for which the GPU ran the process's kernels, and the
        current time of the simulator.
        """
        log = self.log()
        return {one["pid"]: one["busy_ns"] for one in log["gpus"][0]["processes"]}, log["now"]

    def log(self) -> dict:
        command = [SIMULATOR / "gpusimctl", "log", "--json"]
        done = subprocess.run(command, env=self.host.driver_env, check=True, stdout=subprocess.PIPE, text=True)
        return json.loads(done.stdout)

    def shares(self, processes: list, seconds: float = 2.0) -> list:
        """Returns the percentage of GPU time that each process got over the next `seconds`."""
        before, start = self.busy()
        time.sleep(seconds)
        after, end = self.busy()
        return [100.0 * (after.get(p.pid, 0) - before.get(p.pid, 0)) / (end - start) for p in processes]

    def waited(self) -> float:
        """Returns the seconds so far that threads of this node's programs were ready to run and had no CPU."""
        return sum(waited(process.pid) for process in self.processes if process.poll() is None)

    def judged(self, processes: list, right: Callable[[list], bool], seconds: float = 2.0, most: float = 100.0) -> list:
        """Measures in rounds, and returns the shares of the first usable round.

        A program that waits for a CPU launches late and leaves the GPU idle, whatever its limit. So a round is usable
        if the function ``right`` accepts the shares or if no program waited long for a CPU.

        A round with a share far above ``most`` is usable too: a container that waits for a CPU saves up at most 50 ms
        of GPU time, so the wait alone cannot cause such a share. If no round is usable, the test is skipped."""
        for _round in range(ROUNDS):
            before = self.waited()
            found = self.shares(processes, seconds)
            starved = (self.waited() - before) / seconds
            if right(found) or starved <= STARVED or max(found) > most + 100 * 0.05 / seconds:
                return found
        pytest.skip(
            f"in {ROUNDS} rounds programs waited for a processor, in the last for {starved:.0%} of the time: {found}"
        )

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()


def wait_for(condition, what: str, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.01)
