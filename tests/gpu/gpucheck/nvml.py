# SPDX-License-Identifier: Apache-2.0
"""Reads NVML through ctypes, from outside of any slice. Run as a program it prints the same values as JSON, so that
they can be read inside a slice."""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

NOT_AVAILABLE = 2**64 - 1


class NvmlError(Exception):
    """Raised if an NVML function returns an error; ``code`` is the error's number."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function} answers {code}")
        self.code = code


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Memory2(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class _Sample(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("time_us", ctypes.c_ulonglong),
        ("sm", ctypes.c_uint),
        ("memory", ctypes.c_uint),
        ("encoder", ctypes.c_uint),
        ("decoder", ctypes.c_uint),
    ]


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class Card:
    """One GPU as NVML shows it to this process. Reads only: nothing here changes a mode, a clock or a limit."""

    def __init__(self, index: int = 0) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._call("nvmlInit_v2")
        self._handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(self._handle))

    def _call(self, function: str, *arguments: Any) -> None:
        entry = getattr(self._library, function, None)
        code = 13 if entry is None else entry(*arguments)
        if code:
            raise NvmlError(function, code)

    def _text(self, function: str, *before: Any) -> str:
        text = ctypes.create_string_buffer(128)
        self._call(function, *before, text, ctypes.c_uint(128))
        return text.value.decode(errors="replace")

    def driver(self) -> str:
        return self._text("nvmlSystemGetDriverVersion")

    def uuid(self) -> str:
        return self._text("nvmlDeviceGetUUID", self._handle)

    def name(self) -> str:
        return self._text("nvmlDeviceGetName", self._handle)

    def count(self) -> int:
        number = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(number))
        return number.value

    def memory(self) -> dict[str, int]:
        """Returns bytes: total, free and used. On newer drivers used includes the driver's own memory."""
        memory = _Memory()
        self._call("nvmlDeviceGetMemoryInfo", self._handle, ctypes.byref(memory))
        return {"total": memory.total, "free": memory.free, "used": memory.used}

    def memory2(self) -> dict[str, int]:
        memory = _Memory2(version=ctypes.sizeof(_Memory2) | 2 << 24)
        self._call("nvmlDeviceGetMemoryInfo_v2", self._handle, ctypes.byref(memory))
        return {"total": memory.total, "reserved": memory.reserved, "free": memory.free, "used": memory.used}

    def processes(self) -> dict[int, int]:
        """Returns pid → bytes of every process with a context; empty if NVML shows none (in some containers)."""
        for version in ("_v3", "_v2"):
            count, room = ctypes.c_uint(256), (_Process * 256)()
            try:
                self._call("nvmlDeviceGetComputeRunningProcesses" + version, self._handle, ctypes.byref(count), room)
            except NvmlError:
                continue
            return {one.pid: one.bytes for one in room[: count.value] if one.bytes != NOT_AVAILABLE}
        return {}

    def samples(self, since_us: int = 0) -> list[dict[str, int]]:
        """Returns the driver's ring of utilization samples by process; empty if there is no newer sample."""
        count = ctypes.c_uint()
        entry = "nvmlDeviceGetProcessUtilization"
        try:
            self._call(entry, self._handle, None, ctypes.byref(count), ctypes.c_ulonglong(since_us))
        except NvmlError as error:
            if error.code != 7:
                raise
        room = (_Sample * max(count.value, 1))()
        count = ctypes.c_uint(len(room))
        try:
            self._call(entry, self._handle, room, ctypes.byref(count), ctypes.c_ulonglong(since_us))
        except NvmlError as error:
            if error.code == 6:
                return []
            raise
        return [{"pid": one.pid, "time_us": one.time_us, "sm": one.sm} for one in room[: count.value]]

    def utilization(self) -> int:
        rates = _Utilization()
        self._call("nvmlDeviceGetUtilizationRates", self._handle, ctypes.byref(rates))
        return rates.gpu


def show(index: int) -> dict[str, Any]:
    """Returns the values that NVML shows to this process; a failed query gives its error text."""
    found: dict[str, Any] = {}
    card = Card(index)
    for name in ("driver", "uuid", "name", "count", "memory", "memory2", "processes", "utilization"):
        try:
            found[name] = getattr(card, name)()
        except NvmlError as error:
            found[name] = str(error)
    return found


if __name__ == "__main__":
    print(json.dumps(show(int(sys.argv[1]) if len(sys.argv) > 1 else 0)))
