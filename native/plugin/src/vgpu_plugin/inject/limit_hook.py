# SPDX-License-Identifier: Apache-2.0
"""The CDI hook that has the driver limit a container's memory: at createRuntime its control group exists, and nothing
of the container runs yet. Pure. The program is native/vcuda/hook; what it needs it gets as arguments, and nothing from
the container.
"""

from __future__ import annotations

from typing import Any

PROGRAM = "vgpu-limit-hook"
STAGE = "createRuntime"
# Of the start of NVML on a card that sleeps, with room; a hook that takes longer ends the start of the container.
TIMEOUT_S = 30


def hook(program: str, allocations: str, cgroup_root: str, nvml: str, backend: str, enforce: str) -> dict[str, Any]:
    """One entry of ``containerEdits.hooks``, the same bytes for the same arguments."""
    words = ["--allocations", allocations, "--cgroup-root", cgroup_root, "--nvml", nvml]
    words += ["--backend", backend, "--enforce", "driver" if enforce == "driver" else "auto"]
    return {"hookName": STAGE, "path": program, "args": [PROGRAM, *words], "timeout": TIMEOUT_S}
