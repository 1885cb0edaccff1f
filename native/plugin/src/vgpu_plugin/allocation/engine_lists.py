# SPDX-License-Identifier: Apache-2.0
"""Which containers with a lease docker and podman of this host have, running or not, by the label that each carries."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

DOCKER, PODMAN = "docker", "podman"
ENGINES = (DOCKER, PODMAN)
LABEL = "vgpu.fleet/lease"
# As docker and podman print their labels, after the name: a=b,c=d and map[a:b c:d].
NAMED = re.compile(r"^(\S*)\t.*" + re.escape(LABEL) + r"[=:]([0-9a-f]+)", re.MULTILINE)
# Where docker's daemon does not run it is not asked: its socket would start it.
DOCKER_PID = Path("/run/docker.pid")
TIMEOUT_S = 20.0


def words(engine: str) -> list[str]:
    return [engine, "ps", "--all", "--filter", f"label={LABEL}", "--format", "{{.Names}}\t{{.Labels}}"]


class EngineLists:
    """``run`` runs a command and answers its output; None where it fails."""

    def __init__(self, run: Callable[[list[str]], str | None] | None = None, docker_pid: Path = DOCKER_PID) -> None:
        self._run = run or _run
        self._docker_pid = docker_pid

    def leases(self, engines: Iterable[str]) -> dict[str, dict[str, str]]:
        """Engine → the leases whose container it has, with the container's name; without those that do not answer."""
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
