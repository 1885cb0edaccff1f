# SPDX-License-Identifier: Apache-2.0
"""A container of docker in a slice of a host, started as docs/operations.md says, and what a person sees of it."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conftest import Node
from simhosts.hardware import IMAGE_NAME

MIB = 1 << 20
# Of group t4: 15360 MiB in seven.
SLICE_MIB, HELD_MIB = 2194, 1000
NAME = "web"
FILL = "/root/fill"
# What the simulated driver needs in a container and a real one does not.
SIMULATED = ("-v", "/etc/gpusim:/etc/gpusim:ro", "-v", "/dev/shm/gpusim.state:/dev/shm/gpusim.state")
LIMIT_S = 60.0


def until(holds: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
    """Ask until the answer is true, and return it."""
    end = time.monotonic() + limit_s
    while not (answer := holds()):
        assert time.monotonic() < end, f"{what}: not within {limit_s:.0f} s; the last answer was {answer!r}"
        time.sleep(0.5)
    return answer


def text(node: Node, *command: str) -> str:
    """What a command prints, errors included, whatever its status."""
    return node.run("sh", "-c", '"$@" 2>&1', "sh", *command, check=False)


@dataclass
class Work:
    """The container ``web``: it holds HELD_MIB of its slice, and docker starts it again when it ends."""

    node: Node

    @classmethod
    def start(cls, node: Node, folder: Path) -> Work:
        subprocess.run(["cc", "-std=c11", "-O1", "-o", folder / "fill", Path(__file__).with_name("fill.c")], check=True)
        node.copy(folder / "fill", FILL)
        node.run("systemctl", "start", "vgpu-demo-image.service")
        options = ("--interactive", "--name", NAME, "--restart", "always", "-v", f"{FILL}:/fill:ro", *SIMULATED)
        node.run("docker", "rm", "--force", NAME, check=False)
        node.run("vgpuctl", "run", "--detach", "--", *options, IMAGE_NAME, "/fill", str(HELD_MIB))
        work = cls(node)
        work.wait()
        return work

    def remove(self) -> None:
        self.node.run("docker", "rm", "--force", NAME, check=False)
        until(lambda: not self.slices(), f"the slice of {NAME} is free")

    def wait(self) -> None:
        """Until the container runs, holds its memory, and the plugin knows whose it is."""
        until(lambda: self.process() and self.held() >= HELD_MIB * MIB, f"{NAME} holds its memory")
        until(lambda: len(self.slices()) == 1, f"one slice is held by docker {NAME}")

    def process(self) -> int:
        """The process that runs now; 0: none."""
        return int(self.node.run("docker", "inspect", "--format", "{{.State.Pid}}", NAME, check=False).strip() or 0)

    def held(self) -> int:
        """Bytes on the GPUs by processes that live, from the simulated driver's accounts."""
        gpus = self.node.json("gpusimctl", "usage", "--json")["gpus"]
        return sum(process["total"] for gpu in gpus for process in gpu["processes"])

    def slices(self) -> list[str]:
        """The slices that the node says the container holds."""
        answer = json.loads(self.node.run("vgpuctl", "slices", "--json", check=False))
        return [one["id"] for one in answer.get("slices", []) if one["held_by"] == f"docker {NAME}"]

    def rest(self) -> int:
        """Bytes that one more process in the container gets before it is refused."""
        return int(self.node.run("sh", "-c", f"docker exec {NAME} /fill </dev/null"))
