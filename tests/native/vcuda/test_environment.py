# SPDX-License-Identifier: Apache-2.0
"""If there is a limits file, environment variables can only tighten its limits. Without a file they set the limits.
Invalid values are ignored. Strings such as ``image 20 4096`` (load code of 4096 bytes into register 20) are commands to
programs/puppet.c."""

from __future__ import annotations

import os

import layouts
import pytest
from conftest import CARD, LIMIT, MIB, OK, OOM, PRELOAD, PROFILE, Host, compile_program
from test_coverage_graphs import say

GIB = 1 << 30
ALL, FIRST, SECOND = "CUDA_DEVICE_MEMORY_LIMIT", "CUDA_DEVICE_MEMORY_LIMIT_0", "CUDA_DEVICE_MEMORY_LIMIT_1"

# Columns: the environment variables; the expected total memory of device 0 and of device 1. The limits file allows 5386
# MiB on each device.
TIGHTER = [
    ({}, LIMIT, LIMIT),
    ({ALL: "2g"}, 2 * GIB, 2 * GIB),
    ({ALL: "2G"}, 2 * GIB, 2 * GIB),
    ({ALL: "2048m"}, 2 * GIB, 2 * GIB),
    ({ALL: "2097152K"}, 2 * GIB, 2 * GIB),
    ({ALL: "2147483648"}, 2 * GIB, 2 * GIB),
    ({ALL: "8g"}, LIMIT, LIMIT),
    ({FIRST: "1g"}, GIB, LIMIT),
    ({SECOND: "1g"}, LIMIT, GIB),
    ({ALL: "2g", SECOND: "1g"}, 2 * GIB, GIB),
    ({ALL: "1g", SECOND: "2g"}, GIB, 2 * GIB),
    ({SECOND: "9g"}, LIMIT, LIMIT),
    ({"CUDA_DISABLE_CONTROL": "true"}, LIMIT, LIMIT),
]


@pytest.mark.parametrize(("variables", "first", "second"), TIGHTER)
def test_variables_only_tighten_a_limits_file(host: Host, variables: dict, first: int, second: int) -> None:
    puppet = host.puppet(**variables)
    assert puppet.result("init") == OK
    assert [puppet.say("total 0"), puppet.say("total 1")] == [[OK, first], [OK, second]]
    assert [puppet.say("nvml 0")[1], puppet.say("nvml2 1")[1]] == [first, second]
    puppet.get("ctx", 0)
    puppet.get("alloc", first - host.on_card())
    assert puppet.refused("alloc", 1) == OOM


@pytest.mark.parametrize(
    "value",
    ["", "0", "0m", "-1", "2t", "2gb", "1.5g", "g", "0x100", "99999999999999999999", "17179869184g", " 2g", "2g "],
)
@pytest.mark.parametrize("name", [ALL, FIRST])
def test_invalid_value_is_logged_and_ignored(host: Host, name: str, value: str) -> None:
    puppet = host.puppet(**{name: value})
    assert puppet.result("init") == OK
    assert puppet.say("total 0") == [OK, LIMIT]
    lines = [line for line in puppet.errors().splitlines() if name in line]
    assert len(lines) == 1 and "libvgpu.so" in lines[0] and "ignored" in lines[0]


@pytest.mark.parametrize(
    ("variables", "first", "second"),
    [
        ({ALL: "2g"}, 2 * GIB, 2 * GIB),
        ({FIRST: "2g"}, 2 * GIB, CARD),
        ({SECOND: "2g"}, CARD, 2 * GIB),
        ({ALL: "3g", FIRST: "2g"}, 2 * GIB, 3 * GIB),
        ({ALL: "2g", "CUDA_DISABLE_CONTROL": "true"}, CARD, CARD),
        ({ALL: "nonsense"}, CARD, CARD),
    ],
)
def test_without_a_limits_file_the_environment_sets_the_limits(
    host: Host, variables: dict, first: int, second: int
) -> None:
    host.ledger.unlink()
    puppet = host.puppet(limits=False, **variables)
    assert puppet.result("init") == OK
    assert [puppet.say("total 0"), puppet.say("total 1")] == [[OK, first], [OK, second]]
    assert [puppet.say("nvml 0")[1], puppet.say("nvml 1")[1]] == [first, second]
    puppet.get("ctx", 0)
    assert (puppet.refused("alloc", first) == OOM) or first == CARD
    if first != CARD:
        assert host.charged() == host.on_card() > 0


def test_without_a_limits_file_processes_share_the_ledger_of_the_variable(host: Host) -> None:
    host.ledger.unlink()
    one, two = (host.puppet(limits=False, **{ALL: "2g"}).start() for _unused in range(2))
    one.get("alloc", GIB)
    assert two.refused("alloc", GIB) == OOM
    two.get("alloc", 2 * GIB - host.on_card())
    assert host.charged() == host.on_card() == 2 * GIB


@pytest.mark.parametrize(("allowed", "total"), [(True, CARD), (False, LIMIT)])
def test_control_is_disabled_only_if_the_limits_file_permits_it(host: Host, allowed: bool, total: int) -> None:
    host.write_limits(allow_disable_control=allowed)
    puppet = host.puppet(CUDA_DISABLE_CONTROL="true")
    assert puppet.result("init") == OK
    assert puppet.say("total 0") == [OK, total]


# Columns: a part of a log line; the lowest log level that prints the line.
LINES = [
    ("CUDA_TASK_PRIORITY", 0),  # An invalid variable is logged at every level.
    ("no thread to settle", 1),
    ("over the limit", 2),
    ("] call: cuCtxCreate_v2", 3),
    ("] call: cuMemAlloc_v2", 3),
    ("] call: cuMemFree_v2", 3),
    ("] call: nvmlDeviceGetMemoryInfo", 3),
    ("were not asked for", 4),
    ("] trace: cuGetProcAddress: cuMemAlloc for CUDA 3020 is this library's", 5),
    ("] trace: cuGetProcAddress: cuCtxGetLimit for CUDA 3010 is the driver's", 5),
]


@pytest.mark.parametrize("level", range(6))
def test_log_level_selects_the_lines(host: Host, level: int) -> None:
    """Each log level includes the lines of the lower levels.

    Two of the lines appear only if the driver rounds allocations up and if no thread can start, so the test causes
    both."""
    host.become(PROFILE.replace("[gpu]", f"allocation_granularity = {2 * MIB}\n[gpu]"))
    none = compile_program(host.folder, "nothreads.so", "nothreads.c", flags=("-shared", "-fPIC"))
    puppet = host.puppet(
        "proc", LIBCUDA_LOG_LEVEL=str(level), CUDA_TASK_PRIORITY="urgent", LD_PRELOAD=f"{PRELOAD}:{none}"
    ).start()
    say(puppet, f"image 20 {MIB}", "function 21 20", "launch 21", "launch 21", "sync")
    assert puppet.refused("alloc", LIMIT) == OOM
    for _unused in range(100):
        puppet.get("alloc", 2 * MIB + 1)
    assert puppet.result("free 2") == OK
    puppet.say("nvml 0")
    said = puppet.errors()
    assert {text: text in said for text, _least in LINES} == {text: level >= least for text, least in LINES}
    assert all(line.startswith("libvgpu.so[") for line in said.splitlines())


def test_limits_file_sets_the_log_level(host: Host) -> None:
    host.write_limits(log_level=3)
    assert "a context on" in host.puppet().start().errors()


# Columns: the value of CUDA_VISIBLE_DEVICES, where {n} stands for the UUID of the host's GPU n; the expected list of
# the host's GPUs in CUDA's order.
VISIBLE = [
    *[("0", [0]), ("1", [1]), ("0,1", [0, 1]), ("1,0", [1, 0])],
    *[("{1}", [1]), ("{1},{0}", [1, 0]), ("{1},0", [1, 0]), ("1,9,0", [1])],
    *[("{1:.12}", [1]), ("{1:.12},{0:.12}", [1, 0]), (" 1 , {0:.14}", [1, 0])],
]


@pytest.mark.parametrize(("visible", "order"), VISIBLE)
def test_limits_follow_the_uuid_of_a_visible_gpu(host: Host, visible: str, order: list) -> None:
    sizes = [3 * GIB, 5 * GIB]
    devices = [{"uuid": uuid, "memory_bytes": size} for uuid, size in zip(host.uuids, sizes)]
    host.limits.write_bytes(layouts.pack_limits({"allocation": "t", "devices": devices}))
    # The number at the end of the variable's name counts the container's GPUs, not only those that are visible to this
    # process.
    puppet = host.puppet(CUDA_VISIBLE_DEVICES=visible.format(*host.uuids), **{SECOND: "4g"})
    assert puppet.result("init") == OK
    sizes[1] = 4 * GIB
    for ordinal, gpu in enumerate(order):
        assert puppet.say(f"total {ordinal}") == [OK, sizes[gpu]]
        puppet.get("ctx", ordinal)
        puppet.get("alloc", 100 * MIB + gpu)
        assert host.charged(gpu) == host.on_card(gpu) > 100 * MIB
        assert puppet.say("info") == [OK, sizes[gpu] - host.on_card(gpu), sizes[gpu]]
    # NVML still shows all GPUs in its own order.
    for gpu in range(2):
        assert puppet.say(f"nvml {gpu}")[1:4] == [sizes[gpu], host.on_card(gpu), sizes[gpu] - host.on_card(gpu)]


@pytest.mark.parametrize("relative", [False, True])
def test_overwritten_environment_changes_nothing(host: Host, relative: bool) -> None:
    """The program overwrites its environment and changes its working directory before its child opens the ledger."""
    path = os.path.relpath(host.ledger) if relative else str(host.ledger)
    puppet = host.puppet(CUDA_DEVICE_MEMORY_SHARED_CACHE=path)
    assert puppet.result("total 0") != OK
    assert puppet.result("title") == OK
    puppet.say("fork")
    puppet.start()
    assert host.charged() == host.on_card() > 0
