# SPDX-License-Identifier: Apache-2.0
"""A program whose launches the library limits must work as without the library, even if it destroys contexts, captures,
forks or gets signals. For comparison, each test also runs without a limit."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import LIMIT, LINKED, SIMULATOR, Host, compile_program
from shares import Container, Node


@pytest.fixture
def node(host: Host):
    node = Node(host)
    yield node
    node.close()


def run(node: Node, container: Container, what: str) -> None:
    program = compile_program(node.folder, "launch_life", "launch_life.c", flags=LINKED)
    env = node.host.env(
        CUDA_DEVICE_MEMORY_SHARED_CACHE=str(container.view / "ledger"),
        VGPU_LIMITS_FILE=str(container.folder / "limits"),
        GPUSIMCTL=str(SIMULATOR / "gpusimctl"),
    )
    done = subprocess.run(
        [program, what], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


CASES = ["contexts", "streams", "captures", "fork", "signals", "exit", "broken"]
BEHIND = ["behind", "uneven", "spread", "uneven-spread"]


@pytest.mark.parametrize("percent", [40, 0])
@pytest.mark.parametrize("what", [*CASES, *BEHIND])
def test_limited_program_ends_normally(node: Node, what: str, percent: int) -> None:
    container = Container(node, "a", percent, core_policy="force")
    run(node, container, what)
    assert bool(container.said()["used_ns"]) == bool(percent)


# Columns: the case of programs/launch_life.c; the compute limit of device 1 in percent; the expected minimum number of
# launches of 50 us that are charged to device 0.
CHARGED = [("threads", 40, 900), ("popped", 0, 800), ("popped", 40, 800), ("spread", 40, 700)]


@pytest.mark.parametrize(("what", "other", "launches"), CHARGED)
def test_every_launch_is_charged(node: Node, what: str, other: int, launches: int) -> None:
    percents = zip(node.host.uuids, (40, other))
    devices = [{"uuid": uuid, "memory_bytes": LIMIT, "sm_percent": percent} for uuid, percent in percents]
    container = Container(node, "a", 40, core_policy="force", devices=devices)
    run(node, container, what)
    assert container.said()["used_ns"] > 0.8 * launches * 50_000
    assert bool(container.said(1)["used_ns"]) == (what == "popped" and bool(other))


# Columns: the way of programs/launcher.c; the time of a kernel in us; the number of streams of a thread; the number of
# threads. The library measures 16 streams of a thread.
STREAMS = [(50, streams, 1) for streams in (1, 2, 3, 4, 6, 8, 16, 32)]
STREAMS += [(20, 16, 1), (1000, 2, 1), (1000, 8, 1), (50, 3, 3), (50, 8, 2), (20, 6, 4)]
ROWS = [(way, *row) for way in ("kernel", "wait") for row in STREAMS]
ROWS += [("kernel", 5, streams, 1) for streams in (2, 4, 8)] + [("poll", 50, streams, 1) for streams in (2, 8, 16, 32)]


@pytest.mark.parametrize(("way", "us", "streams", "threads"), ROWS)
def test_gpu_time_of_many_streams_is_charged_once(node: Node, way: str, us: int, streams: int, threads: int) -> None:
    container = Container(node, "a", 60, core_policy="force")
    output = container.start(way, seconds=0.6, us=us, threads=threads, streams=streams).communicate(timeout=60)[0]
    ran = us * sum(int(line.split()[0]) for line in output.splitlines())
    assert 0.8 * ran <= container.said()["used_ns"] / 1000 <= 1.25 * ran


@pytest.mark.parametrize("percent", [0, 50])
def test_missing_launch_function_of_an_old_driver_stays_unknown(host: Host, tmp_path: Path, percent: int) -> None:
    """If an old driver does not have a launch function, the library's hook of this function must return "not found",
    even after other launches."""
    folder = tmp_path / "old"
    shutil.copytree(SIMULATOR, folder)
    driver = folder / "libcuda.so.1"
    image = driver.read_bytes()
    assert image.count(b"\0cuLaunchKernelEx\0") >= 1
    driver.write_bytes(image.replace(b"\0cuLaunchKernelEx\0", b"\0cuLaunchKernelEy\0"))
    program = compile_program(tmp_path, "old_driver", "old_driver.c", flags=LINKED)
    devices = [{"uuid": uuid, "memory_bytes": LIMIT, "sm_percent": percent} for uuid in host.uuids]
    host.write_limits(devices=devices, core_policy="force")
    done = subprocess.run(
        [program], env=host.env(LD_LIBRARY_PATH=str(folder)), stdout=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "500\n")
