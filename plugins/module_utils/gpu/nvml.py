# SPDX-License-Identifier: Apache-2.0
"""Reads GPUs from NVML through ctypes, because Ansible modules on a node may use only Python's standard library. The
device plugin, which has its own packages, reads through nvidia-ml-py (``vgpu_plugin/node/gpus.py``).
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

from ..config import slices

LIBRARY = "libnvidia-ml.so.1"
NOT_SUPPORTED, NOT_FOUND = 3, 6

# NVML's status codes, in words for an operator.
MEANINGS = {
    1: "NVML is not initialised",
    4: "no permission; run as root",
    9: "the NVIDIA kernel module is not loaded",
    12: "libnvidia-ml.so.1 cannot be loaded; the driver's user-space packages are not installed",
    15: "a GPU has fallen off the bus",
    18: "the library's version differs from that of the loaded kernel module; reboot or reload the module",
    999: "unknown error",
}


class NvmlError(Exception):
    """A call to NVML failed; ``code`` is its nvmlReturn_t."""

    def __init__(self, code: int, call: str) -> None:
        self.code = code
        super().__init__(f"{call} failed with {code}: {MEANINGS.get(code, 'see nvmlReturn_t')}")


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Pci(ctypes.Structure):
    _fields_ = [
        ("bus_id_legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pci_device_id", ctypes.c_uint),
        ("pci_subsystem_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    ]


class _Attributes(ctypes.Structure):
    _fields_ = [
        *((f"field{n}", ctypes.c_uint) for n in range(6)),
        ("gpu_slices", ctypes.c_uint),
        ("compute_slices", ctypes.c_uint),
        ("memory_mib", ctypes.c_ulonglong),
    ]


class CtypesReader:
    """Calls the few functions of NVML that the collection needs directly in NVML's library."""

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self.library = ctypes.CDLL(library)
        except OSError:
            raise NvmlError(12, "loading " + library) from None

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            function = getattr(self.library, name)
        except AttributeError:
            raise NvmlError(13, name) from None
        code = function(*arguments)
        if code != 0:
            raise NvmlError(code, name)

    def _text(self, name: str, *arguments: Any) -> str:
        buffer = ctypes.create_string_buffer(96)
        self._call(name, *arguments, buffer, ctypes.c_uint(96))
        return buffer.value.decode("utf-8", "replace")

    def start(self) -> None:
        self._call("nvmlInit_v2")

    def stop(self) -> None:
        self._call("nvmlShutdown")

    def driver_version(self) -> str:
        return self._text("nvmlSystemGetDriverVersion")

    def cuda_version(self) -> int:
        number = ctypes.c_int()
        self._call("nvmlSystemGetCudaDriverVersion", ctypes.byref(number))
        return number.value

    def count(self) -> int:
        number = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(number))
        return number.value

    def handle(self, index: int) -> Any:
        handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        return handle

    def uuid(self, handle: Any) -> str:
        return self._text("nvmlDeviceGetUUID", handle)

    def model(self, handle: Any) -> str:
        return self._text("nvmlDeviceGetName", handle)

    def memory(self, handle: Any) -> tuple[int, int]:
        memory = _Memory()
        self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        return memory.total, memory.used

    def pci(self, handle: Any) -> str:
        pci = _Pci()
        self._call("nvmlDeviceGetPciInfo_v3", handle, ctypes.byref(pci))
        return pci.bus_id.decode("ascii", "replace")

    def minor(self, handle: Any) -> int:
        number = ctypes.c_uint()
        self._call("nvmlDeviceGetMinorNumber", handle, ctypes.byref(number))
        return number.value

    def compute_capability(self, handle: Any) -> str:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def mig_mode(self, handle: Any) -> int:
        current, pending = ctypes.c_uint(), ctypes.c_uint()
        self._call("nvmlDeviceGetMigMode", handle, ctypes.byref(current), ctypes.byref(pending))
        return current.value

    def mig_devices(self, handle: Any) -> list[tuple[str, str, int, int, int]]:
        """Returns for each MIG device: UUID, name, number of slices of its GPU instance, number of its own slices,
        memory in MiB.
        """
        most, found = ctypes.c_uint(), []
        self._call("nvmlDeviceGetMaxMigDeviceCount", handle, ctypes.byref(most))
        for place in range(most.value):
            device, facts = ctypes.c_void_p(), _Attributes()
            try:
                self._call("nvmlDeviceGetMigDeviceHandleByIndex", handle, ctypes.c_uint(place), ctypes.byref(device))
            except NvmlError as fault:
                if fault.code == NOT_FOUND:
                    continue  # Skip an unused index of the table of MIG devices.
                raise
            self._call("nvmlDeviceGetAttributes_v2", device, ctypes.byref(facts))
            sizes = (int(facts.gpu_slices), int(facts.compute_slices), int(facts.memory_mib))
            found.append((self.uuid(device), self.model(device), *sizes))
        return found


def read(source: Any = None) -> dict[str, Any]:
    """Returns all GPUs, or why there are none: ``{ok, error, driver_version, cuda_version, gpus, lost}``.

    A GPU that fails (fallen off the bus) does not hide the others: it is listed under ``lost``.
    """
    answer: dict[str, Any] = {
        "ok": False,
        "error": "",
        "driver_version": None,
        "cuda_version": None,
        "gpus": [],
        "lost": [],
    }
    try:
        source = source or CtypesReader()
        source.start()
    except NvmlError as fault:
        answer["error"] = str(fault)
        return answer
    try:
        answer["driver_version"] = source.driver_version()
        cuda = source.cuda_version()
        answer["cuda_version"] = f"{cuda // 1000}.{cuda % 1000 // 10}"
        for index in range(source.count()):
            try:
                answer["gpus"].append(_gpu(source, index))
            except NvmlError as fault:
                answer["lost"].append({"index": index, "error": str(fault)})
        answer["ok"] = True
    except NvmlError as fault:
        answer["error"] = str(fault)
    finally:
        source.stop()
    return answer


def _gpu(source: Any, index: int) -> dict[str, Any]:
    handle = source.handle(index)
    total, used = source.memory(handle)
    mig_enabled = _optional(source.mig_mode, handle) == 1
    return {
        "index": index,
        "uuid": source.uuid(handle),
        "model": source.model(handle),
        "memory_mib": slices.mib(total),
        "used_mib": slices.mib(used),
        "pci_bus_id": _optional(source.pci, handle),
        "minor": _optional(source.minor, handle),
        "compute_capability": _optional(source.compute_capability, handle),
        "mig_enabled": mig_enabled,
        "mig": mig_devices(source, handle, total) if mig_enabled else [],
    }


def mig_devices(source: Any, handle: Any, card_bytes: int) -> list[dict[str, Any]]:
    """Returns the MIG devices of a GPU in NVML's order: ``index``, ``uuid``, ``profile``, ``memory_mib``."""
    found = []
    for index, (uuid, name, gpu_slices, compute_slices, memory_mib) in enumerate(source.mig_devices(handle)):
        profile = mig_profile(name, gpu_slices, compute_slices, memory_mib, card_bytes)
        found.append({"index": index, "uuid": uuid, "profile": profile, "memory_mib": memory_mib})
    return found


def mig_profile(name: str, gpu_slices: int, compute_slices: int, memory_mib: int, card_bytes: int) -> str:
    """Returns the profile of a MIG device. If the driver wrote the profile into the device's name, the profile is the
    last word of the name. Else it is computed by NVIDIA's rule, which counts memory in eighths of the card and rounds
    it to whole GiB.
    """
    said = re.search(r" MIG (\S+)$", name)
    if said:
        return said.group(1)
    eighths = -(-memory_mib * (1 << 20) * 8 // card_bytes)
    gigabytes = round(eighths / 8 * -(-card_bytes // (1 << 30)))
    text = f"{gpu_slices}g.{gigabytes}gb"
    return f"{compute_slices}c.{text}" if compute_slices < gpu_slices else text


def _optional(call: Any, handle: Any) -> Any:
    """Returns the value of a call, None if the GPU does not support the call."""
    try:
        return call(handle)
    except NvmlError as fault:
        if fault.code in (NOT_SUPPORTED, 13):
            return None
        raise
