# SPDX-License-Identifier: Apache-2.0
"""Helps tests to start a container of docker or podman in a slice (part of a GPU) of a simulated host, as
docs/operations.md describes, and to read the output of vgpuctl, the node's command for operators."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conftest import PROJECT, Node
from simhosts import podman as simpodman
from simhosts.hardware import IMAGE_NAME

MIB = 1 << 20
# SLICE_MIB: memory of one slice. A T4 of the group t4 has 15360 MiB in seven slices. HELD_MIB: memory that the tests'
# container uses.
SLICE_MIB, HELD_MIB = 2194, 1000
NAME = "web"
FILL = "/root/fill"
# The simulated driver needs these volumes in a container of podman. Docker's runtime on these hosts adds them itself,
# and a real driver needs no volumes.
SIMULATED = ("-v", "/etc/gpusim:/etc/gpusim:ro", "-v", "/dev/shm/gpusim.state:/dev/shm/gpusim.state")
LIMIT_S = 60.0


def until(holds: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
    """Repeats the call until its result is true, and returns the result. ``what`` describes the awaited state, for the
    message after a time-out."""
    end = time.monotonic() + limit_s
    while not (answer := holds()):
        assert time.monotonic() < end, f"expected within {limit_s:.0f} s: {what}; the last result was {answer!r}"
        time.sleep(0.5)
    return answer


def text(node: Node, *command: str) -> str:
    """Returns a command's standard output and standard error, whatever its exit status."""
    return node.run("sh", "-c", '"$@" 2>&1', "sh", *command, check=False)


BOOT_ID = "/proc/sys/kernel/random/boot_id"
NEW_BOOT_ID = """\
[Unit]
DefaultDependencies=no
Before=sysinit.target
[Service]
Type=oneshot
ExecStart=/bin/sh -c 'cat /proc/sys/kernel/random/uuid >/run/boot_id; mount --bind /run/boot_id %s'
[Install]
WantedBy=sysinit.target
"""


def reboot(node: Node) -> None:
    """Reboots the host. A simulated host is a container, so its reboot does not change the kernel's boot id. A unit on
    the host sets a new id at each boot instead."""
    node.write("/etc/systemd/system/boot-id.service", NEW_BOOT_ID % BOOT_ID)
    node.run("systemctl", "enable", "--quiet", "boot-id.service")
    before = node.read(BOOT_ID)
    simpodman.podman("stop", "--time", "30", node.container, check=False)
    simpodman.boot(simpodman.Host(PROJECT, node.name))
    assert node.read(BOOT_ID) != before


@dataclass
class Work:
    """A container that uses HELD_MIB of its slice and that its engine restarts when it exits."""

    node: Node
    name: str = NAME
    engine: str = "docker"

    @classmethod
    def start(cls, node: Node, folder: Path, name: str = NAME, engine: str = "docker") -> Work:
        subprocess.run(["cc", "-std=c11", "-O1", "-o", folder / "fill", Path(__file__).with_name("fill.c")], check=True)
        node.copy(folder / "fill", FILL)
        node.run("systemctl", "start", "vgpu-demo-image.service")
        options = ("--interactive", "--name", name, "--restart", "always", "-v", f"{FILL}:/fill:ro", *SIMULATED)
        node.run(engine, "rm", "--force", name, check=False)
        words = ("--engine", engine, "--detach", "--", *options, IMAGE_NAME, "/fill", str(HELD_MIB))
        node.run("vgpuctl", "run", *words)
        work = cls(node, name, engine)
        work.wait()
        return work

    def remove(self) -> None:
        self.node.run(self.engine, "rm", "--force", self.name, check=False)
        until(lambda: not self.slices(), f"the slice of {self.name} is free")

    def wait(self) -> None:
        """Waits until the container runs and uses its memory, and the plugin knows the slice's holder."""
        until(lambda: self.process() and self.held() >= HELD_MIB * MIB, f"{self.name} runs and uses {HELD_MIB} MiB")
        until(lambda: len(self.slices()) == 1, f"vgpuctl lists one slice of {self.engine} {self.name}")

    def process(self) -> int:
        """Returns the pid of the container's running process, or 0 if none runs."""
        found = self.node.run(self.engine, "inspect", "--format", "{{.State.Pid}}", self.name, check=False)
        return int(found.strip() or 0)

    def held(self) -> int:
        """Returns the bytes that live processes use on the GPUs, from the simulated driver's accounts."""
        gpus = self.node.json("gpusimctl", "usage", "--json")["gpus"]
        return sum(process["total"] for gpu in gpus for process in gpu["processes"])

    def slices(self) -> list[str]:
        """Returns the slices that vgpuctl lists for the container."""
        answer = json.loads(self.node.run("vgpuctl", "slices", "--json", check=False))
        return [one["id"] for one in answer.get("slices", []) if one["held_by"] == f"{self.engine} {self.name}"]

    def rest(self) -> int:
        """Returns the bytes that one more process in the container can allocate before it is refused."""
        return int(self.node.run("sh", "-c", f"{self.engine} exec {self.name} /fill </dev/null"))
