# SPDX-License-Identifier: Apache-2.0
"""The driver, behind one narrow file: which GPUs there are, and their critical Xid events.

Nothing else of the plugin imports pynvml. Tests put another GpuSource in its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ._shared import slices

NO_NUMA = -1


class GpuError(Exception):
    """The driver did not answer; the text says which call and what it answered."""


@dataclass(frozen=True)
class Gpu:
    index: int
    uuid: str
    model: str
    memory_mib: int
    minor: int
    pci: str
    numa_node: int = NO_NUMA

    def facts(self) -> dict[str, object]:
        """The GPU as the shared slice arithmetic takes it."""
        return {"index": self.index, "uuid": self.uuid, "model": self.model, "memory_mib": self.memory_mib}


class GpuSource(Protocol):
    """What the plugin needs of a driver."""

    def gpus(self) -> list[Gpu]:
        """All GPUs in NVML's order. Raises GpuError."""

    def next_xid(self, timeout_ms: int) -> tuple[str, int] | None:
        """Waits for the next critical Xid; (uuid, number), or None when the time is over. Raises GpuError."""

    def close(self) -> None: ...


class Nvml:
    """The driver's own library through nvidia-ml-py."""

    def __init__(self, sys_root: Path = Path("/sys")) -> None:
        import pynvml

        self._nvml = pynvml
        self._sys_root = sys_root
        self._events: object = None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as fault:
            raise GpuError(f"NVML does not start: {fault}") from None

    def gpus(self) -> list[Gpu]:
        nvml = self._nvml
        try:
            return [
                self._gpu(index, nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(nvml.nvmlDeviceGetCount())
            ]
        except nvml.NVMLError as fault:
            raise GpuError(f"NVML does not list the GPUs: {fault}") from None

    def _gpu(self, index: int, handle: object) -> Gpu:
        nvml = self._nvml
        pci = _text(nvml.nvmlDeviceGetPciInfo(handle).busId).lower()
        try:
            minor = int(nvml.nvmlDeviceGetMinorNumber(handle))
        except nvml.NVMLError:
            minor = index
        return Gpu(
            index=index,
            uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
            model=_text(nvml.nvmlDeviceGetName(handle)),
            memory_mib=slices.mib(nvml.nvmlDeviceGetMemoryInfo(handle).total),
            minor=minor,
            pci=pci,
            numa_node=numa_node(self._sys_root, pci),
        )

    def next_xid(self, timeout_ms: int) -> tuple[str, int] | None:
        nvml = self._nvml
        try:
            if self._events is None:
                self._events = self._register_events()
            event = nvml.nvmlEventSetWait_v2(self._events, timeout_ms)
            if event.eventType != nvml.nvmlEventTypeXidCriticalError:
                return None
            return _text(nvml.nvmlDeviceGetUUID(event.device)), int(event.eventData)
        except nvml.NVMLError as fault:
            if fault.value == nvml.NVML_ERROR_TIMEOUT:
                return None
            raise GpuError(f"NVML does not deliver events: {fault}") from None

    def _register_events(self) -> object:
        nvml = self._nvml
        events = nvml.nvmlEventSetCreate()
        for index in range(nvml.nvmlDeviceGetCount()):
            nvml.nvmlDeviceRegisterEvents(
                nvml.nvmlDeviceGetHandleByIndex(index), nvml.nvmlEventTypeXidCriticalError, events
            )
        return events

    def close(self) -> None:
        try:
            if self._events is not None:
                self._nvml.nvmlEventSetFree(self._events)
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError:
            pass  # the driver is going away together with us; nothing is left to free


def numa_node(sys_root: Path, pci: str) -> int:
    """NUMA node of a PCI address as NVML writes it; NO_NUMA where the platform does not say.

    NVML has an eight-digit domain, sysfs a four-digit one.
    """
    domain, _colon, rest = pci.partition(":")
    try:
        return int((sys_root / "bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node").read_text())
    except (OSError, ValueError):
        return NO_NUMA


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
