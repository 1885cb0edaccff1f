# SPDX-License-Identifier: Apache-2.0
"""Names that the scheduler, the kubelet and claims use: the names of the driver, of its devices, of their capacities,
and of parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..node.gpus import Gpu

DRIVER = "gpu.vgpu.fleet"
# Version and kind of the parameters for this driver. Device classes and claims may have such parameters.
API_VERSION, KIND = "vgpu.fleet/v1", "Share"
MEMORY, CORES, SLOTS = "memory", "cores", "slots"
# A device's name has this number of digits of the UUID if these digits are unique on the node, otherwise all digits.
DIGITS = 8


def device_names(gpus: Iterable[Gpu]) -> dict[str, str]:
    """Returns UUID → name, for each GPU and MIG device. The names do not contain indexes, because an index changes when
    another GPU fails, while allocations keep the name.
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
