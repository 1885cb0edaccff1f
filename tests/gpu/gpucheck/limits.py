# SPDX-License-Identifier: Apache-2.0
"""The stage of gpu-check about memory limits that the driver itself enforces for control groups, from branch 615 on.
The stage runs the device plugin's start-up test of these limits. In a group with a limit it allocates memory until the
driver refuses, and runs the checks of the module vgpu_isolation. The stage is skipped on an older driver.
Strings such as ``get alloc 4096`` are commands of the program hand.c.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from .host import MIB, OK, OUT_OF_MEMORY, ROOT, Hand, Host
from .report import Report, Skip

FIRST_BRANCH = 615
# Command that starts a process with the capabilities that root has in an ordinary container.
ORDINARY = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", "sleep", "600")
# The stage fails if one of these checks fails. The other checks are only reported, because their result on a real GPU
# is unknown.
MUST_HOLD = ("driver-refuses", "driver-limit-children", "driver-limit-root")


def _shared(name: str, package: str = "gpu") -> Any:
    """Imports a module of plugins/module_utils that needs no Ansible."""
    sys.path.insert(0, str(ROOT / "plugins"))
    try:
        return importlib.import_module(f"module_utils.{package}.{name}")
    finally:
        sys.path.pop(0)


def cgroup_root() -> Path | None:
    """Returns a writable mount point of control groups version 2, or None. The stage makes its groups there."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        if line.split()[2] == "cgroup2" and os.access(line.split()[1], os.W_OK):
            return Path(line.split()[1])
    return None


def driver_limits(host: Host, report: Report) -> None:
    """Runs the device plugin's test of the driver's limits. If it passes, runs processes in groups with a limit."""
    limits, nvml = _shared("memory_limits"), _shared("nvml")
    reader = nvml.CtypesReader()
    reader.start()
    version = reader.driver_version()
    if int(version.partition(".")[0]) < FIRST_BRANCH:
        raise Skip(f"driver {version} enforces no limits of control groups; they came with branch {FIRST_BRANCH}")
    root = cgroup_root()
    if root is None or os.geteuid() != 0:
        raise Skip("the stage needs root and a writable mount of control groups version 2")
    report.figure("cgroup_root", str(root))
    report.figure("controllers", (root / "cgroup.controllers").read_text().split())
    handles = [reader.handle(index) for index in range(reader.count())]
    named = [(reader.uuid(one), one) for one in handles]
    backend, why = limits.probe(reader.library, named, str(root))
    report.figure("backend", backend)
    report.gate("a limit is set, read back and cleared", not why, "yes", why or "yes")
    if why:
        return
    handle = next(handle for uuid, handle in named if uuid == host.uuid)
    _refuses(host, report, limits, reader, handle)
    _tried(host, report, limits, reader, handle, backend)


def _refuses(host: Host, report: Report, limits: Any, reader: Any, handle: Any) -> None:
    """Allocates memory in a limited group, without libvgpu.so, until the driver refuses. By the driver's accounting
    the group must then be at its limit or little below."""
    hard = 2048 * MIB
    root = cgroup_root()
    assert root is not None
    group = root / f"vgpu-gpu-check-{os.getpid()}"
    group.mkdir()
    try:
        limits.set_limits(reader.library, handle, str(group), hard)
        enter = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group)]
        with Hand(host, wrapper=enter) as hand:
            hand.start()
            context = limits.get_limits(reader.library, handle, str(group)).used
            taken = 0
            while (status := hand.say(f"get alloc {64 * MIB}")[0]) == OK:
                taken += 64 * MIB
            used = limits.get_limits(reader.library, handle, str(group)).used
            report.figure("context_bytes", context)
            report.figure("beyond_bytes", used - taken - context)
            report.gate("the driver refuses memory at the limit", status == OUT_OF_MEMORY, OUT_OF_MEMORY, status)
            report.gate("the driver grants no more than the limit", used <= hard, hard, used)
            report.gate("the driver grants nearly the whole limit", used > hard - 256 * MIB, hard - 256 * MIB, used)
            report.figure("cuMemGetInfo", hand.say("info")[1:])
        limits.clear_limits(reader.library, handle, str(group))
    finally:
        group.rmdir()


def _tried(host: Host, report: Report, limits: Any, reader: Any, handle: Any, backend: str) -> None:
    """Runs the checks of vgpu_isolation in a limited group. Two of them test whether the driver also charges managed
    memory, and memory of a child whose parent has ended."""
    checks, hard, root = _shared("driver_checks", "isolation"), 2048 * MIB, cgroup_root()
    assert root is not None
    group = root / f"vgpu-gpu-check-{os.getpid()}-tried"
    group.mkdir()
    container = subprocess.Popen(ORDINARY)
    try:
        limits.set_limits(reader.library, handle, str(group), hard)
        tried = checks.DriverChecks(checks.Account(reader, host.uuid), host.uuid, f"driver-{backend}")
        for one in tried.run(str(group), container.pid, hard, lambda _name: True):
            report.figure(one["name"], f"{one['verdict']}: found {one['found'] or 'nothing'}; {one['detail']}")
            if one["name"] in MUST_HOLD:
                report.gate(one["name"], one["verdict"] == "passed", "passed", one["verdict"])
        limits.clear_limits(reader.library, handle, str(group))
    finally:
        container.kill()
        container.wait()
        group.rmdir()
