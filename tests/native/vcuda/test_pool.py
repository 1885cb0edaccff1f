# SPDX-License-Identifier: Apache-2.0
"""Tests destroyed pools of stream-ordered memory. The driver keeps the memory of a destroyed pool until the last block
is freed, or until no context of the device is left. Strings such as ``frompool 10 4096 3`` (allocate 4096 bytes from
the pool in register 3, keep the address in register 10) are commands to programs/puppet.c."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from conftest import LIMIT, MIB, OK, OOM, SOURCES, Host, compile_program
from test_coverage_graphs import say

POOL, BLOCK, UNIT = 3, 10, 2 * MIB


def destroyed(size: int, blocks: int = 1) -> list[str]:
    """Returns the commands that allocate blocks from a pool and destroy the pool."""
    takes = [f"frompool {BLOCK + number} {size} {POOL}" for number in range(blocks)]
    return [f"pool {POOL} 0", *takes, f"pool-destroy {POOL}"]


def test_destroyed_pool_stays_charged_in_whole_units(host: Host) -> None:
    """The driver keeps a whole unit for a block of one byte."""
    puppet = host.puppet().start()
    before = host.charged()
    pools = 10
    for number in range(pools):
        say(puppet, *destroyed(1), f"put {100 + number} ${BLOCK}")
        assert host.charged() == host.on_card() == before + (number + 1) * UNIT
    for number in range(pools):
        say(puppet, f"free-async {100 + number}")
    say(puppet, "sync")
    assert host.charged() == host.on_card() == before


def test_destroyed_pool_stays_charged_until_its_last_block_is_freed(host: Host) -> None:
    puppet = host.puppet().start()
    before = host.charged()
    say(puppet, *destroyed(64 * MIB, blocks=3))
    for number in range(3):
        assert host.charged() == before + 192 * MIB >= host.on_card()
        say(puppet, f"free-async {BLOCK + number}", "sync")
    assert host.charged() == host.on_card() == before


@pytest.mark.parametrize("end", [["reset 0"], ["release 0"]])
@pytest.mark.parametrize("pool", [destroyed(512 * MIB), destroyed(512 * MIB)[:-1]], ids=["destroyed", "live"])
def test_end_of_the_last_context_uncharges_a_pool(host: Host, pool: list[str], end: list[str]) -> None:
    puppet = host.puppet()
    say(puppet, "init")
    for _unused in range(3):
        say(puppet, "retain 1 0", "set 1", *pool, *end)
        assert host.charged() == host.on_card() == 0
    say(puppet, "retain 1 0", "set 1")
    assert puppet.result(f"free-async {BLOCK}") != OK
    say(puppet, f"alloc {BLOCK} {LIMIT - host.on_card()}")


def test_pool_stays_charged_while_another_context_of_the_device_is_left(host: Host) -> None:
    puppet = host.puppet().start()
    before = host.charged()
    say(puppet, "ctx 5 0", *destroyed(512 * MIB), "ctx-destroy 5")
    assert host.charged() == host.on_card() == before + 512 * MIB
    assert puppet.refused("alloc", LIMIT - before - 511 * MIB) == OOM
    say(puppet, f"free-async {BLOCK}", "sync")
    assert host.charged() == host.on_card() == before


@pytest.fixture(scope="module")
def unit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    flags = (str(SOURCES / "memory/pool.c"), "-Wl,--wrap=calloc", "-lpthread")
    return compile_program(tmp_path_factory.mktemp("pool"), "pool_unit", "pool_unit.c", flags=flags)


@pytest.mark.parametrize("what", ["race", "many"])
def test_pool_records_follow_the_drivers_handles(unit: Path, what: str) -> None:
    done = subprocess.run([unit, what], stderr=subprocess.PIPE, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
