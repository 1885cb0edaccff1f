# SPDX-License-Identifier: Apache-2.0
"""Finds the names of docker and podman containers by the processes that use a GPU. In two cases the plugin does not
know the container: if the lease (a reservation of slices) was made by hand, and if the engine got a slice by its CDI
name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..allocation.engine_lists import DOCKER, PODMAN
from .containers import ask

# Matches the control group (cgroup) of a docker or podman container, with the container's id.
GROUP = re.compile(r"(docker|libpod)[-/]([0-9a-f]{64})")
ENGINE_OF = {"docker": DOCKER, "libpod": PODMAN}


class Tenants:
    """Returns the names of containers. The engine is asked only once for each container."""

    def __init__(self, proc: Path = Path("/proc"), ask: Callable[..., str | None] = ask) -> None:
        self._proc, self._ask = proc, ask
        # Cache: (engine, container id) → name of the container.
        self._names: dict[tuple[str, str], str] = {}

    def of(self, usages: Iterable[Mapping[str, Any]]) -> dict[str, str]:
        """Returns allocation → container name, for allocations for which the plugin knows neither a pod nor a
        holder."""
        out = {}
        for one in usages:
            unnamed = one["programs"] and not one["pod"] and not one["holder"]
            if unnamed and (name := self._name(one["programs"][0]["pid"])):
                out[one["allocation"]] = name
        return out

    def _name(self, pid: int) -> str:
        try:
            found = GROUP.search((self._proc / str(pid) / "cgroup").read_text(errors="replace"))
        except OSError:
            return ""
        if found is None:
            return ""
        key = ENGINE_OF[found[1]], found[2]
        if key not in self._names:
            answer = self._ask(key[0], "inspect", "--format", "{{.Name}}", key[1]) or key[1][:12]
            self._names[key] = f"{key[0]} {answer.strip().lstrip('/')}"
        return self._names[key]
