# SPDX-License-Identifier: Apache-2.0
"""What a GPU shows at this moment, for people: memory that is used, how busy and how hot it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .._shared.config import slices

UNKNOWN = -1


@dataclass(frozen=True)
class Gauges:
    """UNKNOWN where the GPU says nothing. Percent of the driver's sample period, degrees Celsius."""

    memory_used_mib: int = UNKNOWN
    utilisation: int = UNKNOWN
    temperature: int = UNKNOWN


def read(nvml: Any, uuid: str) -> Gauges:
    """``nvml``: the module pynvml. A figure that a GPU does not have hides no other: some in virtual machines have no
    temperature.
    """

    def figure(ask: Callable[[object], int]) -> int:
        try:
            return ask(nvml.nvmlDeviceGetHandleByUUID(uuid))
        except nvml.NVMLError:
            return UNKNOWN

    return Gauges(
        figure(lambda gpu: slices.mib(nvml.nvmlDeviceGetMemoryInfo(gpu).used)),
        figure(lambda gpu: int(nvml.nvmlDeviceGetUtilizationRates(gpu).gpu)),
        figure(lambda gpu: int(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU))),
    )
