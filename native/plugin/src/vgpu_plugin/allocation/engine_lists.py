# SPDX-License-Identifier: Apache-2.0
"""Lists the leases whose containers exist in docker or podman, running or not, by the label of each container."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

DOCKER, PODMAN = "docker", "podman"
ENGINES = (DOCKER, PODMAN)
LABEL = "vgpu.fleet/lease"
# Matches the lists that docker and podman print, with the labels after the name: a=b,c=d and map[a:b c:d].
NAMED = re.compile(r"^(\S*)\t.*" + re.escape(LABEL) + r"[=:]([0-9a-f]+)", re.MULTILINE)
# Docker is asked only if its daemon runs, because a connection to its socket would start it.
DOCKER_PID = Path("/run/docker.pid")
TIMEOUT_S = 20.0


def words(engine: str) -> list[str]:
    return [engine, "ps", "--all", "--filter", f"label={LABEL}", "--format", "{{.Names}}\t{{.Labels}}"]


class EngineLists:
    """``run`` runs a command and returns its output; None if the command fails."""

    def __init__(self, run: Callable[[list[str]], str | None] | None = None, docker_pid: Path = DOCKER_PID) -> None:
        self._run = run or _run
        self._docker_pid = docker_pid

    def leases(self, engines: Iterable[str]) -> dict[str, dict[str, str]]:
        """Returns engine → (lease → container name); engines that do not respond are left out."""
        out = {}
        for engine in sorted(set(engines)):
            if engine not in ENGINES or (engine == DOCKER and not self._docker_pid.exists()):
                continue
            answer = self._run(words(engine))
            if answer is not None:
                out[engine] = {lease: name for name, lease in NAMED.findall(answer)}
        return out


def _run(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
