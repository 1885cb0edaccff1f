# SPDX-License-Identifier: Apache-2.0
"""Reads and changes MIG through NVML by ctypes: the state of the GPUs, and the four calls that change it.

Structures are those of nvml.h of driver 535 and newer. Only the standard library is needed, so that the program that
restores a geometry at boot runs with the host's own Python.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any, Iterator

from .nvml import CtypesReader, NvmlError

NOT_SUPPORTED, INVALID_ARGUMENT, NOT_FOUND, FUNCTION_NOT_FOUND, IN_USE = 3, 2, 6, 13, 19
INSUFFICIENT_SIZE, INSUFFICIENT_RESOURCES = 7, 23
# NVML numbers its profiles from 0 and returns INVALID_ARGUMENT for a number that it does not know. The numbers below
# this bound are tried. nvml.h of driver 615 has 18 of them, and later ones may have more.
PROFILES = 32
# Maximum instances of one profile on a GPU.
MOST = 8
# Maps the number of a GPU instance's slices (NVIDIA's units of a GPU) to the compute profile that uses all of these
# slices.
WHOLE = {1: 0, 2: 1, 3: 2, 4: 3, 7: 4, 8: 5, 6: 6}


class _Profile(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint) for name in ("version", "id", "p2p", "slices", "most", "sms")),
        *((name, ctypes.c_uint) for name in ("copy", "decoder", "encoder", "jpeg", "ofa")),
        ("memory_mib", ctypes.c_ulonglong),
        ("name", ctypes.c_char * 96),
    ]


class _Placement(ctypes.Structure):
    _fields_ = [("start", ctypes.c_uint), ("size", ctypes.c_uint)]


class _Instance(ctypes.Structure):
    _fields_ = [
        ("device", ctypes.c_void_p),
        ("id", ctypes.c_uint),
        ("profile_id", ctypes.c_uint),
        ("placement", _Placement),
    ]


class _ComputeProfile(ctypes.Structure):
    _fields_ = [(f"field{n}" if n else "id", ctypes.c_uint) for n in range(9)]


class _Compute(ctypes.Structure):
    _fields_ = [
        ("device", ctypes.c_void_p),
        ("instance", ctypes.c_void_p),
        ("id", ctypes.c_uint),
        ("profile_id", ctypes.c_uint),
        ("placement", _Placement),
    ]


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("memory", ctypes.c_ulonglong),
        ("instance", ctypes.c_uint),
        ("compute", ctypes.c_uint),
    ]


class Mig(CtypesReader):
    """One session with NVML that reads and changes MIG."""

    def gpus(self) -> list[dict[str, Any]]:
        """Returns every GPU: ``index``, ``uuid``, ``model``, ``mode`` (None if the GPU has no MIG), ``pending``,
        ``profiles`` by name, ``instances`` (id, profile, placement, complete) and ``processes`` (pid, instance).
        """
        return [self.gpu(index) for index in range(self.count())]

    def gpu(self, index: int) -> dict[str, Any]:
        handle = self.handle(index)
        mode, pending = self.modes(handle)
        profiles = self.profiles(handle) if mode is not None else {}
        return {
            "index": index,
            "uuid": self.uuid(handle),
            "model": self.model(handle),
            "mode": mode,
            "pending": pending,
            "profiles": profiles,
            "instances": self.instances(handle, profiles) if mode else [],
            "processes": self.processes(handle),
        }

    def modes(self, handle: Any) -> tuple[bool | None, bool | None]:
        current, pending = ctypes.c_uint(), ctypes.c_uint()
        try:
            self._call("nvmlDeviceGetMigMode", handle, ctypes.byref(current), ctypes.byref(pending))
        except NvmlError as fault:
            if fault.code in (NOT_SUPPORTED, FUNCTION_NOT_FOUND):
                return None, None
            raise
        return current.value == 1, pending.value == 1

    def profiles(self, handle: Any) -> dict[str, dict[str, int]]:
        """Returns profiles by name without "MIG ": ``number`` (NVML's kind), ``id``, ``slices``,
        ``most``, ``memory_mib``.
        """
        found = {}
        for number in range(PROFILES):
            info = _Profile()
            info.version = ctypes.sizeof(_Profile) | 2 << 24
            try:
                self._call("nvmlDeviceGetGpuInstanceProfileInfoV", handle, ctypes.c_uint(number), ctypes.byref(info))
            except NvmlError as fault:
                if fault.code in (NOT_SUPPORTED, INVALID_ARGUMENT):
                    continue
                raise
            name = info.name.decode("ascii", "replace").replace("MIG ", "", 1)
            found[name] = {
                "number": number,
                "id": info.id,
                "slices": info.slices,
                "most": info.most,
                "memory_mib": info.memory_mib,
            }
        return found

    def instances(self, handle: Any, profiles: dict[str, dict[str, int]]) -> list[dict[str, Any]]:
        found = []
        for name, profile in profiles.items():
            for instance in self._listed("nvmlDeviceGetGpuInstances", handle, profile["id"]):
                info = _Instance()
                self._call("nvmlGpuInstanceGetInfo", instance, ctypes.byref(info))
                # An interrupted run can leave a GPU instance without a compute instance of its size.
                whole = self._computes(instance, profile["slices"])
                found.append(
                    {
                        "id": info.id,
                        "profile": name,
                        "start": info.placement.start,
                        "size": info.placement.size,
                        "complete": len(whole) == 1,
                    }
                )
        return sorted(found, key=lambda one: one["start"])

    def _listed(self, name: str, owner: Any, profile_id: int) -> Iterator[Any]:
        array, count = (ctypes.c_void_p * MOST)(), ctypes.c_uint(MOST)
        self._call(name, owner, ctypes.c_uint(profile_id), array, ctypes.byref(count))
        for n in range(count.value):
            yield ctypes.c_void_p(array[n])

    def _compute_profile(self, instance: Any, number: int) -> int | None:
        info = _ComputeProfile()
        try:
            self._call(
                "nvmlGpuInstanceGetComputeInstanceProfileInfo",
                instance,
                ctypes.c_uint(number),
                ctypes.c_uint(0),
                ctypes.byref(info),
            )
        except NvmlError as fault:
            if fault.code in (NOT_SUPPORTED, INVALID_ARGUMENT):
                return None
            raise
        return int(info.id)

    def _computes(self, instance: Any, slices: int) -> list[Any]:
        """Returns the compute instances that use all slices of a GPU instance."""
        profile = self._compute_profile(instance, WHOLE.get(slices, 0))
        return [] if profile is None else list(self._listed("nvmlGpuInstanceGetComputeInstances", instance, profile))

    def processes(self, handle: Any) -> list[dict[str, Any]]:
        count = ctypes.c_uint(256)
        array = (_Process * 256)()
        self._call("nvmlDeviceGetComputeRunningProcesses_v3", handle, ctypes.byref(count), array)
        none = 0xFFFFFFFF
        return [
            {"pid": one.pid, "instance": None if one.instance == none else int(one.instance)}
            for one in array[: count.value]
        ]

    def set_mode(self, index: int, on: bool) -> None:
        """Switches MIG mode on or off and checks that the new mode is active. If it is not, for example because the GPU
        needs a reset first, restores the former pending mode and raises NvmlError.
        """
        handle, activation = self.handle(index), ctypes.c_uint()
        self._call("nvmlDeviceSetMigMode", handle, ctypes.c_uint(int(on)), ctypes.byref(activation))
        if self.modes(handle)[0] is not on:
            # Restore the former pending mode, because otherwise the new mode would take effect at the next boot.
            with contextlib.suppress(NvmlError):
                self._call("nvmlDeviceSetMigMode", handle, ctypes.c_uint(int(not on)), ctypes.byref(activation))
            raise NvmlError(activation.value or IN_USE, f"nvmlDeviceSetMigMode of GPU {index}")

    def create(self, index: int, profile: dict[str, int], start: int | None = None, size: int = 0) -> int:
        """Creates a GPU instance with one compute instance of its whole size; returns its id.
        ``start``: the exact placement.
        """
        handle, instance = self.handle(index), ctypes.c_void_p()
        if start is None:
            self._call("nvmlDeviceCreateGpuInstance", handle, ctypes.c_uint(profile["id"]), ctypes.byref(instance))
        else:
            place = _Placement(start, size)
            self._call(
                "nvmlDeviceCreateGpuInstanceWithPlacement",
                handle,
                ctypes.c_uint(profile["id"]),
                ctypes.byref(place),
                ctypes.byref(instance),
            )
        info = _Instance()
        try:
            self._call("nvmlGpuInstanceGetInfo", instance, ctypes.byref(info))
            number = ctypes.c_uint(self._compute_profile(instance, WHOLE[profile["slices"]]) or 0)
            compute = ctypes.c_void_p()
            self._call("nvmlGpuInstanceCreateComputeInstance", instance, number, ctypes.byref(compute))
        except (NvmlError, KeyError):
            with contextlib.suppress(NvmlError):
                self._call("nvmlGpuInstanceDestroy", instance)
            raise
        return int(info.id)

    def destroy(self, index: int, instance_id: int) -> None:
        """Destroys a GPU instance with all of its compute instances."""
        instance = ctypes.c_void_p()
        self._call(
            "nvmlDeviceGetGpuInstanceById", self.handle(index), ctypes.c_uint(instance_id), ctypes.byref(instance)
        )
        for number in range(max(WHOLE.values()) + 2):
            profile = self._compute_profile(instance, number)
            for compute in (
                [] if profile is None else self._listed("nvmlGpuInstanceGetComputeInstances", instance, profile)
            ):
                self._call("nvmlComputeInstanceDestroy", compute)
        self._call("nvmlGpuInstanceDestroy", instance)


def read() -> dict[str, Any]:
    """Returns the result of ``Mig.gpus``, or its error: ``{ok, error, gpus}``."""
    try:
        session = Mig()
        session.start()
    except NvmlError as fault:
        return {"ok": False, "error": str(fault), "gpus": []}
    try:
        return {"ok": True, "error": "", "gpus": session.gpus()}
    except NvmlError as fault:
        return {"ok": False, "error": str(fault), "gpus": []}
    finally:
        session.stop()
