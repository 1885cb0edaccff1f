# SPDX-License-Identifier: Apache-2.0
"""Describes the CDI (Container Device Interface) hook that sets the driver's memory limit for a container. This module
does no I/O.

The hook runs at the stage createRuntime, because at that time the container's control group exists and none of its
processes runs yet. The program of the hook is native/vcuda/hook. It gets all data as arguments, and trusts no data from
the container.
"""

from __future__ import annotations

from typing import Any

PROGRAM = "vgpu-limit-hook"
STAGE = "createRuntime"
# Timeout of the hook in seconds. If the hook takes longer, the container does not start. So the time must be enough to
# start NVML while the GPU is suspended.
TIMEOUT_S = 30


def hook(program: str, allocations: str, cgroup_root: str, nvml: str, backend: str, enforce: str) -> dict[str, Any]:
    """Returns one entry of ``containerEdits.hooks`` in a CDI file. Equal arguments give equal bytes, so an unchanged
    file is not written again.
    """
    words = ["--allocations", allocations, "--cgroup-root", cgroup_root, "--nvml", nvml]
    words += ["--backend", backend, "--enforce", "driver" if enforce == "driver" else "auto"]
    return {"hookName": STAGE, "path": program, "args": [PROGRAM, *words], "timeout": TIMEOUT_S}
