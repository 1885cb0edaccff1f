# SPDX-License-Identifier: Apache-2.0
"""Tests what a process reads through nvidia-ml-py about the other processes of a GPU: their pids, memory and
utilization. Strings such as ``nvmlDeviceGetCount()`` are Python expressions that ask_nvml.py evaluates in a new
process. ``gpu(0)`` is the handle of GPU 0."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest
from simulated_host import HERE, ROOT, needs_root

MIB = 1 << 20
PROFILE = "clock = manual\njitter_percent = 0\nseed = 7\n[gpu]\nmodel = T4\n[gpu]\nmodel = V100-16GB\n"
CONTEXT = {0: 104 * MIB, 1: 308 * MIB}  # Size of a context on these GPU models, from the simulator's table of models.
ALL = 0xFFFFFFFF


@pytest.fixture(scope="module")
def busy_gpu(tmp_path_factory) -> str:
    """Compiles the client that uses a GPU without CUDA."""
    program = tmp_path_factory.mktemp("busy") / "busy_gpu"
    core = ROOT / "native" / "gpusim" / "core"
    sources = [str(path) for path in sorted(core.glob("*.c"))]
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-O1", f"-I{core}"]
    subprocess.run(["cc", *flags, "-o", str(program), str(HERE / "busy_gpu.c"), *sources], check=True)
    return str(program)


@pytest.fixture()
def host(make_host, busy_gpu):
    """Returns a host with a manual clock and clients for it."""
    host = make_host(PROFILE)

    @contextlib.contextmanager
    def client(gpu: int, size: int = 0, kernel_ms: int = 0, prefix: tuple = ()):
        command = [*prefix, busy_gpu, "hold", str(gpu), str(size), str(kernel_ms)]
        with subprocess.Popen(
            command, env=host.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout.readline() == "ready\n"
            yield process

    host.client = client
    host.advance = lambda ms: host.run(busy_gpu, "advance", str(ms))
    return host


def test_nvml_lists_processes_and_their_memory(host):
    lists = [
        "nvmlDeviceGetComputeRunningProcesses(gpu({}))",
        "nvmlDeviceGetComputeRunningProcesses_v2(gpu({}))",
        "nvmlDeviceGetComputeRunningProcesses_v3(gpu({}))",
    ]
    calls = [text.format(gpu) for gpu in (0, 1) for text in lists]
    used = ["nvmlDeviceGetMemoryInfo(gpu(0)).used", "nvmlDeviceGetMemoryInfo(gpu(1)).used"]

    def entry(process, size):
        return {"pid": process.pid, "usedGpuMemory": size, "gpuInstanceId": ALL, "computeInstanceId": ALL}

    with host.client(0, 1000) as first, host.client(0, 5 * MIB) as second, host.client(1) as third:
        on_t4 = [entry(first, CONTEXT[0] + 1000), entry(second, CONTEXT[0] + 5 * MIB)]
        on_v100 = [entry(third, CONTEXT[1])]
        answers = host.nvml(*calls, *used)
        assert [sorted(a, key=lambda e: e["pid"]) for a in answers[:3]] == [sorted(on_t4, key=lambda e: e["pid"])] * 3
        assert answers[3:6] == [on_v100] * 3
        assert answers[6:] == [2 * CONTEXT[0] + 1000 + 5 * MIB, CONTEXT[1]]
        second.send_signal(signal.SIGKILL)
        second.wait()
        assert host.nvml(calls[0], used[0]) == [[entry(first, CONTEXT[0] + 1000)], CONTEXT[0] + 1000]
    assert host.nvml(calls[0], calls[3], *used) == [[], [], 0, 0]


@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace needs root")
def test_pids_are_those_of_the_observers_namespace(host):
    """As with a real driver, the host sees a container's process by its pid on the host, and the container does not see
    the host's processes."""
    call, used = "[p.pid for p in nvmlDeviceGetComputeRunningProcesses(gpu(0))]", "nvmlDeviceGetMemoryInfo(gpu(0)).used"
    container = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    with host.client(0) as outside, host.client(0, prefix=container) as shell:
        inside = int(Path(f"/proc/{shell.pid}/task/{shell.pid}/children").read_text())
        assert sorted(host.nvml(call)[0]) == sorted([outside.pid, inside])
        assert host.nvml(call, used, prefix=container) == [[], 2 * CONTEXT[0]]
        enter = ("nsenter", "-t", str(inside), "-p", "-m")
        assert host.nvml(call, prefix=enter) == [[1]]


def test_process_list_that_does_not_fit_returns_its_length(host):
    setup = (
        "lib = ctypes.CDLL('libnvidia-ml.so.1')\narray = (c_nvmlProcessInfo_v2_t * 4)()\n"
        "def ask(name, room, buffer=array):\n    count = ctypes.c_uint(room)\n"
        "    return [getattr(lib, name)(gpu(0), ctypes.byref(count), buffer), count.value]"
    )
    name = "'nvmlDeviceGetComputeRunningProcesses_v3'"
    with host.client(0), host.client(0):
        calls = [f"ask({name}, 0, None)", f"ask({name}, 1)", f"ask({name}, 2)", f"ask({name}, 4)"]
        assert host.nvml(*calls, setup=setup) == [[7, 2], [7, 2], [0, 2], [0, 2]]


def test_one_busy_process_shows_full_utilization(host):
    load = [
        "nvmlDeviceGetUtilizationRates(gpu(0))",
        "nvmlDeviceGetPowerUsage(gpu(0))",
        "nvmlDeviceGetTemperature(gpu(0), 0)",
        "nvmlDeviceGetPerformanceState(gpu(0))",
        "nvmlDeviceGetClockInfo(gpu(0), NVML_CLOCK_SM)",
        "nvmlDeviceGetUtilizationRates(gpu(1))",
    ]
    with host.client(0, kernel_ms=-1) as busy, host.client(0):
        host.advance(1000)
        idle = {"gpu": 0, "memory": 0}
        gpu, *rest = host.nvml(*load)
        assert 99 <= gpu["gpu"] <= 100
        assert gpu["memory"] == gpu["gpu"] // 2
        assert rest[1:] == [64 + gpu["gpu"] // 100, 0, 1590, idle]
        assert 69000 <= rest[0] <= 70000
        [samples] = host.nvml("nvmlDeviceGetProcessUtilization(gpu(0), 0)")
        assert [entry["pid"] for entry in samples] == [busy.pid]
        newest = samples[0]["timeStamp"]
        # The first sampling period began when the simulated host was started. On a busy machine the kernel may have
        # started much later, so check only later periods.
        [later] = host.nvml(f"nvmlDeviceGetProcessUtilization(gpu(0), {newest - 700_000})")
        assert 98 <= later[0]["smUtil"] <= 100
        # NVML keeps a sample every 138.9 ms, so 7 in the first second. A query for samples newer than the newest finds
        # none.
        calls = [
            f"nvmlDeviceGetProcessUtilization(gpu(0), {newest})",
            f"len(nvmlDeviceGetProcessUtilization(gpu(0), {newest - 1}))",
            "len(nvmlDeviceGetSamples(gpu(0), NVML_GPU_UTILIZATION_SAMPLES, 0)[1])",
            f"len(nvmlDeviceGetSamples(gpu(0), NVML_GPU_UTILIZATION_SAMPLES, {newest - 300000})[1])",
            f"nvmlDeviceGetSamples(gpu(0), NVML_GPU_UTILIZATION_SAMPLES, {newest})",
        ]
        assert host.nvml(*calls) == ["NVML_ERROR_NOT_FOUND", 1, 7, 3, "NVML_ERROR_NOT_FOUND"]


def test_two_processes_share_the_gpu_and_each_sample_names_one_of_them(host):
    with host.client(0, kernel_ms=-1) as first, host.client(0, kernel_ms=-1) as second:
        host.advance(20000)
        [samples, ring] = host.nvml(
            "nvmlDeviceGetProcessUtilization(gpu(0), 0)",
            "len(nvmlDeviceGetSamples(gpu(0), NVML_GPU_UTILIZATION_SAMPLES, 0)[1])",
        )
        assert ring == 72, "the driver must keep the samples of the last 10 s, which are 72"
        assert sorted(entry["pid"] for entry in samples) == sorted([first.pid, second.pid])
        assert 90 <= sum(entry["smUtil"] for entry in samples) <= 100
        # Each of the 72 samples names one of the two processes, each with the probability 1/2. So a process gets 50 %
        # with a standard deviation of 5.9 %. The range below is 5 standard deviations.
        assert all(20 <= entry["smUtil"] <= 80 for entry in samples)


def test_ended_short_kernel_has_no_sample(host):
    with host.client(0, kernel_ms=100):
        host.advance(1000)
        calls = ["nvmlDeviceGetUtilizationRates(gpu(0)).gpu", "nvmlDeviceGetSamples(gpu(0), 1, 0)[1]"]
        now, ring = host.nvml(*calls)
        assert now == 0
        values = [sample["sampleValue"]["uiVal"] for sample in ring]
        # The kernel ran for 100 ms of the first period, which takes 138.9 ms.
        assert values[0] == pytest.approx(72, abs=1)
        assert values[1:] == [0] * 6


@needs_root
def test_accounting_covers_live_and_ended_processes(host):
    host.nvml("nvmlDeviceSetAccountingMode(gpu(0), 1)")
    stats = "nvmlDeviceGetAccountingStats(gpu(0), {})"
    with host.client(0, 3 * MIB, kernel_ms=500) as client:
        host.advance(1000)
        pids, live = host.nvml("nvmlDeviceGetAccountingPids(gpu(0))", stats.format(client.pid))
        assert pids == [client.pid]
        assert live["isRunning"] == 1
        assert live["maxMemoryUsage"] == CONTEXT[0] + 3 * MIB
        assert live["gpuUtilization"] == pytest.approx(50, abs=1)
    host.nvml("nvmlDeviceGetMemoryInfo(gpu(0))")
    [ended, other] = host.nvml(stats.format(client.pid), stats.format(1))
    assert ended["isRunning"] == 0
    assert ended["time"] == 1000
    assert ended["maxMemoryUsage"] == CONTEXT[0] + 3 * MIB
    assert other == "NVML_ERROR_NOT_FOUND"
