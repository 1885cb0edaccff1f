# SPDX-License-Identifier: Apache-2.0
"""Reads the GPU memory and the mounts of the processes in a slice (share of a GPU). The data comes from the host's
driver and kernel, never from the processes themselves.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, Sequence

from ..gpu import memory_limits
from ..gpu.nvml import CtypesReader, NvmlError
from .driver_verdicts import DriverLimit

NOT_AVAILABLE = 2**64 - 1  # NVML's return value if this platform does not report the memory of a process.
INSUFFICIENT_SIZE = 7


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class ProcessReader(CtypesReader):
    """Extends the NVML reader by the list of a GPU's processes."""

    def processes(self, handle: Any) -> dict[int, int | None]:
        """Maps the pid of each process to its GPU memory in bytes; None if the platform does not report the memory."""
        capacity = 64
        while True:
            count = ctypes.c_uint(capacity)
            table = (_Process * capacity)()
            try:
                self._call("nvmlDeviceGetComputeRunningProcesses_v3", handle, ctypes.byref(count), table)
            except NvmlError as fault:
                if fault.code == INSUFFICIENT_SIZE and capacity < 65536:
                    capacity *= 4
                    continue
                raise
            return {one.pid: None if one.used == NOT_AVAILABLE else int(one.used) for one in table[: count.value]}


class MemoryWatch:
    """Polls NVML and records the greatest memory sum that the processes of one mount namespace used on one GPU."""

    def __init__(self, reader: Any, uuid: str, proc: str = "/proc") -> None:
        self.reader = self._reader = reader
        self._proc = proc
        self._handle: Any = None
        self.fault = ""
        self.polls = 0
        self.most_bytes: int | None = None
        # True if NVML listed a process of the slice without its memory figure, because this platform does not report
        # that figure.
        self.untold = False
        try:
            reader.start()
            found = [reader.handle(index) for index in range(reader.count())]
            self._handle = next((one for one in found if reader.uuid(one) == uuid), None)
            if self._handle is None:
                self.fault = f"NVML on the host lists no GPU {uuid}"
        except NvmlError as fault:
            self.fault = str(fault)

    def poll(self, pid: int) -> None:
        """Polls NVML once. ``pid``: any process of the watched namespace."""
        if self._handle is None:
            return
        inside = namespace_of(pid, self._proc)
        try:
            listed = self._reader.processes(self._handle)
        except NvmlError as fault:
            self.fault = str(fault)
            return
        self.polls += 1
        if not inside:
            return
        mine = [used for one, used in listed.items() if namespace_of(one, self._proc) == inside]
        ours = [used for used in mine if used is not None]
        self.untold = self.untold or len(ours) < len(mine)
        if ours:
            self.most_bytes = max(self.most_bytes or 0, sum(ours))

    def close(self) -> None:
        try:
            self._reader.stop()
        except NvmlError:
            self._handle = None


def watch(uuid: str) -> MemoryWatch | None:
    """Returns a watch through the host's NVML; None if the host has no NVML."""
    try:
        return MemoryWatch(ProcessReader(), uuid)
    except NvmlError:
        return None


def group_of(pid: int, cgroup_root: str, proc: str = "/proc") -> str:
    """Returns the folder of a process's control group of version 2, empty if the process has none."""
    try:
        with open(f"{proc}/{pid}/cgroup", encoding="utf-8", errors="replace") as stream:
            names = [line[3:].strip() for line in stream if line.startswith("0::")]
    except OSError:
        return ""
    return os.path.join(cgroup_root, names[0].lstrip("/")) if names else ""


def driver_limit(reader: Any, uuid: str, group: str) -> DriverLimit:
    """Returns the driver's limit of a control group. With the controller misc, a group without a limit shows the limit
    of the nearest group above it. So a limit that equals the parent group's limit counts as the parent's.
    """
    try:
        reader.start()
        found = [reader.handle(index) for index in range(reader.count())]
        handle = next((one for one in found if reader.uuid(one) == uuid), None)
        if handle is None or not group:
            return DriverLimit(group, fault=f"NVML lists no {uuid}" if group else "the container has no control group")
        limits, card = memory_limits.get_limits(reader.library, handle, group), reader.memory(handle)[0]
    except NvmlError as fault:
        return DriverLimit(group, fault=str(fault))
    if limits.hard == memory_limits.UNLIMITED:
        return DriverLimit(group, fault="the driver has no limit for its control group")
    try:
        above = memory_limits.get_limits(reader.library, handle, os.path.dirname(group))
    except NvmlError:
        above = None
    own = above is None or above.hard != limits.hard
    return DriverLimit(group, limits.soft, limits.hard, own, card, inode=_inode(group))


def _inode(folder: str) -> int:
    """Returns the inode of the group's folder, which identifies the group whatever its path; 0 if it is gone."""
    try:
        return os.stat(folder).st_ino
    except OSError:
        return 0


def namespace_of(pid: int, proc: str = "/proc") -> str:
    """Returns the mount namespace of a process, empty if the process is gone."""
    try:
        return os.readlink(f"{proc}/{pid}/ns/mnt")
    except OSError:
        return ""


def parent_of(pid: int, proc: str = "/proc") -> int:
    """Returns the pid of a process's parent, 0 if the process is gone."""
    try:
        with open(f"{proc}/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            # The process name, in parentheses, may hold any character.
            return int(stream.read().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def gpu_device_nodes(pid: int, proc: str = "/proc") -> list[str] | None:
    """Returns the names of the GPU device nodes in the process's /dev; None if the process is gone."""
    try:
        names = os.listdir(f"{proc}/{pid}/root/dev")
    except OSError:
        return None
    return sorted(name for name in names if name.startswith("nvidia") and name[len("nvidia") :].isdigit())


def missing_mounts(pid: int, mounts: Sequence[Any], proc: str = "/proc") -> list[str] | None:
    """Returns the container paths at which the process does not see exactly the host's file; None
    if the process is gone.
    """
    if not namespace_of(pid, proc):
        return None
    missing = []
    for mount in mounts:
        try:
            inside = os.stat(f"{proc}/{pid}/root{mount.container_path}")
            outside = os.stat(mount.host_path)
        except OSError:
            missing.append(mount.container_path)
            continue
        if (inside.st_dev, inside.st_ino) != (outside.st_dev, outside.st_ino):
            missing.append(mount.container_path)
    return missing
