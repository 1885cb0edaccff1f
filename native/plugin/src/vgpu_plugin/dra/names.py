# SPDX-License-Identifier: Apache-2.0
"""Names that the scheduler, the kubelet and claims use: of the driver, its devices, their capacities and parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..node.gpus import Gpu

DRIVER = "gpu.vgpu.fleet"
# Version and kind of the parameters that device classes and claims may have for this driver.
API_VERSION, KIND = "vgpu.fleet/v1", "Share"
MEMORY, CORES, SLOTS = "memory", "cores", "slots"
# Number of the UUID's digits in a device's name, if these digits are unique on the node.
DIGITS = 8


def device_names(gpus: Iterable[Gpu]) -> dict[str, str]:
    """Returns UUID → name, for each GPU and MIG device. The names do not contain indexes, because an index changes when
    another GPU fails, and allocations contain the name.
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
