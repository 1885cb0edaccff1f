# SPDX-License-Identifier: Apache-2.0
"""Doubles of NVML on a host with a few Tesla T4: ``Reader`` replaces the modules' NVML reader, ``Pynvml`` replaces the
binding ``pynvml``. A test can make calls fail with chosen error codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pynvml

TIMEOUT, LOST = pynvml.NVML_ERROR_TIMEOUT, pynvml.NVML_ERROR_GPU_IS_LOST
UUID, NAME, MEMORY_BYTES = "GPU-{}", "Tesla T4", (15360 << 20) + 5


class Reader:
    """Replaces the modules' NVML reader. ``failing``: error code by call, or by (call, index). ``processes``: results
    of successive queries of the second GPU's processes, each {pid: bytes} or an exception to raise."""

    name = "double"

    def __init__(self, failing: Any = (), gpus: int = 3, processes: Sequence[Any] = ()) -> None:
        self.failing, self.gpus, self.answers = dict(failing), gpus, list(processes)
        self.stopped = 0

    def _answer(self, call: str, value: Any, index: Any = None) -> Any:
        from ansible_collections.vgpu.fleet.plugins.module_utils.gpu.nvml import NvmlError

        code = self.failing.get((call, index), self.failing.get(call))
        if code:
            raise NvmlError(code, call)
        return value

    def start(self) -> None:
        self._answer("start", None)

    def stop(self) -> None:
        self.stopped += 1

    def driver_version(self) -> str:
        return self._answer("driver_version", "535.261.03")

    def cuda_version(self) -> int:
        return self._answer("cuda_version", 12020)

    def count(self) -> int:
        return self._answer("count", self.gpus)

    def handle(self, index: int) -> int:
        return self._answer("handle", index, index)

    def uuid(self, handle: int) -> str:
        return self._answer("uuid", UUID.format(handle), handle)

    def model(self, handle: int) -> str:
        return self._answer("model", NAME, handle)

    def memory(self, handle: int) -> tuple[int, int]:
        return self._answer("memory", (MEMORY_BYTES, 3 << 20), handle)

    def mig_devices(self, handle: int) -> list[tuple[str, str, int, int, int]]:
        return [("MIG-a", "Tesla T4 MIG 1g.5gb", 1, 1, 4864), ("MIG-b", "", 3, 1, 7680)]

    def pci(self, handle: int) -> str:
        return self._answer("pci", "00000000:00:04.0", handle)

    def minor(self, handle: int) -> int:
        return self._answer("minor", handle, handle)

    def compute_capability(self, handle: int) -> str:
        return self._answer("compute_capability", "7.5", handle)

    def mig_mode(self, handle: int) -> int:
        return self._answer("mig_mode", 1 if handle == 2 else 0, handle)

    def processes(self, handle: int) -> Any:
        assert handle == 1
        found = self.answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


class Pynvml:
    """Replaces the module ``pynvml``: two GPUs, of which only the first reports Xids. ``compute``, ``graphics``: lists
    [(pid, bytes)], or an exception to raise. ``changes``: replacement functions by name."""

    def __init__(self, compute: Any = (), graphics: Any = (), **changes: Callable[..., Any]) -> None:
        self.compute, self.graphics = compute, graphics
        self.__dict__.update(changes)

    def __getattr__(self, name: str) -> Any:
        """Returns the real constant, or a function that fails with NOT_SUPPORTED if this class does not define it."""
        if name.startswith("nvml") and callable(getattr(pynvml, name)):
            return failing(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return getattr(pynvml, name)

    def nvmlInit(self) -> None:
        return

    nvmlShutdown = nvmlInit

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"handle-{index}"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return f"handle-{uuid[-1]}"

    def nvmlDeviceGetPciInfo(self, _handle: str) -> SimpleNamespace:
        return SimpleNamespace(busId=b"00000000:3B:00.0")

    def nvmlDeviceGetMinorNumber(self, handle: str) -> int:
        return int(handle[-1]) + 4

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return UUID.format(handle[-1])

    def nvmlDeviceGetName(self, _handle: str) -> bytes:
        return NAME.encode()

    def nvmlDeviceGetMemoryInfo(self, _handle: str) -> SimpleNamespace:
        return SimpleNamespace(total=MEMORY_BYTES)

    def nvmlDeviceGetSupportedEventTypes(self, handle: str) -> int:
        return pynvml.nvmlEventTypeXidCriticalError if handle == "handle-0" else 15

    def nvmlEventSetCreate(self) -> list[Any]:
        return []

    def nvmlEventSetFree(self, _events: list[Any]) -> None:
        return

    def nvmlDeviceRegisterEvents(self, handle: str, kind: int, events: list[Any]) -> None:
        events.append((handle, kind))

    def nvmlDeviceGetComputeRunningProcesses(self, _handle: str) -> list[SimpleNamespace]:
        return _listed(self.compute)

    def nvmlDeviceGetGraphicsRunningProcesses(self, _handle: str) -> list[SimpleNamespace]:
        return _listed(self.graphics)


def _listed(processes: Any) -> list[SimpleNamespace]:
    if isinstance(processes, Exception):
        raise processes
    return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in processes]


def failing(code: int) -> Callable[..., Any]:
    def call(*_arguments: Any) -> Any:
        raise pynvml.NVMLError(code)

    return call
