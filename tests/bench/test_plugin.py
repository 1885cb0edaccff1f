# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of the device plugin, with a test double of the kubelet: its start, its memory, its use of a
processor while idle, and its calls such as Allocate."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import figures
import grpc
import pytest

ROOT = Path(__file__).resolve().parents[2]
RESOURCE = "nvidia.com/gpu"
PROFILE = "driver_version = 535.261.03\ncuda_version = 12.2\n[gpu]\nmodel = T4\ncount = {}\n"

spec = importlib.util.spec_from_file_location("plugin_world", ROOT / "tests/integration/device_plugin/conftest.py")
assert spec and spec.loader
world = importlib.util.module_from_spec(spec)
sys.modules["plugin_world"] = world
spec.loader.exec_module(world)
node, node_at_rest = world.node, world.node_at_rest

from vgpu_plugin._proto import deviceplugin_pb2 as api  # noqa: E402
from vgpu_plugin._proto import deviceplugin_pb2_grpc as rpc  # noqa: E402


@pytest.fixture(scope="module")
def bytecode(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("bytecode") / "made"


@pytest.fixture
def served(node, bytecode):
    """Returns a function that starts the plugin on a node with ``gpus`` GPUs of ``split`` slices each; CDI is off
    unless options enable it."""

    def start(gpus: int, split: int, *options: str):
        node.end()
        # A real node's /run is in memory; on a disk each file of an allocation costs several times as much.
        if not os.path.ismount(node.folder / "run"):
            subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0755", "run", node.folder / "run"], check=True)
        (node.folder / "host.profile").write_text(PROFILE.format(gpus))
        Path(node.environment["GPUSIM_STATE"]).unlink(missing_ok=True)
        # Without the former node's record of its GPUs the plugin does not report them as lost.
        (node.folder / "state" / "offered.json").unlink(missing_ok=True)
        config = json.loads((node.folder / "node.yaml").read_text())
        config["sharing"]["vcuda"].update(splitCount=split, coresScaling="1")
        (node.folder / "node.yaml").write_text(json.dumps(config))
        node.options = list(options) or ["--cdi-dir", ""]
        # The plugin is measured with compiled bytecode, as on a host, where pip compiles it. Here the first start
        # compiles it.
        node.environment.pop("PYTHONDONTWRITEBYTECODE", None)
        node.environment["PYTHONPYCACHEPREFIX"] = str(bytecode)
        if not bytecode.exists():
            node.start()
            node.end()
        begun = time.monotonic()
        node.start()
        node.started_ms = (time.monotonic() - begun) * 1000
        node.started_cpu_ms = cpu_s(node.process.pid) * 1000
        assert len(node.kubelet.endpoints[RESOURCE].devices) == gpus * split
        return node

    return start


def stub_of(node):
    return rpc.DevicePluginStub(grpc.insecure_channel(f"unix:{node.folder}/kubelet/vgpu-nvidia.com_gpu.sock"))


def median_ms(calls: int, call) -> float:
    took = []
    for number in range(calls):
        begun = time.perf_counter()
        call(number)
        took.append((time.perf_counter() - begun) * 1000)
    return statistics.median(took)


def cpu_s(process: int) -> float:
    """Returns the processor seconds of all threads, from the kernel scheduler's accounting."""
    spent = [Path(one, "schedstat").read_text().split()[0] for one in Path(f"/proc/{process}/task").iterdir()]
    return sum(int(one) for one in spent) / 1e9


def wakes(process: int) -> int:
    """Returns how often the process's threads went to sleep voluntarily. A busy machine changes this number little."""
    found = 0
    for task in Path(f"/proc/{process}/task").iterdir():
        lines = (task / "status").read_text().splitlines()
        found += next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
    return found


def idle(process: int, seconds: float) -> tuple[float, float]:
    """Measures for ``seconds`` and returns percent of a core and wake-ups a minute."""
    before, woken, begun = cpu_s(process), wakes(process), time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - begun
    return 100 * (cpu_s(process) - before) / took, 60 * (wakes(process) - woken) / took


def slacks(process: int) -> set[str]:
    """Returns the timer slacks of the process's threads: by how many nanoseconds the kernel may delay a wake-up."""
    found = set()
    for task in [one.name for one in Path(f"/proc/{process}/task").iterdir()]:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # The thread has ended.
            found.add(Path(f"/proc/{task}/timerslack_ns").read_text().strip())
    return found


def note(name: str, measured: str, gate: str = "", held: bool | None = None) -> None:
    figure = figures.FIGURES[name]
    figure.measured, figure.gate, figure.held = measured, gate, held
    if held is None:
        figure.why = "a time depends on the machine, so it is only reported"
    assert held is not False, f"{figure.what}: {measured}, expected {gate}"


def test_time_until_the_kubelet_has_all_slices_is_measured(served):
    node = served(8, 10)
    note(
        "plugin-start",
        f"{node.started_ms:.0f} ms until the kubelet has all slices; {node.started_cpu_ms:.0f} ms of processor time",
    )


def test_idle_plugin_needs_little_memory_and_few_wake_ups(served, sizes):
    node = served(16, 100)
    process = node.process.pid
    # The plugin's first housekeeping raises the timer slack of gRPC's threads, so that they wake together. The
    # measurement starts after this housekeeping.
    world.until(lambda: "500000000" in slacks(process), "gRPC's threads have the larger timer slack")
    resident = next(
        int(line.split()[1]) for line in Path(f"/proc/{process}/status").read_text().splitlines() if "VmRSS" in line
    )

    part, woken = idle(process, max(15, sizes["idle"]))
    note("plugin-memory", f"{resident / 1000:.1f} MB", "≤ 60 MB", resident <= 60_000)
    note(
        "plugin-idle",
        f"{part:.3f} % of a core; {woken:.0f} wake-ups a minute",
        "≤ 700 wake-ups a minute",
        woken <= 700,
    )
    if not sizes["idle"]:
        figures.FIGURES["plugin-idle-cdi"].why = "the measurement takes two minutes: run make bench"
        return
    # Every ten seconds housekeeping checks each slice's CDI file. The reference is a run of equal length without CDI.
    bare = idle(served(8, 10).process.pid, sizes["idle"])[0]
    part = idle(served(8, 10, "--log-level", "info").process.pid, sizes["idle"])[0]
    note(
        "plugin-idle-cdi",
        f"{part:.3f} % of a core; {bare:.3f} % without CDI",
        "≤ 3 times as much as without CDI",
        part <= 3 * bare,
    )


def test_time_of_an_allocate_over_an_empty_call_is_measured(served, sizes):
    """Empty calls and Allocate calls alternate, so both see the same load of the machine; the result is the median of
    the differences."""
    node = served(8, 10)
    stub = stub_of(node)
    ids = list(node.kubelet.endpoints[RESOURCE].devices)
    calls = min(sizes["repeats"], len(ids))
    process = node.process.pid
    median_ms(calls, lambda _n: stub.GetDevicePluginOptions(api.Empty()))  # These calls warm up client and plugin.
    empty: list[float] = []
    over: list[float] = []
    spent: list[float] = []
    for one in ids[:calls]:
        before = cpu_s(process)
        empty.append(median_ms(1, lambda _n: stub.GetDevicePluginOptions(api.Empty())))
        between = cpu_s(process)
        full = median_ms(1, lambda _n, one=one: stub.Allocate(of_slice(one)))
        spent.append((cpu_s(process) - between) * 1000 - (between - before) * 1000)
        over.append(full - empty[-1])
    made = [one for one in (node.folder / "run/allocations").iterdir() if not one.name.startswith("slice-")]
    assert len(made) == calls  # Each allocation has its own files.
    note(
        "plugin-allocate",
        f"{statistics.median(over):.2f} ms more than an empty call of {statistics.median(empty):.2f} ms; "
        f"{statistics.median(spent):.2f} ms of processor time more",
    )


def of_slice(one: str) -> api.AllocateRequest:
    return api.AllocateRequest(container_requests=[api.ContainerAllocateRequest(devices_ids=[one])])


# System calls on files, as an argument of strace. A question mark lets strace ignore a call that the machine lacks.
FILE_CALLS = "%file,?write,?close,?ftruncate,?fchmod,?getdents64,?fstat,?fsync,?fdatasync,?ioctl,?lseek,?read,?pread64"


def test_allocate_makes_few_system_calls_on_files(served, tmp_path):
    node = served(8, 10)
    stub = stub_of(node)
    ids = list(node.kubelet.endpoints[RESOURCE].devices)

    stub.Allocate(of_slice(ids[0]))
    log = tmp_path / "calls"
    command = ["strace", "-f", "-qq", "-e", f"trace={FILE_CALLS}", "-e", "signal=none", "-o", str(log)]
    with subprocess.Popen([*command, "-p", str(node.process.pid)], stderr=subprocess.PIPE) as traced:
        try:
            world.until(lambda: _traced(node.process.pid), "strace has attached to every thread of the plugin")
            for one in ids[1:11]:
                stub.Allocate(of_slice(one))
        finally:
            # After this the end of the with block waits until strace has ended.
            traced.terminate()
    lines = [line.split(None, 1)[1] for line in log.read_text().splitlines() if "resumed>" not in line]
    # gRPC's threads wake each other by an eventfd.
    lines = [line for line in lines if not re.match(r'(read|write)\(\d+, "\\1(\\0){7}", 8\)', line)]
    # The watcher and other checks run at the same time, but on other files than those of an allocation.
    records = [line for line in lines if "allocations.json" in line]
    assert len(records) == 10, "each of the ten allocations must be written to allocations.json once"
    # An allocation made 42 to 44 calls before it got the folder `ro`.
    each = len(lines) / 10
    synced = [line for line in lines if "sync(" in line]
    note(
        "plugin-allocate-calls",
        f"{each:.0f}, {len(synced)} of them wait for a disk",
        "≤ 50, none for a disk",
        each <= 50,
    )
    assert not synced


def _traced(process: int) -> bool:
    tasks = [(task / "status").read_text() for task in Path(f"/proc/{process}/task").iterdir()]
    return all("TracerPid:\t0" not in one for one in tasks)


def test_time_of_a_preferred_allocation_is_measured(served, sizes):
    node = served(16, 100)
    stub = stub_of(node)
    ids = list(node.kubelet.endpoints[RESOURCE].devices)

    def prefer(available: list[str], size: int) -> None:
        one = api.ContainerPreferredAllocationRequest(available_deviceIDs=available, allocation_size=size)
        answer = stub.GetPreferredAllocation(api.PreferredAllocationRequest(container_requests=[one]))
        chosen = answer.container_responses[0].deviceIDs
        assert len({each.partition("::")[0] for each in chosen}) == size

    calls = sizes["repeats"]
    prefer(ids, 8)
    begun = cpu_s(node.process.pid)
    took = median_ms(calls, lambda _n: prefer(ids, 8))
    spent = (cpu_s(node.process.pid) - begun) * 1000 / calls
    note("plugin-preferred", f"{took:.2f} ms; {spent:.2f} ms of processor time")


def test_time_to_register_after_a_kubelet_restart_is_measured(served, sizes):
    node = served(8, 10)
    process = node.process.pid
    world.until(lambda: "500000000" in slacks(process), "gRPC's threads have the larger timer slack")
    took = []
    for _time in range(3):
        node.kubelet.stop()
        node.kubelet.start()
        begun = time.monotonic()
        world.until(node.connected, "the plugin is registered at the new kubelet socket")
        took.append((time.monotonic() - begun) * 1000)
    note("plugin-again", f"{took[0]:.0f} ms after the plugin was idle, {max(took[1:]):.0f} ms after two more restarts")
