# SPDX-License-Identifier: Apache-2.0
"""Tests how a monitoring program sees faults: events that end a wait in another process, lost GPUs, and a missing
driver. Strings such as ``nvmlDeviceGetCount()`` are Python expressions that ask_nvml.py evaluates in a new process.
``gpu(0)`` is the handle of GPU 0."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from simulated_host import HERE, LIBRARIES, needs_root

XID, SINGLE_BIT, DOUBLE_BIT = 0x8, 0x1, 0x2
# Code of a program that waits for events, as a device plugin does. One event set receives all events of GPUs 0 and 1.
# wait() returns the GPU, the type, the data and the MIG instance of the next event.
WATCH = f"""
import sys
watched = nvmlEventSetCreate()
for i in (0, 1):
    nvmlDeviceRegisterEvents(gpu(i), {XID | SINGLE_BIT | DOUBLE_BIT}, watched)

def wait(timeout):
    event = nvmlEventSetWait_v2(watched, timeout)
    return [nvmlDeviceGetIndex(event.device), event.eventType, event.eventData, event.gpuInstanceId]

print("watching", flush=True)
"""
# Columns: the arguments of gpusimctl; the expected event in the waiting program as [GPU, event type, data].
EVENTS = [
    (["xid", "0", "79"], [0, XID, 79]),
    (["xid", "1", "31"], [1, XID, 31]),
    (["ecc", "1", "2", "single"], [1, SINGLE_BIT, 0]),
    (["ecc", "1", "2"], [1, DOUBLE_BIT, 0]),
]


@pytest.fixture()
def watcher(mixed):
    """Returns a function that starts a process which waits for events of GPUs 0 and 1 without a time limit. The
    processes are killed at the end."""

    def start(*expressions: str) -> subprocess.Popen:
        question = json.dumps({"setup": WATCH, "expressions": expressions})
        process = subprocess.Popen(
            [sys.executable, str(HERE / "ask_nvml.py"), question],
            env=mixed.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout.readline() == "watching\n"
        return process

    started: list = []
    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(("command", "expected"), EVENTS, ids=[" ".join(row[0]) for row in EVENTS])
def test_event_wakes_a_waiting_process(mixed, watcher, command, expected):
    process = watcher("wait(15000)")
    mixed.ctl(*command)
    assert json.loads(process.stdout.readline()) == [[*expected, 0xFFFFFFFF]]


def test_events_come_in_order_and_once(mixed, watcher):
    process = watcher("wait(15000)", "wait(15000)", "wait(15000)", "wait(0)")
    for number in ("13", "31", "94"):
        mixed.ctl("xid", "0", number)
    *events, last = json.loads(process.stdout.readline())
    assert [event[2] for event in events] == [13, 31, 94]
    assert last == "NVML_ERROR_TIMEOUT"


def test_events_of_unwatched_gpus_and_of_the_past_are_not_delivered(mixed, watcher):
    mixed.ctl("xid", "0", "62")
    process = watcher("wait(15000)")
    mixed.ctl("xid", "2", "63")
    mixed.ctl("xid", "1", "64")
    assert json.loads(process.stdout.readline()) == [[1, XID, 64, 0xFFFFFFFF]]


def test_unsupported_event_types_are_refused(mixed):
    setup = "watched = nvmlEventSetCreate()"
    calls = [
        f"nvmlDeviceRegisterEvents(gpu(3), {SINGLE_BIT}, watched)",
        "nvmlDeviceRegisterEvents(gpu(0), 0x4, watched)",
        "nvmlDeviceRegisterEvents(gpu(0), nvmlDeviceGetSupportedEventTypes(gpu(0)), watched)",
        "nvmlEventSetFree(watched)",
    ]
    assert mixed.nvml(*calls, setup=setup) == ["NVML_ERROR_NOT_SUPPORTED"] * 2 + [None] * 2


def test_only_the_gpu_off_the_bus_is_lost(mixed):
    hold = "held = gpu(1)\nimport subprocess"
    lost = {
        "gpu(1)": "NVML_ERROR_GPU_IS_LOST",
        "nvmlDeviceGetMemoryInfo(held)": "NVML_ERROR_GPU_IS_LOST",
        "nvmlDeviceGetUtilizationRates(held)": "NVML_ERROR_GPU_IS_LOST",
        "nvmlDeviceGetComputeRunningProcesses(held)": "NVML_ERROR_GPU_IS_LOST",
        "nvmlDeviceSetComputeMode(held, 0)": "NVML_ERROR_GPU_IS_LOST",
        "nvmlDeviceGetIndex(held)": 1,
        "nvmlDeviceGetUUID(held)": "GPU-5a4f1d3e-0002-4c6b-9d57-7430c1a2b3d4",
        "nvmlDeviceGetCount()": 4,
        "nvmlDeviceGetName(gpu(0))": "Tesla T4",
    }
    fall = f"{hold}\nsubprocess.run(['{LIBRARIES}/gpusimctl', 'fall-off', '1'], check=True)"
    assert dict(zip(lost, mixed.nvml(*lost, setup=fall))) == lost
    mixed.ctl("recover", "1")
    assert mixed.nvml("nvmlDeviceGetName(gpu(1))") == ["Tesla V100-SXM2-16GB"]


def test_nvml_reports_a_driver_that_is_not_loaded(mixed):
    mixed.ctl("nvml-fail", "on")
    code = "import pynvml\ntry:\n    pynvml.nvmlInit()\nexcept pynvml.NVMLError as error:\n    print(error.value)"
    assert mixed.run(sys.executable, "-c", code).stdout == "9\n"
    mixed.ctl("nvml-fail", "off")
    assert mixed.nvml("nvmlDeviceGetCount()") == [4]


def test_without_a_profile_nvml_reports_a_driver_that_is_not_loaded(mixed):
    mixed.profile.unlink()
    code = "import pynvml\ntry:\n    pynvml.nvmlInit()\nexcept pynvml.NVMLError as error:\n    print(error.value)"
    assert mixed.run(sys.executable, "-c", code).stdout == "9\n"


@needs_root
def test_ecc_errors_are_counted_and_cleared(mixed):
    total = "nvmlDeviceGetTotalEccErrors(gpu(0), {}, {})"
    every = [total.format(kind, scope) for kind in (0, 1) for scope in (0, 1)]
    dram = "nvmlDeviceGetMemoryErrorCounter(gpu(0), 0, 0, NVML_MEMORY_LOCATION_DRAM)"
    sram = "nvmlDeviceGetMemoryErrorCounter(gpu(0), 0, 0, NVML_MEMORY_LOCATION_SRAM)"
    mixed.ctl("ecc", "0", "5", "single")
    mixed.ctl("ecc", "0", "2")
    assert mixed.nvml(*every, dram, sram) == [5, 5, 2, 2, 5, 0]
    assert mixed.nvml("nvmlDeviceClearEccErrorCounts(gpu(0), NVML_VOLATILE_ECC)", *every) == [None, 0, 5, 0, 2]
