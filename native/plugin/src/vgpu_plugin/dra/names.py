# SPDX-License-Identifier: Apache-2.0
"""Names of the driver and its devices, for the scheduler, the kubelet and claims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..node.gpus import Gpu

DRIVER = "gpu.vgpu.fleet"
# Version and kind of our parameters in classes and claims.
API_VERSION, KIND = "vgpu.fleet/v1", "Share"
MEMORY, CORES, SLOTS = "memory", "cores", "slots"
# Number of UUID digits in a device's name, if they are unique on the node.
DIGITS = 8


def device_names(gpus: Iterable[Gpu]) -> dict[str, str]:
    """Returns UUID of a GPU or MIG device → its name. Indexes are not used: they change when a GPU fails, and
    allocations contain the name.
    """
    prefixes: dict[str, str] = {}
    for gpu in gpus:
        prefixes[gpu.uuid] = "gpu"
        prefixes.update((mig.uuid, "mig") for mig in gpu.mig)
    short = Counter(_plain(uuid)[:DIGITS] for uuid in prefixes)
    out = {}
    for uuid, prefix in prefixes.items():
        plain = _plain(uuid)
        out[uuid] = f"{prefix}-{plain[:DIGITS] if short[plain[:DIGITS]] == 1 else plain}"
    return out


def _plain(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-").replace("/", "-")
