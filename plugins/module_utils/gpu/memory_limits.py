# SPDX-License-Identifier: Apache-2.0
"""Sets and reads memory limits of control groups. The driver itself enforces these limits (branch 615 and newer). Also
probes whether a host supports them. NVML has one call that sets the limits and one that reads them. Figures are bytes;
a group is named by the absolute path of its folder. The return values prove nothing: setting a limit may report success
without an effect, and reading a group without a limit returns NOT_SUPPORTED. So the probe sets a limit on a new group
and reads it back.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, Callable, Iterable, NamedTuple

from .nvml import NOT_SUPPORTED, NvmlError

UNLIMITED = 2**64 - 1
CGROUP_ROOT = "/sys/fs/cgroup"
CGROUP2_MAGIC = 0x63677270
SCRATCH = "vgpu-probe"
PROBE_BYTES = 64 << 20
FUNCTION_NOT_FOUND = 13


class _Set(ctypes.Structure):
    _fields_ = [("group", ctypes.c_char_p), ("soft", ctypes.c_ulonglong), ("hard", ctypes.c_ulonglong)]


class _Get(ctypes.Structure):
    _fields_ = [*_Set._fields_, ("used", ctypes.c_ulonglong)]


class Limits(NamedTuple):
    """Holds limits and use of a group in bytes. ``hard``: UNLIMITED if there is no limit; ``used``: the memory that the
    driver charges to the group now.
    """

    soft: int
    hard: int
    used: int


def _checked(library: Any, name: str, handle: Any, argument: ctypes.Structure) -> None:
    try:
        function = getattr(library, name)
    except AttributeError:
        raise NvmlError(FUNCTION_NOT_FOUND, name) from None
    code = function(handle, ctypes.byref(argument))
    if code != 0:
        raise NvmlError(code, name)


def set_limits(library: Any, handle: Any, group: str, hard: int, soft: int = 0) -> None:
    """Sets the limits of a group. ``library``: libnvidia-ml, loaded by ctypes. Raises NvmlError. Success does not prove
    that the limit is active: check it with ``get_limits``.
    """
    _checked(library, "nvmlDeviceSetMemoryLimits_v1", handle, _Set(os.fsencode(group), soft, hard))


def get_limits(library: Any, handle: Any, group: str) -> Limits:
    """Returns the limits of a group. Raises NvmlError; NOT_SUPPORTED may mean that neither the group nor a group above
    it has a limit.
    """
    found = _Get(os.fsencode(group), 0, 0, 0)
    _checked(library, "nvmlDeviceGetMemoryLimits_v1", handle, found)
    return Limits(found.soft, found.hard, found.used)


def clear_limits(library: Any, handle: Any, group: str) -> None:
    set_limits(library, handle, group, UNLIMITED)


class _Statfs(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_long), ("rest", ctypes.c_char * 512)]


def is_cgroup2(folder: str) -> bool:
    """Returns whether version 2 of control groups is mounted at this path. On a host with both versions it is mounted
    below the root, so the result for the root is False.
    """
    found = _Statfs()
    done = ctypes.CDLL(None).statfs(os.fsencode(folder), ctypes.byref(found))
    return done == 0 and found.kind == CGROUP2_MAGIC


def backend(cgroup_root: str = CGROUP_ROOT) -> str:
    """Returns the controller that accounts GPU memory. It is dmem if dmem.capacity lists NVIDIA's regions. Else it is
    misc, which does not show how much memory is used.
    """
    try:
        with open(os.path.join(cgroup_root, "dmem.capacity"), encoding="ascii", errors="replace") as stream:
            if any(line.startswith("nvidia/") for line in stream):
                return "dmem"
    except OSError:
        pass
    return "misc"


def probe(
    library: Any, handles: Iterable[tuple[str, Any]], cgroup_root: str = CGROUP_ROOT, name: str = SCRATCH
) -> tuple[str, str]:
    """Tests whether this host's driver enforces limits on all of these GPUs; returns (backend, "") or ("", why not).

    Creates a test group, sets a limit of 64 MiB and reads it back, clears the limit and reads the limit again, and
    removes the group. Needs root.
    """
    group = os.path.join(cgroup_root, f"{name}-{os.getpid()}")
    try:
        os.mkdir(group)
    except OSError as fault:
        return "", f"no control group can be made in {cgroup_root}: {fault.strerror}"
    try:
        why = _turned_on(group, cgroup_root)
        for uuid, handle in handles:
            why = why or _proved(library, handle, group, uuid)
    finally:
        os.rmdir(group)
    return ("", why) if why else (backend(cgroup_root), "")


def _turned_on(group: str, cgroup_root: str) -> str:
    """Enables the controller in the test group if the kernel has the controller. Returns why the controller cannot be
    enabled, else an empty text.
    """
    controller = backend(cgroup_root)
    if controller not in _words(os.path.join(cgroup_root, "cgroup.controllers")) or controller in _words(
        os.path.join(group, "cgroup.controllers")
    ):
        return ""
    path = os.path.join(cgroup_root, "cgroup.subtree_control")
    try:
        with open(path, "w", encoding="ascii") as stream:
            stream.write("+" + controller)
    except OSError as fault:
        return f"the controller {controller} cannot be enabled in {path}: {fault.strerror}"
    return ""


def _words(path: str) -> list[str]:
    try:
        with open(path, encoding="ascii", errors="replace") as stream:
            return stream.read().split()
    except OSError:
        return []


def _proved(library: Any, handle: Any, group: str, uuid: str) -> str:
    """Returns why a limit is not active on a GPU; an empty text if it is active."""
    steps: tuple[tuple[int, Callable[[], None]], ...] = (
        (PROBE_BYTES, lambda: set_limits(library, handle, group, PROBE_BYTES)),
        (UNLIMITED, lambda: clear_limits(library, handle, group)),
    )
    try:
        for expected, step in steps:
            step()
            found = get_limits(library, handle, group)
            if (found.soft, found.hard) != (0, expected):
                return f"{uuid}: a limit of {expected} bytes reads back as hard {found.hard}, soft {found.soft}"
    except NvmlError as fault:
        if fault.code == FUNCTION_NOT_FOUND:
            return "this driver cannot limit the GPU memory of control groups; branch 615 and newer can"
        if fault.code == NOT_SUPPORTED:
            return f"{uuid}: the driver does not enforce limits here ({fault})"
        return f"{uuid}: {fault}"
    return ""
