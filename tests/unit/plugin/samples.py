# SPDX-License-Identifier: Apache-2.0
"""Sample GPUs, node configurations and kubelet checkpoints for the tests of the device plugin."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MEMORY_MIB = {"T4": 15360, "V100-16GB": 16160, "A100-80GB": 81920}


def gpus(*models: str, numa: tuple[int, ...] = ()) -> list[Any]:
    from vgpu_plugin.node.gpus import NO_NUMA, Gpu

    return [
        Gpu(
            index=n,
            uuid=f"GPU-{n:08d}-0000-0000-0000-000000000000",
            model=f"NVIDIA {model}",
            memory_mib=MEMORY_MIB[model],
            minor=n,
            pci=f"00000000:{n + 1:02x}:00.0",
            numa_node=numa[n] if numa else NO_NUMA,
        )
        for n, model in enumerate(models)
    ]


def node_yaml(library_root: Path, **vcuda: Any) -> str:
    settings = {"libraryRoot": str(library_root), "splitCount": 2, "memoryScaling": "1.0", **vcuda}
    return json.dumps({"version": "v1", "flags": {"failOnInitError": True}, "sharing": {"vcuda": settings}})


def until(what: Callable[[], Any], about: str) -> Any:
    """Waits until a condition holds that other threads make true. The time limit only ends a test that hangs."""
    limit = time.monotonic() + 60
    while True:
        found = what()
        if found:
            return found
        assert time.monotonic() < limit, f"waited 60 s for: {about}"
        time.sleep(0.005)
