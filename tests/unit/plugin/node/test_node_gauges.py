# SPDX-License-Identifier: Apache-2.0
"""Tests a GPU's gauges (memory use, temperature, power and so on). The gauges must be exactly the values that the
driver reports. Reads must end within bounded time and must not be too frequent.
"""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
from vgpu_plugin.node import gauges
from vgpu_plugin.node.gauges import UNKNOWN, Cached, Gauges

ALL = Gauges(
    memory_used_mib=1234,
    utilisation=37,
    temperature=41,
    power_milliwatts=70_123,
    sm_clock_mhz=1590,
    memory_clock_mhz=5001,
    ecc_corrected=3,
    ecc_uncorrected=0,
)


class Nvml:
    """An NVML double with one GPU. The functions named in ``refused`` fail with NOT_SUPPORTED."""

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM = 0, 1, 2
    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 0, 1, 0

    class NVMLError(Exception):
        pass

    def __init__(self, *refused: str) -> None:
        self.refused = refused
        self.answers = {
            "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
            "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(used=1234 << 20),
            "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=37),
            "nvmlDeviceGetTemperature": lambda gpu, sensor: 41,
            "nvmlDeviceGetPowerUsage": lambda gpu: 70_123,
            "nvmlDeviceGetClockInfo": lambda gpu, kind: {1: 1590, 2: 5001}[kind],
            "nvmlDeviceGetTotalEccErrors": lambda gpu, kind, counter: {0: 3, 1: 0}[kind],
        }

    def __getattr__(self, name):
        if name in self.refused:
            raise self.NVMLError(name)  # This release of the driver does not have the function.
        return self.answers[name]


# The case → the NVML functions that the driver does not support; the gauges that are expected to be unknown then.
REFUSED = {
    "no unsupported gauge": ((), {}),
    "memory": (("nvmlDeviceGetMemoryInfo",), {"memory_used_mib": UNKNOWN}),
    "utilisation, as of a GPU in MIG mode": (("nvmlDeviceGetUtilizationRates",), {"utilisation": UNKNOWN}),
    "temperature, as in a virtual machine": (("nvmlDeviceGetTemperature",), {"temperature": UNKNOWN}),
    "power": (("nvmlDeviceGetPowerUsage",), {"power_milliwatts": UNKNOWN}),
    "clocks": (("nvmlDeviceGetClockInfo",), {"sm_clock_mhz": UNKNOWN, "memory_clock_mhz": UNKNOWN}),
    "ECC": (("nvmlDeviceGetTotalEccErrors",), {"ecc_corrected": UNKNOWN, "ecc_uncorrected": UNKNOWN}),
    "lost GPU": (("nvmlDeviceGetHandleByUUID",), dict.fromkeys(ALL._fields, UNKNOWN)),
}


@pytest.mark.parametrize(("refused", "unknown"), REFUSED.values(), ids=REFUSED)
def test_unsupported_gauge_does_not_hide_others(refused, unknown):
    assert gauges.read(Nvml(*refused), "GPU-a") == ALL._replace(**unknown)


class Source:
    """Counts the reads of gauges. A read of a GPU whose UUID is in ``stuck`` blocks until ``release`` is set."""

    def __init__(self) -> None:
        self.reads: list[str] = []
        self.stuck: set[str] = set()
        self.release = threading.Event()

    def gauges(self, uuid: str) -> Gauges:
        self.reads.append(uuid)
        shown = Gauges(temperature=len(self.reads))
        if uuid in self.stuck:
            assert self.release.wait(30)
        return shown


@pytest.fixture
def source():
    out = Source()
    yield out
    out.release.set()


AGES = [(0.0, 1), (0.9, 1), (1.1, 2), (60.0, 2)]


@pytest.mark.parametrize(("later", "reads"), AGES)
def test_reads_are_cached(source, later, reads):
    now = [100.0]
    cached = Cached(source.gauges, monotonic=lambda: now[0])
    assert cached.of(["GPU-a"]) == {"GPU-a": Gauges(temperature=1)}
    now[0] += later
    assert (cached.of(["GPU-a"])["GPU-a"].temperature, len(source.reads)) == (reads, reads)


# columns: seconds since the last values were read; whether these values are expected to be shown while the driver hangs
HANGS = [(1.5, True), (4.9, True), (5.1, False), (60.0, False)]


@pytest.mark.parametrize(("later", "shown"), HANGS)
def test_hanging_driver_delays_reads_only_briefly(source, later, shown):
    now = [100.0]
    cached = Cached(source.gauges, wait_s=0.05, monotonic=lambda: now[0])
    cached.of(["GPU-a"])
    source.stuck.add("GPU-a")
    now[0] += later
    for _time in range(3):
        assert cached.of(["GPU-a"])["GPU-a"] == (Gauges(temperature=1) if shown else Gauges())
    assert source.reads == ["GPU-a"] * 2, "expected only one blocked read for all scrapes"
    assert cached.of(["GPU-a", "GPU-b"])["GPU-b"].temperature == 3, "expected a read of the other GPU meanwhile"
    source.release.set()
    cached.settle()
    assert cached.of(["GPU-a"])["GPU-a"].temperature == 2


def test_hanging_gpus_are_waited_for_in_parallel(source):
    source.stuck = {f"GPU-{number}" for number in range(16)}
    begun = time.monotonic()
    assert Cached(source.gauges, wait_s=0.2).of(sorted(source.stuck)) == dict.fromkeys(source.stuck, Gauges())
    assert time.monotonic() - begun < 1.6, "expected to wait for all GPUs at once"


def test_read_error_does_not_fail_the_scrape():
    def broken(uuid: str) -> Gauges:
        raise OSError(uuid)

    assert Cached(broken).of(["GPU-a"]) == {"GPU-a": Gauges()}
