# SPDX-License-Identifier: Apache-2.0
"""Asks docker and podman which leases (slices reserved for a container of this host) still have their container,
running or not. A label of the container names its lease.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

DOCKER, PODMAN = "docker", "podman"
ENGINES = (DOCKER, PODMAN)
LABEL = "vgpu.fleet/lease"
# Matches one line of the output of docker or podman: first the container's name, then its labels. Docker prints the
# labels as a=b,c=d, and podman as map[a:b c:d].
NAMED = re.compile(r"^(\S*)\t.*" + re.escape(LABEL) + r"[=:]([0-9a-f]+)", re.MULTILINE)
# Docker is asked only if this file exists, because a connection to its socket would start a stopped daemon.
DOCKER_PID = Path("/run/docker.pid")
TIMEOUT_S = 20.0


def words(engine: str) -> list[str]:
    return [engine, "ps", "--all", "--filter", f"label={LABEL}", "--format", "{{.Names}}\t{{.Labels}}"]


class EngineLists:
    """Asks the engines docker and podman by their command ``ps``. ``run`` runs a command and returns its output, or
    None if the command fails.
    """

    def __init__(self, run: Callable[[list[str]], str | None] | None = None, docker_pid: Path = DOCKER_PID) -> None:
        self._run = run or _run
        self._docker_pid = docker_pid

    def leases(self, engines: Iterable[str]) -> dict[str, dict[str, str]]:
        """Returns engine → (lease → container name). An engine that does not respond is left out, because its
        containers are unknown.
        """
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
