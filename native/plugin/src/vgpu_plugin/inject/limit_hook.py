# SPDX-License-Identifier: Apache-2.0
"""The CDI hook that sets the driver's memory limit for a container: at createRuntime its control group exists, and no
process of the container runs yet. Pure. The program is native/vcuda/hook; it gets all data as arguments and trusts no
data of the container.
"""

from __future__ import annotations

from typing import Any

PROGRAM = "vgpu-limit-hook"
STAGE = "createRuntime"
# Enough for starting NVML on a suspended GPU; a hook that takes longer fails the start of the container.
TIMEOUT_S = 30


def hook(program: str, allocations: str, cgroup_root: str, nvml: str, backend: str, enforce: str) -> dict[str, Any]:
    """Returns one entry of ``containerEdits.hooks``; equal arguments give equal bytes."""
    words = ["--allocations", allocations, "--cgroup-root", cgroup_root, "--nvml", nvml]
    words += ["--backend", backend, "--enforce", "driver" if enforce == "driver" else "auto"]
    return {"hookName": STAGE, "path": program, "args": [PROGRAM, *words], "timeout": TIMEOUT_S}
