# SPDX-License-Identifier: Apache-2.0
"""Current measurements of a GPU, for vgpuctl and Prometheus: memory, utilisation, temperature, power, clocks and ECC
errors.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from .._shared.config import slices

UNKNOWN = -1
# Measurements that are younger than this are returned without a request to the driver.
FRESH_S = 1.0
# If the driver does not respond in time, earlier measurements up to this age are returned.
OLDEST_S = 5.0
# Maximum time for which a caller waits for the driver.
WAIT_S = 1.0

log = logging.getLogger(__name__)


class Gauges(NamedTuple):
    """The measurements of one GPU. The utilisation is in percent of the driver's sample period, the temperature in
    degrees Celsius. The ECC errors are counted since the driver was loaded. A value that the GPU does not report is
    UNKNOWN.
    """

    memory_used_mib: int = UNKNOWN
    utilisation: int = UNKNOWN
    temperature: int = UNKNOWN
    power_milliwatts: int = UNKNOWN
    sm_clock_mhz: int = UNKNOWN
    memory_clock_mhz: int = UNKNOWN
    ecc_corrected: int = UNKNOWN
    ecc_uncorrected: int = UNKNOWN


def read(nvml: Any, uuid: str) -> Gauges:
    """Reads all measurements of a GPU. ``nvml`` is the module pynvml. Each value is read separately: some GPUs lack one
    (in virtual machines the temperature), and the others must still be returned.
    """

    def figure(ask: Callable[[object], int]) -> int:
        try:
            return ask(nvml.nvmlDeviceGetHandleByUUID(uuid))
        except nvml.NVMLError:
            return UNKNOWN

    def ecc(kind: str) -> int:
        errors = getattr(nvml, f"NVML_MEMORY_ERROR_TYPE_{kind}")
        return figure(lambda gpu: int(nvml.nvmlDeviceGetTotalEccErrors(gpu, errors, nvml.NVML_VOLATILE_ECC)))

    return Gauges(
        memory_used_mib=figure(lambda gpu: slices.mib(nvml.nvmlDeviceGetMemoryInfo(gpu).used)),
        utilisation=figure(lambda gpu: int(nvml.nvmlDeviceGetUtilizationRates(gpu).gpu)),
        temperature=figure(lambda gpu: int(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU))),
        power_milliwatts=figure(lambda gpu: int(nvml.nvmlDeviceGetPowerUsage(gpu))),
        sm_clock_mhz=figure(lambda gpu: int(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM))),
        memory_clock_mhz=figure(lambda gpu: int(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM))),
        ecc_corrected=ecc("CORRECTED"),
        ecc_uncorrected=ecc("UNCORRECTED"),
    )


class Cached:
    """Reads each GPU at most once in FRESH_S, whatever the number of callers. If the driver does not respond, callers
    do not wait for it.
    """

    def __init__(
        self,
        read: Callable[[str], Gauges],
        wait_s: float = WAIT_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """``read`` returns the measurements of the GPU with a UUID, and may block."""
        self._read = read
        self._wait_s = wait_s
        self._monotonic = monotonic
        self._news = threading.Condition()
        # UUID → time of the driver's last response, and its measurements.
        self._found: dict[str, tuple[float, Gauges]] = {}
        self._asked: set[str] = set()

    def of(self, uuids: Collection[str]) -> dict[str, Gauges]:
        """Returns the measurements of each GPU. If the driver is slow, returns the last measurements, or UNKNOWN if
        they are older than OLDEST_S. Takes at most ``wait_s`` in total.
        """
        with self._news:
            stale = {uuid for uuid in uuids if not self._is_younger(uuid, FRESH_S)}
            for uuid in stale - self._asked:
                self._asked.add(uuid)
                threading.Thread(target=self._ask, args=(uuid,), name="gauges", daemon=True).start()
            self._news.wait_for(lambda: not stale & self._asked, self._wait_s)
            return {uuid: self._found[uuid][1] if self._is_younger(uuid, OLDEST_S) else Gauges() for uuid in uuids}

    def settle(self) -> None:
        """Waits until the driver has answered every request. Tests use it."""
        with self._news:
            self._news.wait_for(lambda: not self._asked)

    def _is_younger(self, uuid: str, seconds: float) -> bool:
        return uuid in self._found and self._monotonic() - self._found[uuid][0] < seconds

    def _ask(self, uuid: str) -> None:
        try:
            found = self._read(uuid)
        except Exception:
            log.exception("GPU %s: its measurements cannot be read", uuid)
            found = Gauges()
        with self._news:
            self._asked.discard(uuid)
            self._found[uuid] = self._monotonic(), found
            self._news.notify_all()
