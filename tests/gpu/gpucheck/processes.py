# SPDX-License-Identifier: Apache-2.0
"""Stages of gpu-check about processes: whether the library intercepts every call, whether processes that allocate at
the same time exceed the limit, and whether the memory of killed processes becomes free. A gate is a requirement on a
result: if one is not met, the stage fails. Strings such as ``get alloc 4096`` are commands of the program hand.c.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import struct
import subprocess
import sys
import time
from typing import Any

from . import symbols
from .host import OK, Hand, Host
from .report import Report, Skip
from .stamps import middle


def environment(host: Host, report: Report) -> None:
    """Describes driver and GPU, and compares every exported name and every address of cuGetProcAddress."""
    report.figure("driver_version", host.card.driver())
    report.figure("gpu", host.card.name())
    report.figure("gpus", host.card.count())
    report.figure("memory", host.card.memory2())
    report.figure("neighbours", len(host.card.processes()))
    report.figure("kernel", os.uname().release)
    report.figure("cores", os.cpu_count())
    report.figure("python", sys.version.split()[0])
    report.figure("libcuda", str(host.libcuda))
    report.gate("this kernel has locks of open file descriptions", _description_locks(host), True, os.uname().release)
    maps = symbols.loaded_path("libnvidia-ml.so.1")
    report.figure("libnvidia_ml", str(maps))
    exported = {}
    for key, path in {"libcuda": host.libcuda, "libnvidia-ml": maps}.items():
        try:
            exported[key] = list(symbols.exports(path)) if path else []
        except (OSError, ValueError) as error:
            report.note(f"{key}: the exported names cannot be read: {error}")
    report.figure("exports", exported)
    names = symbols.base_names([name for name in exported.get("libcuda", []) if name.startswith("cu")])
    bare = host.inside("symbols", host.base_env, feed=json.dumps(names), seconds=120)
    report.figure("cuGetProcAddress", bare)
    slice_ = host.slice(host.limit())
    ours = host.inside("symbols", slice_.env(), feed=json.dumps(names), seconds=120)
    refused, wrong, replaced = compare(bare, ours)
    report.figure("cuGetProcAddress_replaced", replaced)
    # If the driver returns an address that it does not export, only cuda.h says which form of the function it is.
    unnamed = [name for name in replaced if any(step[1][0] == "+" for steps in bare[name].values() for step in steps)]
    report.figure("cuGetProcAddress_replaced_unnamed", unnamed)
    report.figure("cuGetProcAddress_refused", refused)
    report.gate("cuGetProcAddress: driver's or library's functions", not wrong, "no other address", wrong[:5])
    report.gate(
        "cuGetProcAddress: cuMemAlloc of the library",
        "cuMemAlloc" in replaced,
        "cuMemAlloc replaced",
        len(replaced),
    )


def _description_locks(host: Host) -> bool:
    """Returns true if F_OFD_SETLK refuses a lock that another open file description holds.

    The ledger, the file of charged memory, detects dead processes by such locks."""
    path = host.folder / "locked"
    path.write_bytes(b"")
    lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 1 << 30, 1, 0)
    with path.open("r+b") as one, path.open("r+b") as other:
        try:
            fcntl.fcntl(one, 37, lock)
        except OSError:
            return False
        try:
            fcntl.fcntl(other, 37, lock)
        except BlockingIOError:
            return True
        return False


def at(steps: list, version: int) -> str:
    """Returns the entry that applies to ``version``, from a sorted list of [first version, entry]; else "!never"."""
    found = "!never"
    for since, answer in steps:
        if since <= version:
            found = answer
    return found


def compare(bare: dict[str, Any], ours: dict[str, Any]) -> tuple[list[str], list[str], list[str]]:
    """Returns the lookups that the library changes: (refused, wrong, replaced names). A lookup is wrong if it returns
    an address that is neither the driver's nor the library's, or a function that the driver does not have."""
    refused, wrong, replaced = [], [], set()
    for name, flags in bare.items():
        for flag, steps in flags.items():
            for version in symbols.VERSIONS:
                driver, found = at(steps, version), at(ours.get(name, {}).get(flag, []), version)
                place = f"{name} @{version} {flag}"
                if found == driver:
                    continue
                if found == "elsewhere" and not driver.startswith("!"):
                    replaced.add(name)
                elif found.startswith("!500") and not driver.startswith("!"):
                    refused.append(place)
                else:
                    wrong.append(f"{place}: {driver} became {found}")
    return refused, wrong, sorted(replaced)


# Bypasses that the library prevents although it is only loaded by LD_PRELOAD; they are gates. The test slice has no
# mounts, so the other bypasses are only reported.
HELD_WITHOUT_MOUNTS = (
    "bypass-path",
    "bypass-copy",
    "bypass-more-devices",
    "bypass-descriptors",
)
# These checks are gates too if they run. The bypass checks need a driver that can export memory. private-context needs
# the simulated driver's private table; on a real GPU the stage private-context uses NVIDIA's runtime instead.
IF_THEY_RUN = ("private-context", "bypass-ipc-kept", "bypass-handle-kept", "bypass-pool-kept", "bypass-array-kept")
# This check is only reported, because its result depends on the libraries that are installed on the host.
TOLD = ("graphics",)


def load(host: Host, report: Report) -> None:
    """Loads the library in a program without CUDA, and tests each way to look up a driver function (vgpu-probe)."""
    slice_ = host.slice(host.limit())
    runs = 20 if host.quick else 200
    times: dict[str, list[float]] = {"bare": [], "preloaded": []}
    for _unused in range(runs):
        for name, env in {"bare": host.base_env, "preloaded": slice_.env()}.items():
            began = time.perf_counter()
            subprocess.run(["true"], env=env, check=True)
            times[name].append((time.perf_counter() - began) * 1e3)
    more = middle([after - before for before, after in zip(times["bare"], times["preloaded"])])
    report.figure("true_ms", {name: round(middle(values), 3) for name, values in times.items()})
    report.goal("preload adds less than 0.3 ms to the program true", more < 0.3, "< 0.3 ms", f"{more:.3f} ms")
    silent = subprocess.run(["true"], env=slice_.env(), stderr=subprocess.PIPE, check=False)
    report.gate("no output in a program without CUDA", silent.stderr == b"", "", silent.stderr.decode(errors="replace"))
    if not host.probe.exists():
        raise Skip(f"the library's folder has no {host.probe.name}")
    text = host.run(host.probe, "--json", env=slice_.env(), seconds=200, check=False)
    for row in json.loads(text)["checks"]:
        cannot = row["name"] in IF_THEY_RUN and row["verdict"] == "not-run"
        way = row["name"].startswith("bypass-") and row["name"] not in (*HELD_WITHOUT_MOUNTS, *IF_THEY_RUN)
        if way or cannot or row["name"] in TOLD:
            report.figure(row["name"], row["verdict"])
            continue
        report.gate(
            "probe: " + row["name"], row["verdict"] == "passed", row["expected"], f"{row['found']} {row['detail']}"
        )


def race(host: Host, report: Report) -> None:
    """Lets all processes request memory at the same moment. Only one of them can get it."""
    rounds = 50 if host.quick else 400
    for processes in (2, 4):
        slice_ = host.slice(host.limit())
        found = host.program("race", processes, rounds, env=slice_.env(), seconds=120)
        report.figure(f"{processes} processes", found)
        report.gate(f"{processes} processes: none over the limit", found["over"] == 0, 0, found["over"])
        sound = found["died"] == found["broken"] == found["other"] == 0 and found["none"] < rounds
        report.gate(f"{processes} processes: all end without an error", sound, "no error", found)


def kill(host: Host, report: Report) -> None:
    """Measures the time from SIGKILL until the killed process's bytes are free in the slice and on the GPU."""
    rounds = 2 if host.quick else 5
    quota, physical, usable = [], [], []
    for _unused in range(rounds):
        slice_ = host.slice(host.limit())
        before = host.card.memory()["used"]
        with Hand(host, slice_.env()) as survivor, Hand(host, slice_.env()) as victim:
            survivor.start()
            alone = host.held([survivor.pid], before)[0]
            own = slice_.total()
            victim.start()
            piece = (host.limit() - slice_.total()) // 4 * 3
            victim.must(f"get alloc {piece}")
            if not host.simulated:  # Simulated GPU memory is host memory, which is slow to fill and free.
                victim.must("bytes 0 1")
            full = survivor.say(f"get alloc {piece}")[0]
            report.gate("the full slice refuses the survivor", full != OK, "not 0", full)
            began = time.monotonic()
            os.kill(victim.pid, signal.SIGKILL)
            marks: dict[str, float] = {}
            while time.monotonic() - began < 10 and len(marks) < 3:
                now = time.monotonic() - began
                if "quota" not in marks and slice_.total() <= own:
                    marks["quota"] = now
                if "usable" not in marks and survivor.say(f"get alloc {piece}")[0] == OK:
                    marks["usable"] = time.monotonic() - began
                    survivor.must("drop 0")
                shown = host.card.processes()
                gone = victim.pid not in shown if shown else host.card.memory()["used"] - before <= alone + (64 << 20)
                if "physical" not in marks and gone:
                    marks["physical"] = time.monotonic() - began
                time.sleep(0.001)
            victim.process.wait(10)
            for name, values in {"quota": quota, "physical": physical, "usable": usable}.items():
                values.append(marks.get(name, 10.0))
    for name, values in {"quota": quota, "physical": physical, "usable": usable}.items():
        report.figure(name + "_seconds", [round(value, 4) for value in values])
    most = 9 if host.simulated else 1
    report.gate("the victim's bytes are uncharged in time", max(quota) < most, f"< {most} s", f"{max(quota):.3f} s")
    report.gate(
        "the survivor can allocate these bytes in time", max(usable) < most, f"< {most} s", f"{max(usable):.3f} s"
    )
    report.goal("these bytes are free on the GPU within a second", max(physical) < 1, "< 1 s", f"{max(physical):.3f} s")
