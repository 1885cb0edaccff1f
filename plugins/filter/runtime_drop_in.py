# SPDX-License-Identifier: Apache-2.0
"""The file with NVIDIA's runtime for CRI-O, k3s and RKE2. Controller only; documented in the .yml file next to it."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.vgpu.fleet.plugins.module_utils.engines import containerd_text


def runtime_drop_in(engine: str, runtimes: dict[str, Any], default_runtime: str) -> str:
    """The text of the file; empty for engines that have none."""
    program = (runtimes.get("nvidia") or {}).get("path") if isinstance(runtimes, dict) else None
    if not program:
        raise AnsibleFilterError("container_runtime_runtimes: expected a runtime nvidia with a path, found none")
    desired = containerd_text.Desired(path=str(program), default=default_runtime == "nvidia")
    if engine == "crio":
        return containerd_text.crio(desired)
    return containerd_text.rancher(desired) if engine in ("k3s", "rke2") else ""


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"runtime_drop_in": runtime_drop_in}
