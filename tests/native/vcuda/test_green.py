# SPDX-License-Identifier: Apache-2.0
"""A green context (from driver 550 on) can use only some of the GPU's SMs. Its memory is charged and its launches are
throttled as in any other context. Strings such as ``call cuMemFree_v2 $10`` are commands to programs/puppet.c: $10 is
the value of register 10, @10 its address."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from conftest import (
    BUILD,
    LIMIT,
    LINKED,
    MIB,
    NOT_PERMITTED,
    OK,
    OOM,
    PROFILE,
    SIMULATOR,
    Host,
    Puppet,
    compile_program,
    layouts,
)
from shares import Container, Node
from test_coverage_graphs import say

DRIVER = BUILD / "gpusim-550"
OF_550 = PROFILE.replace("535.261.03", "550.163.01").replace("12.2", "12.4")
RESOURCE, GROUPS, PART, DESCRIPTION = 200, 230, 240, 270
# Registers of the first green context and of its CUDA context. For a further green context, its number is added to
# both.
GREEN, CONTEXT = 280, 300


@pytest.fixture
def host(programs: Path, tmp_path: Path):
    host = Host(tmp_path, programs, OF_550)
    host.driver_env["LD_LIBRARY_PATH"] = f"{DRIVER}:{SIMULATOR}"
    host.write_limits()
    yield host
    host.close()


def part(puppet: Puppet, sms: int = 16) -> None:
    say(
        puppet,
        f"call cuDeviceGetDevResource 0 @{RESOURCE} 1",
        f"put {GROUPS} 1",
        f"call cuDevSmResourceSplitByCount @{PART} @{GROUPS} @{RESOURCE} 0 0 {sms}",
        f"call cuDevResourceGenerateDesc @{DESCRIPTION} @{PART} 1",
    )


def green(puppet: Puppet, number: int = 0) -> int:
    part(puppet)
    status = puppet.result(f"call cuGreenCtxCreate @{GREEN + number} ${DESCRIPTION} 0 1")
    if status == OK:
        say(puppet, f"call cuCtxFromGreenCtx @{CONTEXT + number} ${GREEN + number}")
    return status


def enter(puppet: Puppet, number: int = 0) -> None:
    say(puppet, f"call cuCtxSetCurrent ${CONTEXT + number}")


def leave(puppet: Puppet, number: int = 0) -> None:
    say(puppet, f"call cuGreenCtxDestroy ${GREEN + number}")


def started(host: Host, **options: object) -> Puppet:
    puppet = host.puppet(**options)
    assert puppet.result("init") == OK
    return puppet


def agree(host: Host) -> int:
    assert host.charged() == host.on_card()
    return host.on_card()


def test_green_context_gets_a_part_of_the_sms(host: Host) -> None:
    puppet = started(host)
    assert green(puppet) == OK
    say(puppet, f"call cuGreenCtxGetDevResource ${GREEN} @{RESOURCE} 1")
    assert puppet.say(f"show {RESOURCE + 12} 1")[1] & 0xFFFFFFFF == 16


def test_green_context_is_charged_with_the_primary_context_it_creates(host: Host) -> None:
    puppet = started(host)
    say(puppet, "retain 1 0")
    primary = agree(host)
    say(puppet, "release 0")
    assert agree(host) == 0
    assert green(puppet) == OK
    one = agree(host)
    assert one > primary, "a green context takes no memory of its own, so the test proves less"
    assert green(puppet, 1) == OK
    assert agree(host) == 2 * one - primary
    leave(puppet)
    assert agree(host) == one
    leave(puppet, 1)
    assert agree(host) == 0
    assert puppet.result(f"call cuGreenCtxDestroy ${GREEN}") != OK
    assert agree(host) == 0


@pytest.mark.parametrize("order", ["green first", "primary first", "reset"])
def test_green_context_keeps_the_primary_context(host: Host, order: str) -> None:
    puppet = started(host)
    say(puppet, "retain 1 0")
    primary = agree(host)
    assert green(puppet) == OK
    enter(puppet)
    say(puppet, f"alloc 50 {7 * MIB}", f"module 51 {20 * MIB}")
    both = agree(host)
    if order == "green first":
        leave(puppet)
        say(puppet, "set 1")
        assert primary + 27 * MIB <= agree(host) < both, (
            "memory allocated in the green context must stay with the primary context"
        )
        say(puppet, "free 50", "release 0")
    elif order == "primary first":
        say(puppet, "release 0")
        assert agree(host) == both
        leave(puppet)
    else:
        say(puppet, "reset 0")
    assert agree(host) == 0


def test_reset_frees_the_memory_of_many_green_contexts(host: Host) -> None:
    puppet = started(host)
    for number in range(0, 40 * 70, 40):  # Each green context uses two registers.
        assert green(puppet, number) == OK
        enter(puppet, number)
        say(puppet, f"alloc {GREEN + number + 1} {MIB}", "set 0")
    assert agree(host) > 70 * MIB
    say(puppet, "reset 0")
    assert agree(host) == 0


def test_memory_of_a_green_context_is_limited(host: Host) -> None:
    puppet = started(host)
    assert green(puppet) == OK
    enter(puppet)
    rest = LIMIT - agree(host)
    assert puppet.refused("alloc", rest + 1) == OOM
    say(puppet, f"alloc 50 {rest}")
    assert agree(host) == LIMIT
    assert puppet.say("info") == [OK, 0, LIMIT]
    say(puppet, "free 50", f"async 51 {9 * MIB}")
    say(puppet, "call cuStreamCreate @60 1", f"call cuMemAllocAsync @61 {5 * MIB} $60")
    agree(host)
    say(puppet, "call cuMemFreeAsync $61 $60", "free-async 51", "sync")
    agree(host)


@pytest.mark.parametrize("left", [0, 8 * MIB])
def test_green_context_over_the_limit_is_refused(host: Host, left: int) -> None:
    puppet = started(host)
    say(puppet, "retain 1 0", "set 1")
    say(puppet, f"alloc 50 {LIMIT - agree(host) - left}")
    assert green(puppet) == (OK if left else OOM)
    assert agree(host) <= LIMIT
    before = agree(host)
    other = started(host)  # The slice has no room for the primary context of a new process.
    assert green(other) == OOM
    assert agree(host) == before


def test_green_context_is_refused_while_the_limits_deny(host: Host) -> None:
    """The primary context already exists and stays."""
    puppet = started(host)
    say(puppet, "retain 1 0")
    before = agree(host)
    limits = layouts.as_packed(layouts.parse_limits(host.limits.read_bytes()))
    layouts.rewrite_limits(str(host.limits), dict(limits, deny=True))
    assert green(puppet) == NOT_PERMITTED
    assert str(host.limits) in puppet.errors()
    assert agree(host) == before
    layouts.rewrite_limits(str(host.limits), limits)
    assert green(puppet) == OK
    leave(puppet)
    assert agree(host) == before


def test_green_context_is_charged_if_nvml_shows_no_process(host: Host) -> None:
    folder = host.folder / "lib"
    folder.mkdir()
    known = (SIMULATOR / "libnvidia-ml.so.1").read_bytes()
    (folder / "libnvidia-ml.so.1").write_bytes(known.replace(b"RunningProcesses", b"RunningProcessez"))
    puppet = started(host, LD_LIBRARY_PATH=f"{folder}:{DRIVER}")
    assert green(puppet) == OK
    assert host.charged() >= host.on_card() > 0
    leave(puppet)
    assert host.charged() == host.on_card() == 0


@pytest.mark.parametrize("way", ["green", "green-default"])
@pytest.mark.parametrize("percent", [40, 0])
def test_launches_in_a_green_context_are_charged(host: Host, way: str, percent: int) -> None:
    """The program launches 300 kernels. On all 80 SMs each would take 50 us, so on the 16 SMs of the green context it
    takes five times as long."""
    node = Node(host)
    container = Container(node, "a", percent, core_policy="force")
    program = compile_program(node.folder, "green", "green.c", flags=LINKED)
    env = host.env(
        CUDA_DEVICE_MEMORY_SHARED_CACHE=str(container.view / "ledger"),
        VGPU_LIMITS_FILE=str(container.folder / "limits"),
    )
    done = subprocess.run([program, way], env=env, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    assert done.stdout == "ok\n"
    used = container.said()["used_ns"]
    node.close()
    assert used > 0.8 * 300 * 5 * 50_000 if percent else used == 0
