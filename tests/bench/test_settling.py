# SPDX-License-Identifier: Apache-2.0
"""Measures, with the kernel's counters, how often the library's settling thread wakes up in a busy process. This thread
replaces the predicted charge of finished launches by their measured GPU time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import Bench, world

MOST = 150  # Largest accepted number of wake-ups a second. The library's own limit is 100 on average.

# columns: kind of launch, duration of a kernel in microseconds, share of compute time in percent
BUSY = [("kernel", 20, 50), ("kernel", 100, 50), ("kernel", 1000, 25), ("sync", 100, 50), ("two-streams", 100, 90)]


@pytest.fixture
def node(bench: Bench, programs: Path):
    # shares.py imports the conftest of the library's tests
    mine, sys.modules["conftest"] = sys.modules["conftest"], world
    sys.path.insert(0, str(world.HERE))
    try:
        import shares
    finally:
        sys.modules["conftest"] = mine
        sys.path.pop(0)
    node = shares.Node(bench)
    yield shares, node
    node.close()


def hasty(folder: Path) -> Path:
    """Builds the library without the limit on the thread's wake-ups and returns its path."""
    source = (world.SOURCES / "compute/controller.c").read_text()
    assert "wakes_take(&wakes, " in source
    changed = folder / "controller.c"
    changed.write_text(source.replace("wakes_take(&wakes, ", "(wakes.paid = 0, "))
    objects = [world.object_of(one) for one in world.sources_of() if one.name != "controller.c"]
    command = [
        os.environ.get("CC", "cc"),
        "-O2",
        "-std=c11",
        "-D_GNU_SOURCE",
        "-fPIC",
        "-fvisibility=hidden",
        "-shared",
    ]
    command += [f"-I{world.SOURCES}", f"-I{world.SOURCES}/../include", f"-I{world.SOURCES}/compute"]
    command += [f"-Wl,--version-script={world.SOURCES}/libvgpu.map", "-Wl,-Bsymbolic", "-Wl,-z,nodelete"]
    subprocess.run([*command, changed, *objects, "-o", folder / "hasty.so"], check=True)
    return folder / "hasty.so"


def counted(pid: int) -> tuple[float, int, float]:
    """Returns the current time, and the settling threads' wake-ups and processor seconds so far."""
    wakes, busy = 0, 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        if (task / "comm").read_text() == "vgpu-limiter\n":
            lines = (task / "status").read_text().splitlines()
            wakes += int(next(line for line in lines if line.startswith("voluntary")).split()[1])
            busy += int((task / "schedstat").read_text().split()[0]) / 1e9
    return time.monotonic(), wakes, busy


def cost(node: tuple, name: str, seconds: float, **env: str) -> list:
    """Returns a pair for each busy program: wake-ups of the thread in a second, and its percent of a processor."""
    shares, one = node
    found = []
    for way, us, percent in BUSY:
        container = shares.Container(one, f"{name}-{way}-{us}", percent, core_policy="force")
        process = container.start(way, us=us, **env)
        time.sleep(0.5)
        before = counted(process.pid)
        time.sleep(seconds)
        after = counted(process.pid)
        passed = after[0] - before[0]
        found.append(((after[1] - before[1]) / passed, 100 * (after[2] - before[2]) / passed))
        process.kill()
        process.wait()
    return found


def test_wake_ups(node: tuple, bench: Bench, sizes: dict, row) -> None:
    """The gate is an upper bound, because the thread wakes less often on a busy machine."""
    control = hasty(bench.folder)
    ours, theirs = cost(node, "ours", sizes["seconds"]), cost(node, "hasty", 1, LD_PRELOAD=str(control))
    wakes, busy = (max(one[i] for one in ours) for i in (0, 1))
    row(
        "wakes",
        f"at most {MOST} wake-ups a second with any of {len(BUSY)} busy programs",
        lambda found: 0 < max(one[0] for one in found) <= MOST,
        ours,
        f"{wakes:.0f} wake-ups a second, {busy:.2f} % of a processor, including the simulated driver",
        theirs,
        f"without a limit on wake-ups: {max(one[0] for one in theirs):.0f} a second",
    )
