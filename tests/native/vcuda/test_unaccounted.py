# SPDX-License-Identifier: Apache-2.0
"""Tests memory that the driver uses but the library did not count, for example because the driver rounds allocations
up. Each time that the library's count (the charge) has grown by a step, the library compares it with the memory in use
on the card, and charges the difference. The string ``alloc {} {}`` is a command to programs/puppet.c, with the number
of the register that keeps the pointer, and a size in bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import HERE, LIMIT, MIB, OK, OOM, PROFILE, SIMULATOR, Host, Puppet

UNIT = 2 * MIB
STEP = LIMIT // 32 + UNIT  # The most by which the charge grows between two comparisons.


@pytest.fixture
def rounding(programs: Path, tmp_path: Path):
    host = Host(tmp_path, programs, PROFILE.replace("[gpu]", f"allocation_granularity = {UNIT}\n[gpu]"))
    host.write_limits()
    yield host
    host.close()


def fill(puppet: Puppet, size: int, most: int = 4000) -> list:
    registers = []
    while len(registers) < most and puppet.result(f"alloc {len(registers) + 10} {size}") == OK:
        registers.append(len(registers) + 10)
    return registers


@pytest.mark.parametrize("size", [UNIT // 2 + 1, UNIT + 1])
def test_rounded_allocations_do_not_exceed_the_slice(rounding: Host, size: int) -> None:
    puppet = rounding.puppet().start()
    context = rounding.charged()
    registers = fill(puppet, size)
    assert rounding.on_card() <= LIMIT + 2 * STEP
    assert rounding.on_card() - context > 1.9 * size * len(registers) > 0, (
        "the driver must take twice the requested bytes"
    )
    assert puppet.refused("alloc", UNIT) == OOM
    for register in registers:
        assert puppet.result(f"free {register}") == OK
    assert rounding.charged() == rounding.on_card() == context
    assert puppet.free_bytes() == LIMIT - context


def test_rounded_allocations_do_not_exceed_the_slice_without_contexts(rounding: Host) -> None:
    rounding.write_limits(count_context=False)
    puppet = rounding.puppet().start()
    context = rounding.on_card()
    fill(puppet, UNIT + 1)
    assert rounding.on_card() - context <= LIMIT + 2 * STEP


def test_rounded_allocations_of_two_processes_do_not_exceed_the_slice(rounding: Host) -> None:
    puppets = [rounding.puppet().start() for _unused in range(2)]
    fill(puppets[0], UNIT + 1, 300)
    fill(puppets[1], UNIT + 1)
    assert LIMIT - STEP < rounding.on_card() <= LIMIT + 4 * STEP


def test_destroyed_context_uncharges_rounded_memory(rounding: Host) -> None:
    puppet = rounding.puppet()
    assert puppet.result("init") == OK
    puppet.get("retain", 0)
    assert puppet.result("set 1") == OK
    fill(puppet, UNIT + 1, 100)
    assert rounding.charged() > 190 * UNIT
    assert puppet.result("reset 0") == OK
    assert rounding.charged() == rounding.on_card() == 0


def test_killed_process_leaves_no_rounded_charge(rounding: Host) -> None:
    victim, survivor = rounding.puppet().start(), rounding.puppet().start()
    fill(victim, UNIT + 1, 100)
    assert rounding.charged() > 190 * UNIT
    victim.process.kill()
    victim.process.wait()
    assert survivor.free_bytes() == LIMIT - rounding.on_card()


def test_driver_without_rounding_is_charged_the_requested_bytes(host: Host) -> None:
    puppet = host.puppet().start()
    context = host.charged()
    registers = fill(puppet, UNIT + 1, 300)
    assert host.charged() == host.on_card() == context + len(registers) * (UNIT + 1)


@pytest.fixture
def hidden(rounding: Host) -> dict:
    """Returns the environment of a container in which NVML shows no process."""
    folder = rounding.folder / "lib"
    folder.mkdir()
    (folder / "libcuda.so.1").symlink_to(SIMULATOR / "libcuda.so.1")
    known = (SIMULATOR / "libnvidia-ml.so.1").read_bytes()
    (folder / "libnvidia-ml.so.1").write_bytes(known.replace(b"RunningProcesses", b"RunningProcessez"))
    return {"program": "puppet-unlinked", "LD_LIBRARY_PATH": str(folder)}


@pytest.mark.parametrize("size", [UNIT // 2 + 1, UNIT + 1])
def test_rounding_is_learned_from_addresses_if_nvml_shows_no_process(rounding: Host, hidden: dict, size: int) -> None:
    """NVML does not show how much memory each process uses, so the library learns the rounding from the addresses of
    allocations. Memory of a neighbour must not be charged to the slice."""
    neighbour = rounding.puppet(preload=False).start()
    puppet = rounding.puppet("handle", **hidden).start()
    context = rounding.charged()
    neighbour.get("alloc", 3000 * MIB)
    others = sum(size for pid, size in rounding.physical().items() if pid != puppet.process.pid)
    registers = fill(puppet, size)
    assert rounding.on_card() - others <= LIMIT + 2 * STEP
    assert rounding.on_card() - others - context > 1.9 * size * len(registers) > 0
    assert puppet.refused("alloc", UNIT) == OOM
    for register in registers[1::2]:
        assert puppet.result(f"free {register}") == OK
    assert abs(rounding.charged() - (rounding.on_card() - others)) <= STEP
    for register in registers[::2]:
        assert puppet.result(f"free {register}") == OK
    assert rounding.charged() == rounding.on_card() - others == context


@pytest.mark.parametrize("hides", [False, True])
def test_small_blocks_in_one_unit_are_charged_once(host: Host, rounding: Host, hidden: dict, hides: bool) -> None:
    """The driver puts a thousand blocks of 512 bytes into one unit of 2 MiB. The library must charge this unit once."""
    environment = {"LD_LIBRARY_PATH": hidden["LD_LIBRARY_PATH"]} if hides else {}
    puppet = host.puppet("handle", program="puppet-unlinked", **environment).start()
    context = host.charged()
    registers = fill(puppet, 512, 1000)
    assert len(registers) == 1000
    puppet.get("alloc", 40 * MIB)
    assert host.charged() - context - 40 * MIB - 1000 * 512 in ((UNIT - 1000 * 512,) if hides else (0,))


@pytest.mark.parametrize("preload", [True, False])
def test_memory_of_other_interfaces_than_cuda_is_charged(host: Host, preload: bool) -> None:
    """A program also gets GPU memory from other interfaces, such as a video decoder. At the next comparison the library
    charges this memory, so less is left for CUDA."""
    other, piece = 1000 * MIB, 16 * MIB
    command = [sys.executable, HERE / "programs" / "beside.py", str(other), str(piece), str(LIMIT // piece)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=host.env(preload=preload), **pipes) as process:  # type: ignore[call-overload]
        granted = int(process.stdout.readline())
        held = host.on_card()
        process.stdin.close()
    assert granted > 100
    assert held >= other + granted * piece
    assert (held <= LIMIT + STEP) == preload, (
        "the use must stay within the limit with the library, and exceed it without"
    )
